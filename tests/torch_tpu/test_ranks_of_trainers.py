"""transformers' and Lightning's trainers on several ranks of TorchTPU, compared with one process on the CPU."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
import transformers
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from transformers import TrainerCallback

import hf_trainer
from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from tests.isolation import run_in_child
from tests.tiny_models import VOCABULARY, tiny
from tests.torch_tpu import stand_in
from tests.torch_tpu.ranks import on_ranks, rank
from xla_adapters.errors import RankError, UnsupportedOptionError

_ROWS = 8


def _size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class _Counting(TrainerCallback):
    """Counts from the begin of each step to that of the next."""

    def __init__(self) -> None:
        self.seen: list[stand_in.Counts] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.accelerator.synchronize()
        self.seen.append(stand_in.counts())

    def launches(self) -> list[int]:
        return [after.since(before).executions for before, after in itertools.pairwise(self.seen)]


# ---- transformers ------------------------------------------------------------------------------------


def _model(family: str, **options: Any) -> Any:
    options["attn_implementation"] = "eager"
    if family in ("llama", "mixtral"):
        options["num_key_value_heads"] = 1
    return tiny(family, **options)


def _samples(family: str, count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        if family in ("vit", "resnet"):
            size = 8 if family == "vit" else 32
            rows.append({"pixel_values": torch.randn(3, size, size, generator=generator), "labels": number % 2})
            continue
        tokens = torch.randint(1, VOCABULARY, (8,), generator=generator)
        row: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones(8, dtype=torch.long)}
        labels = tokens.clone()
        # Ranks have different numbers of items. T5's loss is a mean over a rank's own.
        labels[: number % 5 if family != "t5" else 1] = -100
        rows.append({**row, "labels": torch.tensor(number % 2) if family == "bert" else labels})
    return rows


def _arguments(folder: str | None = None, **options: Any) -> transformers.TrainingArguments:
    batch = options.pop("batch", _ROWS)
    usual: dict[str, Any] = {
        **{"max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True},
        **{"save_strategy": "no", "per_device_train_batch_size": batch // _size()},
        "per_device_eval_batch_size": batch // _size(),
    }
    return transformers.TrainingArguments(folder or tempfile.mkdtemp(), **{**usual, **options})


def _train(
    family: str = "gpt2",
    *,
    on_cpu: bool = False,
    folder: str | None = None,
    resume: str | None = None,
    rows: Any = None,
    model: dict[str, Any] | None = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    xla: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    kind: Any = transformers.Trainer if on_cpu else hf_trainer.Trainer
    counting = _Counting()
    trainer = kind(
        _model(family, **(model or {})),
        _arguments(folder, **({"use_cpu": True} if on_cpu else {}), **options),
        train_dataset=_samples(family, 64) if rows is None else rows,
        eval_dataset=_samples(family, 22),
        callbacks=[*callbacks, *(() if on_cpu else (counting,))],
        **(xla or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "weights": {name: value.detach().cpu() for name, value in trainer.model.state_dict().items()},
        "launches": [] if on_cpu else counting.launches(),
        "programs": 1 if on_cpu else len(trainer._xla.steps.train.events),
        "replayed": 0 if on_cpu else trainer._xla.steps.train.replays,
    }


def _assert_same(found: list[dict[str, Any]], expected: dict[str, Any], *, atol: float = 1e-4) -> None:
    for each in found:
        assert each["losses"] == pytest.approx(expected["losses"], abs=atol)
        for name, value in each["weights"].items():
            torch.testing.assert_close(value, expected["weights"][name], rtol=0, atol=atol, msg=name)
            assert torch.equal(value, found[0]["weights"][name]), name


_SCHEMES = pytest.mark.parametrize("scheme", ["dp", "fsdp"])


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("gpt2", 4), *((family, 2) for family in ("gpt2", "llama", "mixtral", "bert", "vit", "t5"))],
)
def test_losses_and_weights_of_one_process_in_one_launch_for_each_step(family: str, ranks: int) -> None:
    """With the whole model and with a shard of it on each rank, and another number of labels. Also tied weights."""
    expected = run_in_child(functools.partial(_train, family, on_cpu=True))
    # On four ranks, too, one scheme is enough: `test_shards` has the other one.
    for scheme in ("dp", "fsdp")[: 1 if ranks == 4 else 2]:
        found = on_ranks(ranks, functools.partial(_train, family, xla={"sharding": scheme}))
        _assert_trained(found, expected)


def _assert_trained(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    _assert_same(found, expected)
    for each in found:
        assert each["norms"] == pytest.approx(expected["norms"], abs=1e-4)
        assert each["launches"] == [1] * 5
        assert (each["programs"], each["replayed"]) == (1, 4)


@_SCHEMES
def test_accumulation(scheme: str) -> None:
    """With the whole model on each rank, gradients are exchanged at its end."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 4}
    expected = run_in_child(functools.partial(_train, on_cpu=True, **options))
    found = on_ranks(2, functools.partial(_train, **options, xla={"sharding": scheme}))
    _assert_same(found, expected)
    assert {tuple(each["launches"]) for each in found} == {(2, 2, 2)}


