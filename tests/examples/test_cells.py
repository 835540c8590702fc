"""What readers of notebooks do: cells twice, in another order, interrupted, `initialize` too late.

Each gives the result of a program that does only that, or an error that names the cell and says what to do.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.isolation import isolated
from tests.kernels import ROOT, error_of, executed, printed

_HF = """
import signal
import torch
from transformers import TrainerCallback, TrainingArguments
from hf_trainer import Trainer

class Model(torch.nn.Module):
    def __init__(self, classes=2):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, classes)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        return {"x": self.x[n], "labels": n % 2}

class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

def make(kind=Trainer, callbacks=None, sharding=None, batch=8, data=None, model=None, **options):
    given = {"max_steps": 8, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments("out", per_device_train_batch_size=batch, learning_rate=0.1, **{**given, **options})
    return kind(model or Model(), arguments, train_dataset=data or Rows(), callbacks=callbacks, sharding=sharding)

def losses(trainer):
    return [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry]

def train(trainer):
    trainer.train()
    report = trainer.xla_report()
    print("LOSSES", losses(trainer), len(report.compiles))
"""
_LIGHTNING = """
import lightning as L
from torch.utils.data import DataLoader
from lightning_strategy import XLAEagerStrategy

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)
        self.losses = []

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch["x"]), batch["labels"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(round(outputs["loss"].item(), 4))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

def fit(net=None, batch=8, **options):
    net = net or Net()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, strategy=XLAEagerStrategy(), enable_model_summary=False, **quiet, **options)
    trainer.fit(net, DataLoader(Rows(), batch_size=batch))
    print("LOSSES", net.losses, len(trainer.strategy.xla_report().compiles))
    return net
