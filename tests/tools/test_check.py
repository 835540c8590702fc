"""`xla-adapters check`: what it sees of the first steps of a script, and what it makes of that."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.architecture import ROOT
from tests.isolation import run_in_child
from xla_adapters import ConfigError, runtime
from xla_adapters.cli import main
from xla_adapters.tools import check_report, user_script
from xla_adapters.tools.check_facts import Facts, StepFacts
from xla_adapters.tools.check_report import CLEAN, FAILED, FOUND, CheckReport, check_script
from xla_adapters.tools.check_watch import run
from xla_adapters.tools.user_script import GROUP

_SCRIPTS = Path(__file__).with_name("scripts")
_HF_OPTIONS = "--output_dir out --do_train --do_eval --per_device_train_batch_size 8 --dataloader_num_workers 2"
_CLASSES = {
    "transformers.trainer.Trainer": "hf_trainer.check:checked",
    "lightning.pytorch.trainer.trainer.Trainer": "lightning_strategy.check:checked",
    "lightning.fabric.fabric.Fabric": "lightning_strategy.check:checked_fabric",
}
_LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import xla_adapters

xla_adapters.initialize()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
"""
_FAULTS = (
    _LOOP
    + """
losses = []
for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.randn(70, 8)), batch_size=8)):
    with xla_adapters.step():
        hidden = model(batch[: 8 - number % 2].to("xla"))
        root = torch.linalg.cholesky(hidden.T @ hidden + torch.eye(8, device="xla"))
        loss = hidden.square().mean() + root.mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)
_CLEAN = (
    _LOOP
    + """
@xla_adapters.CompiledStep
def train(batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

for (batch,) in DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8):
    loss = train(batch)
    print(loss.item())
torch.save({"loss": loss.cpu()}, "loss.pt")
open("log.txt", "w").write("done")
import os
os.makedirs("cache/fonts")
open("cache/fonts/list.json", "w").write("{}")
os.makedirs("cache", exist_ok=True)
"""
)
_TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        if loss > 50:
            print("high")
        return loss

def collate(rows):
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens, "attention_mask": (tokens > 0).long()}

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8))
rows = torch.randint(1, 16, (22, 8))
rows[:, 4:] = 0
arguments = TrainingArguments("out", per_device_train_batch_size=4, max_steps=9, save_steps=1, use_cpu=False)
trainer = MyTrainer(model, arguments, train_dataset=list(rows), data_collator=collate)
trainer.train()
trainer.save_model("final")
"""
_LIGHTNING = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        (inputs,) = batch
        loss = self.layer(inputs).double().square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
trainer = L.Trainer(max_epochs=3, devices=1, accelerator="cpu", enable_progress_bar=False)
trainer.fit(Net(), loader)
trainer.save_checkpoint("final.ckpt")
"""


def _checked(folder: Path, text: str, steps: int = 6) -> tuple[CheckReport, list[str]]:
    """The report on a script, and the files that it left."""
    present, scratch = folder / "run", folder / "scratch"
    present.mkdir()
    scratch.mkdir()
    script = present / "train.py"
    script.write_text(text)
    # A file that is newer than the process is not known to be what runs; the fork is older.
    os.utime(script, (0, 0))

    def check() -> Facts:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(present)
            patch.setenv("MPLCONFIGDIR", str(present / "cache"))
            # Not where the test's own folder is.
            patch.setattr(tempfile, "tempdir", str(scratch))
            patch.setattr(
                user_script,
                "entry_points",
                lambda group: [EntryPoint(name, value, group) for name, value in _CLASSES.items()],
            )
            facts = Facts(asked=steps)
            run(facts, [str(script)], scratch, lambda: None)
            return facts

    facts = run_in_child(check)
    return CheckReport(command="train.py", facts=facts), sorted(path.name for path in present.iterdir())


def _line(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def _kinds(report: CheckReport) -> list[str]:
    return [finding.kind for finding in report.findings if finding.is_problem]


def test_planted_faults_are_found_with_their_lines(tmp_path: Path) -> None:
    report, _ = _checked(tmp_path, _FAULTS)
    assert report.facts.state == "stopped"
    assert report.facts.done == 6
    assert report.status == FOUND
    lines = {finding.kind: finding.place.line for finding in reversed(report.findings) if finding.is_problem}
    assert lines["graph break"] == _line(_FAULTS, "loss.item()")
    assert lines["host operator"] == _line(_FAULTS, "cholesky")
    assert lines["recompile"] == _line(_FAULTS, "hidden = model(")
    assert lines["last batch"] == _line(_FAULTS, "DataLoader(")
    assert _kinds(report) == ["graph break", "host operator", "host operator", "recompile", "last batch"], report.text()
    (read,) = (finding for finding in report.findings if finding.kind == "graph break")
    assert read.patch == "-losses.append(loss.item())\n+losses.append(loss.detach())"
    on_host = {", ".join(item.names): (item.place.line, item.calls) for item in report.facts.host_operators}
    assert on_host == {
        "linalg_cholesky_ex": (_line(_FAULTS, "cholesky"), 6),
        "linalg_solve_triangular": (_line(_FAULTS, "loss.backward()"), 6),
    }


def test_a_clean_script_has_no_problems_and_saves_nothing(tmp_path: Path) -> None:
    report, files = _checked(tmp_path, _CLEAN, steps=50)
    assert report.facts.state == "ended"
    assert report.status == CLEAN, report.text()
    step = report.facts.steps["train"]
    assert (step.calls, step.replays, step.usual_executions) == (8, 6, 1), step.reasons
    # The file that it opens by itself is written, and told; folders of caches are not looked at.
    assert files == ["cache", "log.txt", "train.py"]
    assert [Path(file).name for file in report.facts.written if "run" in Path(file).parts] == ["log.txt"]
    assert [text.partition(" ")[0] for text in report.facts.skipped] == ["loss.pt"]


def test_without_a_runtime_it_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime, "_runtime", None)
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="neither torch_xla nor torch_tpu is installed"):
        check_script(["train.py"])
    assert main(["check", str(_SCRIPTS / "three_faults.py")]) == FAILED
    assert capsys.readouterr().err.splitlines()[-1].startswith("xla-adapters: neither torch_xla nor torch_tpu")


def test_a_stock_trainer_of_transformers_is_checked_with_our_steps(tmp_path: Path) -> None:
    report, files = _checked(tmp_path, _TRANSFORMERS)
    assert report.facts.state == "stopped", report.text()
    assert files == ["train.py"]
    assert _kinds(report) == ["graph break", "last batch", "padding"]
    assert report.findings[0].place.line == _line(_TRANSFORMERS, "if loss > 50")
    assert "torch.where" in report.findings[0].to_do
    assert "50% of the tokens" in report.findings[2].title
    assert ["MyTrainer" in text for text in report.facts.changed] == [True]
    assert report.facts.skipped[0] == "the checkpoint of step 1"


def test_a_stock_trainer_of_lightning_is_checked_with_our_strategy(tmp_path: Path) -> None:
    report, files = _checked(tmp_path, _LIGHTNING)
    assert report.facts.state == "stopped", report.text()
    assert files == ["train.py"]
    assert _kinds(report) == ["on a TPU"]
    assert report.findings[0].place.line == _line(_LIGHTNING, "double()")
    assert ".float().square()" in report.findings[0].patch
    assert "accelerator='cpu', devices=1" in report.facts.changed[0]


def test_what_the_adapter_refuses_is_a_finding(tmp_path: Path) -> None:
    text = _TRANSFORMERS.replace("use_cpu=False", "use_cpu=True")
    report, _ = _checked(tmp_path, text)
    assert (report.facts.state, report.status) == ("refused", FOUND)
    assert report.findings[0].place.line == _line(text, "trainer = MyTrainer(")
    assert "leave use_cpu off" in report.findings[0].title


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("import torch\nprint(torch.ones(2) / [])\n", "the script failed: TypeError: unsupported operand"),
        ("print('no step')\n", "the script ended without a step of xla-adapters"),
        ("import sys\nsys.exit(3)\n", "the script failed: the script ended with the exit status 3"),
    ],
)
def test_a_script_that_cannot_be_checked(tmp_path: Path, text: str, failure: str) -> None:
    report, _ = _checked(tmp_path, text)
    assert report.status == FAILED
    assert report.failure.startswith(failure)
    assert failure in report.text()


def test_options_of_the_script_do_not_end_the_check(tmp_path: Path) -> None:
    text = _FAULTS.replace("adapters.step()", "adapters.step(on_graph_break='error', max_graphs=1, xla_mode='eager')")
    report, _ = _checked(tmp_path, text)
    assert report.facts.done == 6, report.text()
    assert report.facts.changed == ["xla_mode='eager': checked as 'eager+compile', the mode that compiles steps"]


def test_the_package_registers_what_is_put_in() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    assert declared == _CLASSES
    for name, value in _CLASSES.items():
        assert callable(EntryPoint(name, value, GROUP).load())


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(_FAULTS)
    written = [tmp_path / "report.html", tmp_path / "report.json"]
    options = ["--steps", "3", "--html", str(written[0]), "--json", str(written[1])]
    assert main(["check", *options, str(script)]) == FOUND
    assert f"{script}:{_line(_FAULTS, 'loss.item()')}: losses.append(loss.item())" in capsys.readouterr().out
    values = json.loads(written[1].read_text())
    assert (values["status"], values["facts"]["asked"]) == (FOUND, 3)
    assert "losses.append(loss.detach())" in written[0].read_text()


@pytest.mark.slow
def test_a_script_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    report = check_script([str(script)], timeout=15)
    assert report.failure == "the script had no more than 15 s (its timeout) after 0 of 8 steps"


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--steps", "3", "{script}", "--steps", "5", "-m"], ["{script}", "--steps", "5", "-m"]),
        (["--steps", "3", "-m", "some.module", "--steps", "5", "-o"], ["-m", "some.module", "--steps", "5", "-o"]),
    ],
)
def test_what_follows_is_the_scripts(
    arguments: list[str], command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    given: list[Any] = []

    def check(command: list[str], *, steps: int, **_: Any) -> CheckReport:
        given.append((command, steps))
        steps_taken = {"train": StepFacts(calls=6, updates=6, replays=3, may_replay=True)}
        return CheckReport(command="", facts=Facts(asked=6, state="stopped", steps=steps_taken))

    monkeypatch.setattr(check_report, "check_script", check)
    assert main(["check", *(part.format(script=script) for part in arguments)]) == CLEAN
    assert given == [([part.format(script=script) for part in command], 3)]


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == main(["check", "-m"]) == FAILED
    assert main(["check", str(tmp_path / "none.py")]) == FAILED
    (tmp_path / "train.ipynb").write_text("{}")
    assert main(["check", str(tmp_path / "train.ipynb")]) == FAILED
    errors = capsys.readouterr().err
    assert "is a notebook, and this command runs scripts" in errors
    assert "give the script to check" in errors
    assert "there is no file" in errors
    with pytest.raises(SystemExit):
        main(["check", "--steps", "0", "train.py"])


_FAULTS_FOUND = [
    ("graph break", 33),
    ("host operator", 31),
    ("host operator", 34),
    ("last batch", 27),
    ("on a TPU", 31),
]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param(f"stock_trainer.py {_HF_OPTIONS} --hidden_size 16", [("last batch", 74)], marks=pytest.mark.slow),
        pytest.param("stock_lightning.py --workers 2", [], marks=pytest.mark.slow),
        pytest.param("three_faults.py --lr 0.01", _FAULTS_FOUND, marks=pytest.mark.slow),
        pytest.param("stock_fabric.py", [], marks=pytest.mark.long),
        pytest.param("-m package.train --epochs 3", [], marks=pytest.mark.long),
        pytest.param("stock_sft.py", [], marks=pytest.mark.long),
    ],
)
def test_a_script(
    command: str, expected: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The scripts import each other's neighbours, use argparse and HfArgumentParser, and have workers.
    shutil.copytree(_SCRIPTS, tmp_path / "scripts")
    monkeypatch.chdir(tmp_path / "scripts")
    before = sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in str(path))
    report = check_script(command.split())
    text = report.text()
    assert not report.failure, text
    assert report.facts.done == 8, text
    assert [(item.kind, item.place.line) for item in report.findings if item.is_problem] == expected, text
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)) == before