def test_bfloat16_and_a_stream() -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(_samples("gpt2", 32))

    def run(on_cpu: bool) -> dict[str, Any]:
        return _train(on_cpu=on_cpu, rows=Rows(), bf16=True, max_steps=5)

    expected = run_in_child(functools.partial(run, True))
    for each in (found := on_ranks(2, functools.partial(run, False))):
        assert each["losses"] == pytest.approx(expected["losses"], abs=2e-2)
        assert all(torch.equal(value, found[0]["weights"][name]) for name, value in each["weights"].items())


_WITH_DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}


def _saving(folder: str, resume: str | None, **options: Any) -> dict[str, Any]:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2} if resume is None else {}
    trained = _train(folder=folder, resume=resume, **saving, **options)
    return {**trained, "files": sorted(os.listdir(folder))}


@pytest.mark.parametrize(("scheme", "asynchronous"), [("dp", False), ("dp", True), ("fsdp", True)])
def test_a_resumed_training_goes_on_exactly(tmp_path: Path, scheme: str, asynchronous: bool) -> None:
    xla = {"sharding": scheme, "checkpoint": {"asynchronous": asynchronous}}
    whole = on_ranks(2, functools.partial(_saving, str(tmp_path), None, model=_WITH_DROPOUT, xla=xla))
    assert {"checkpoint-2", "checkpoint-4", "checkpoint-6"} <= set(whole[0]["files"])
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    resume = functools.partial(_saving, str(tmp_path), str(tmp_path / "checkpoint-2"), model=_WITH_DROPOUT, xla=xla)
    for before, after in zip(whole, on_ranks(2, resume), strict=True):
        assert after["losses"] == before["losses"]
        assert all(torch.equal(value, before["weights"][name]) for name, value in after["weights"].items())


@pytest.mark.parametrize(
    ("scheme", "ranks", "then"), [("dp", 1, None), ("dp", 4, "dp"), ("fsdp", 4, "fsdp"), ("fsdp", 2, "dp")]
)
def test_it_can_go_on_with_another_number_of_ranks(tmp_path: Path, scheme: str, ranks: int, then: str | None) -> None:
    (whole, _) = on_ranks(2, functools.partial(_saving, str(tmp_path), None, xla={"sharding": scheme}))
    resume = functools.partial(_saving, str(tmp_path), str(tmp_path / "checkpoint-4"), xla={"sharding": then})
    # One process, without a launcher.
    _assert_same([run_in_child(resume)] if ranks == 1 else on_ranks(ranks, resume), whole)


def _evaluating(on_cpu: bool) -> dict[str, Any]:
    kind: Any = transformers.Trainer if on_cpu else hf_trainer.Trainer

    def right(predictions: Any) -> dict[str, float]:
        return {"right": float((predictions.predictions.argmax(-1) == predictions.label_ids).sum())}

    trainer = kind(
        _model("bert"),
        _arguments(**({"use_cpu": True} if on_cpu else {})),
        eval_dataset=_samples("bert", 21),
        compute_metrics=right,
    )
    metrics, predicted = trainer.evaluate(), trainer.predict(_samples("bert", 13))
    return {"right": metrics["eval_right"], "loss": metrics["eval_loss"], "predicted": predicted.predictions}