"""
_READS = """class Reading(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        outputs = model(**inputs)
        print(outputs["loss"].item())
        return outputs["loss"]
"""


def _lines(traceback: str) -> int:
    return len(traceback.splitlines())


def _trained(outputs: Any) -> tuple[list[float], int]:
    """Losses and compiles that a cell has printed."""
    assert not error_of(outputs), error_of(outputs)
    found = re.findall(r"LOSSES (\[.*\]) (\d+)", printed(outputs))
    return ast.literal_eval(found[-1][0]), int(found[-1][1])


def _said_by_a_script(source: str, folder: Path) -> str:
    (folder / "script.py").write_text(source)
    path = f"{ROOT}{os.pathsep}{ROOT / 'adapters'}"
    ran = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_cells_twice_and_in_another_order(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    stop = """
class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
trainer = make(callbacks=[Stop()])
trainer.train()"""
    stop_inside = """
class StopInside(Own):
    calls = 0
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        StopInside.calls += 1
        if StopInside.calls == 2:
            signal.raise_signal(signal.SIGINT)
        return super().compute_loss(model, inputs, return_outputs, **options)
trainer = make(StopInside)
trainer.train()"""
    cells = {
        "hf": _HF,
        "first": "trainer = make()\ntrain(trainer)",
        "go on": "train(trainer)",
        "model anew": "trainer = make()\ntrain(trainer)",
        "other batch": "train(make(batch=16))",
        "first batch again": "train(make())",
        "other model": "train(make(model=Model(3)))",
        "stopped between": stop,
        "after that": "train(make())",
        "stopped inside": stop_inside,
        "the same trainer": "train(trainer)",
        "after that, too": "train(make())",
        "workers": "train(make(data=Rows(), dataloader_num_workers=2))",
        "lightning": _LIGHTNING,
        "fit": "net = fit()",
        "fit again": "net = fit()",
        "other batch of fit": "fit(batch=16)",
        "stopped fit": """
class StopFit(L.Callback):
    def on_train_batch_end(self, trainer, *more):
        if trainer.global_step == 3:
            signal.raise_signal(signal.SIGINT)
fit(callbacks=[StopFit()])""",
        "fit after that": "net = fit()",
        "on the host": "print(net.layer(torch.ones(1, 4)).shape)",
        "hf after lightning": "train(make())",
        "own": "trainer = make(Own)\ntrain(trainer)\nprint(trainer.xla_report())",
        "own below time": "%%time\n" + _HF.partition("class Own")[2].partition("def make")[0].join(("class Own", "")),
        "timed": "trainer = make(Own)\ntrain(trainer)\nprint(trainer.xla_report())",
        "model on the host": "trainer = make()\ntrainer.model.cpu()\ntrain(trainer)",
    }
    outputs = dict(zip(cells, executed(list(cells.values())), strict=True))
    first, compiles = _trained(outputs["first"])
    assert (len(first), compiles) == (8, 1)
    # A further training goes on from the weights of the first.
    assert _trained(outputs["go on"])[0][0] < first[0]
    for name in (
        *("model anew", "first batch again", "after that", "after that, too", "hf after lightning"),
        "workers",
        "model on the host",
    ):
        assert _trained(outputs[name]) == (first, 0), name
    assert _trained(outputs["other batch"])[1] == 1
    assert _trained(outputs["other model"])[1] == 1
    for name in ("stopped between", "stopped inside"):
        assert error_of(outputs[name]).splitlines()[-1].startswith("KeyboardInterrupt")
    # One step was done, the second was undone.
    assert len(_trained(outputs["the same trainer"])[0]) == 8
    fitted, compiles = _trained(outputs["fit"])
    assert (len(fitted), compiles) == (8, 1)
    assert _trained(outputs["fit again"]) == _trained(outputs["fit after that"]) == (fitted, 0)
    assert _trained(outputs["other batch of fit"])[1] == 1
    # What Lightning does of Ctrl-C.
    assert "SystemExit" in error_of(outputs["stopped fit"])
    assert "torch.Size([1, 2])" in printed(outputs["on the host"])
    replayed = re.findall(r"8 calls, (\d+) replayed", _said_by_a_script(f"{_HF}\n{cells['own']}", tmp_path))
    assert int(replayed[0]) > 3
    assert f"8 calls, {replayed[0]} replayed" in printed(outputs["own"])
    assert "8 calls, 0 replayed" in printed(outputs["timed"])
    assert "define it in a cell without %%time" in printed(outputs["timed"])


@pytest.mark.slow
def test_what_comes_too_late_says_to_restart_the_kernel() -> None:
    pytest.importorskip("nbclient")
    late = {
        "variables": "import os\nos.environ['CPU_NUM_DEVICES'] = '8'\nxla_adapters.initialize()",
        "device": "os.environ['CPU_NUM_DEVICES'] = '1'\nos.environ['PJRT_DEVICE'] = 'TPU'\nmake()",
        "spmd": "os.environ['PJRT_DEVICE'] = 'CPU'\nxla_adapters.initialize(spmd=True)",
        "sharding": "make(sharding='fsdp')",
        "cache": "xla_adapters.initialize(cache_dir='programs')",
    }
    cells = {
        "start": "import xla_adapters\nxla_adapters.initialize()\nimport torch\nx = torch.ones(2, device='xla') + 1",
        "hf": _HF,
        "trained": "train(make())",
        **late,
        "still trains": "train(make())\nprint(x)",
        "reads": f"{_READS}\nmake(Reading).train()",
        "recompiles": "class Short(Rows):\n    def __len__(self):\n        return 60\n"
        "make(lambda *a, **o: Own(*a, **o, on_recompile='error'), data=Short()).train()",
        "host operator": "@xla_adapters.CompiledStep\ndef spectrum(x):\n    return torch.fft.rfft(x * 2).abs()\n"
        "spectrum(torch.ones(4))",
        "warns": "class Warning_(Reading):\n    pass\n"
        "make(lambda *a, **o: Warning_(*a, **o, on_graph_break='warn'), max_steps=1).train()",
        "own error": "class Failing(Own):\n    def compute_loss(self, *given, **options):\n        return undefined\n"
        "make(Failing).train()",
        "still trains, too": "train(make())",
    }
    outputs = dict(zip(cells, executed(list(cells.values()), env={"CPU_NUM_DEVICES": "1"}), strict=True))
    for name in late:
        assert "RuntimeOrderError" in error_of(outputs[name]), (name, error_of(outputs[name]))
        assert "restart the kernel" in error_of(outputs[name])
    assert (
        _trained(outputs["trained"])[0]
        == _trained(outputs["still trains"])[0]
        == _trained(outputs["still trains, too"])[0]
    )

    number = list(cells).index("reads") + 1
    reads, line = error_of(outputs["reads"]), _READS.splitlines().index('        print(outputs["loss"].item())') + 1
    assert f'where: Cell In[{number}], line {line} in compute_loss: print(outputs["loss"].item())' in reads
    for name in ("reads", "recompiles", "host operator"):
        text = error_of(outputs[name])
        assert _lines(text) <= 40, text
        # The message is the end.
        assert text.splitlines()[-1].startswith("more: xla-adapters explain"), text
        assert "ipykernel" not in text
    assert f"Cell In[{number}]:{line}: GraphBreakWarning" in printed(outputs["warns"], "stderr")
    assert "NameError: name 'undefined' is not defined" in error_of(outputs["own error"])
    assert "/hf_trainer/" not in error_of(outputs["own error"])


@isolated(env={"IPYTHONDIR": "/nonexistent"})
def test_a_traceback_in_ipython_is_short(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.ipython_dir = str(tmp_path)
    config.InteractiveShell.colors = "nocolor"
    shell: Any = InteractiveShell.instance(config=config)

    def run(cell: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            shell.run_cell(cell, store_history=True)
        return said.getvalue()

    assert run(_HF) == ""
    text = run(f"{_READS}\nmake(Reading).train()")
    assert "where: Cell In[2], line 4 in compute_loss" in text
    assert _lines(text) <= 40, text
    assert "hidden" in text
    # All frames, for who wants them.
    shell.InteractiveTB.skip_hidden = False
    assert _lines(run("make(Reading).train()")) > 100