def test_evaluation_counts_each_row_once() -> None:
    """Of 21 rows over 2 ranks. Losses of rows are equal but for those that fill the last batch, as in transformers."""
    expected = run_in_child(functools.partial(_evaluating, True))
    for each in on_ranks(2, functools.partial(_evaluating, False)):
        assert each["right"] == expected["right"]
        assert each["loss"] == pytest.approx(expected["loss"], abs=1e-2)
        assert each["predicted"].shape == expected["predicted"].shape
        torch.testing.assert_close(
            torch.tensor(each["predicted"]), torch.tensor(expected["predicted"]), rtol=0, atol=1e-5
        )


def _early(folder: str) -> tuple[int, int, bool, bool]:
    arguments = _arguments()
    flag = Path(folder) / "prepared"
    with arguments.main_process_first():
        finds = flag.exists()
        flag.touch()
    return arguments.process_index, arguments.world_size, arguments.should_save, finds


def test_training_arguments_know_the_ranks_before_there_is_a_trainer(tmp_path: Path) -> None:
    found = on_ranks(2, functools.partial(_early, str(tmp_path)))
    assert found == [(0, 2, True, False), (1, 2, False, True)]


class _OnOneRank(TrainerCallback):
    def __init__(self, what: str) -> None:
        self.what = what

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and rank() == 1:
            if self.what == "raises":
                raise ValueError("an error of mine")
            if self.what == "evaluates":
                control.should_evaluate = True
            if self.what == "saves":
                control.should_save = True
            if self.what == "stops":
                control.should_training_stop = True
            if self.what == "is terminated":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.what == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)


def _diverging(what: str) -> str:
    try:
        _train(callbacks=(_OnOneRank(what),))
    except (RankError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("raises", r"RankError: rank 1 has failed.*ValueError: an error of mine \(.*\.py:\d+\)", "ValueError"),
        (
            "stops",
            r"RankError: rank 0 .*Rank 1 .*the end of the training",
            r"RankError: rank 1 .*the end of the training",
        ),
        ("saves", r"RankError: rank 0 .*Rank 1 .*the save after step 3", r"RankError: rank 1 .*the save after step 3"),
        ("evaluates", r"RankError: rank 0 .*Rank 1 .*an evaluation after step 3", r"RankError: rank 1 .*an evaluation"),
    ],
)
def test_a_rank_that_leaves_the_training_is_named(what: str, first: str, second: str) -> None:
    for said, expected in zip(on_ranks(2, functools.partial(_diverging, what)), (first, second), strict=True):
        assert re.match(expected, said), said


def _terminated(folder: str, scheme: str) -> tuple[Any, list[str]]:
    try:
        _train(
            folder=folder,
            callbacks=(_OnOneRank("is terminated"),),
            xla={"sharding": scheme, "checkpoint": {"save_on": "preemption"}},
            max_steps=20,
        )
    except SystemExit as left:
        return left.code, [name for name in os.listdir(folder) if name.startswith("checkpoint")]
    return "nothing", []


@_SCHEMES
def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path: Path, scheme: str) -> None:
    assert on_ranks(2, functools.partial(_terminated, str(tmp_path), scheme)) == [(143, ["checkpoint-3"])] * 2


def _refused() -> str:
    with pytest.raises(UnsupportedOptionError) as refused:
        hf_trainer.Trainer(_model("gpt2"), _arguments(), sharding="tp")
    with pytest.raises(UnsupportedOptionError, match="shapes= in several processes"):
        XLAEagerStrategy(shapes="auto")
    with pytest.raises(UnsupportedOptionError, match="with Fabric each would train for itself"):
        XLAEagerFabricStrategy()
    return str(refused.value)


def test_what_ranks_cannot_do_is_refused() -> None:
    assert all("'fsdp' (a shard of it on each)" in said for said in on_ranks(2, _refused))


@pytest.mark.long
def test_a_script_is_launched_once_for_each_device(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.torch_tpu import stand_in\n"
        "stand_in.start()\n"
        "from tests.torch_tpu.test_ranks_of_trainers import _train\n"
        "trained = _train(max_steps=2)\n"
        "print('LOSSES', len(trained['losses']))\n"
    )
    (tmp_path / "shared").touch()
    launched = subprocess.run(
        [sys.executable, "-m", "xla_adapters.cli", "launch", "--processes", "2", str(script)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **{"PYTHONPATH": os.pathsep.join(sys.path), "SHIM_RANKS": str(tmp_path / "shared")},
            "TORCH_TPU_TOPOLOGY": "1,2,1",
        },
    )
    assert launched.stdout.count("LOSSES 2") == 2, launched.stderr


# ---- Lightning ---------------------------------------------------------------------------------------


class _Module(pl.LightningModule):
    def __init__(self, *, manual: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), drop, nn.Linear(16, 4))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        inputs, classes = batch
        loss = nn.functional.cross_entropy(self.net(inputs), classes)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        metrics = self.trainer.callback_metrics
        self.losses.append(metrics["loss_step" if "loss_step" in metrics else "loss"].item())

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, classes = batch
        scores = self.net(inputs)
        self.accuracy(scores, classes)
        self.log("accuracy", self.accuracy)
        self.log("validation", nn.functional.cross_entropy(scores, classes), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class _Counted(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[stand_in.Counts] = []

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        torch.accelerator.synchronize()
        self.seen.append(stand_in.counts())


def _data(count: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs, classes = torch.randn(count, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator)
    return torch.utils.data.TensorDataset(inputs, classes)


def _fit(
    *,
    on_cpu: bool = False,
    folder: str | None = None,
    resume: str | None = None,
    shuffle: bool = False,
    manual: bool = False,
    dropout: float = 0.0,
    kind: type[_Module] = _Module,
    callbacks: tuple[pl.Callback, ...] = (),
    xla: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    counted = _Counted()
    device: dict[str, Any] = {"accelerator": "cpu"} if on_cpu else {"strategy": XLAEagerStrategy(**(xla or {}))}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        default_root_dir=folder or tempfile.mkdtemp(),
        enable_checkpointing=bool(callbacks),
        callbacks=[*callbacks, *([] if on_cpu else [counted])],
        **{"max_epochs": 2, "num_sanity_val_steps": 0, **quiet, **device, **options},
    )
    training = _data(64)
    # Lightning's own sampler shuffles a training.
    sampler = None
    if not (shuffle or on_cpu):
        sampler = DistributedSampler(training, num_replicas=_size(), rank=rank(), shuffle=False)
    module = kind(manual=manual, dropout=dropout)
    loader = DataLoader(training, batch_size=_ROWS // _size(), sampler=sampler, shuffle=shuffle)
    trainer.fit(module, loader, DataLoader(_data(24), batch_size=_ROWS // _size()), ckpt_path=resume)
    return {
        "losses": module.losses,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "weights": {name: value.detach().cpu() for name, value in module.net.state_dict().items()},
        "launches": [after.since(before).executions for before, after in itertools.pairwise(counted.seen)],
    }


@_SCHEMES
@pytest.mark.parametrize(
    "options",
    [{"gradient_clip_val": 0.5}, {"manual": True}, {"accumulate_grad_batches": 2}],
    ids=["clipping", "manual", "accumulation"],
)
def test_a_fit_is_that_of_one_process(options: dict[str, Any], scheme: str) -> None:
    """Also values that are logged with `sync_dist`, and a metric of torchmetrics."""
    expected = run_in_child(functools.partial(_fit, on_cpu=True, **options))
    found = on_ranks(2, functools.partial(_fit, xla={"sharding": scheme}, **options))
    _assert_same(found, expected)
    for each in found:
        assert each["metrics"] == pytest.approx(expected["metrics"], abs=1e-4)
        # The eighth is followed by the validation, and the metric is computed operation by operation.
        assert each["launches"][7] < 60
        assert each["launches"][:7] == [1] * 7
        assert each["launches"][8:] == [1] * 7


def test_averages_of_weights_are_shards_too() -> None:
    def run(on_cpu: bool) -> dict[str, Any]:
        return _fit(on_cpu=on_cpu, callbacks=(EMAWeightAveraging(decay=0.5),), xla={"sharding": "fsdp"})

    _assert_same(on_ranks(2, functools.partial(run, False)), run_in_child(functools.partial(run, True)))


@pytest.mark.parametrize(("scheme", "asynchronous"), [("dp", False), ("fsdp", False), ("fsdp", True)])
def test_a_resumed_fit_goes_on_exactly(tmp_path: Path, scheme: str, asynchronous: bool) -> None:
    xla = {"sharding": scheme, "checkpoint": {"asynchronous": asynchronous}}
    options: dict[str, Any] = {"folder": str(tmp_path), "dropout": 0.1, "shuffle": True, "xla": xla}
    saving = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=5, save_top_k=-1)
    whole = on_ranks(2, functools.partial(_fit, callbacks=(saving,), **options))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [f"step={step}.ckpt" for step in (10, 15, 5)]
    resumed = on_ranks(2, functools.partial(_fit, resume=str(tmp_path / "saved" / "step=5.ckpt"), **options))
    for before, after in zip(whole, resumed, strict=True):
        assert after["losses"] == before["losses"][5:]
        assert all(torch.equal(value, before["weights"][name]) for name, value in after["weights"].items())


class _Terminating(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3 and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _terminated_fit(folder: str, saves: bool) -> tuple[str, int, int]:
    checkpoint = {"save_on": "preemption"} if saves else {}
    stepped = _Counted()
    try:
        _fit(folder=folder, callbacks=(_Terminating(), stepped), xla={"checkpoint": checkpoint})
    except SystemExit as left:
        return type(left).__name__, len(stepped.seen), len(list(Path(folder).rglob("*.ckpt")))
    return "nothing", 0, 0


@pytest.mark.parametrize(("saves", "ends_with"), [(True, "SystemExit"), (False, "SIGTERMException")])
def test_a_signal_to_one_rank_ends_the_fit_of_all(tmp_path: Path, saves: bool, ends_with: str) -> None:
    found = on_ranks(2, functools.partial(_terminated_fit, str(tmp_path), saves))
    assert found == [(ends_with, 3, int(saves))] * 2


class _Undecided(_Module):
    """Logs a value of each rank's own."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("own", torch.tensor(float(self.current_epoch * (1 - 2 * rank()))))


def _stopped_early() -> int:
    stops = EarlyStopping("own", patience=0)
    saves = ModelCheckpoint(monitor="own", save_top_k=1)
    return len(_fit(kind=_Undecided, callbacks=(stops, saves), max_epochs=3)["losses"])


def test_ranks_decide_together() -> None:
    """The metric of one rank alone gets better: Lightning stops when one of them would."""
    assert on_ranks(2, _stopped_early) == [16, 16]


class _Raising(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3 and rank() == 1:
            raise ValueError("an error of mine")


def _failing_fit() -> str:
    try:
        _fit(callbacks=(_Raising(),))
    except (RankError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_of_one_rank_ends_the_fit_of_all() -> None:
    first, second = on_ranks(2, _failing_fit)
    assert re.match(r"RankError: rank 1 has failed.*ValueError: an error of mine \(.*\.py:\d+\)", first), first
    assert second == "ValueError: an error of mine"


class _Contrastive(_Module):
    def training_step(self, batch: Any, index: int) -> Any:
        inputs, _ = batch
        embedded = nn.functional.normalize(self.net(inputs), dim=1)
        if _size() > 1:
            gathered: Any = self.all_gather(embedded, sync_grads=True)
            embedded = gathered.flatten(0, 1)
        loss = (embedded @ embedded.t()).exp().mean()
        self.log("loss", loss, on_step=True)
        return loss


def test_gathered_values_have_gradients() -> None:
    """A loss over the rows of all ranks, as of contrastive learning."""
    options: dict[str, Any] = {"kind": _Contrastive, "max_epochs": 1, "limit_val_batches": 0}
    expected = run_in_child(functools.partial(_fit, on_cpu=True, **options))
    _assert_same(on_ranks(2, functools.partial(_fit, **options)), expected)
