"""Sharding in Lightning: eight devices train as the plain CPU does, in one graph, with sharded weights and states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xla_adapters
from lightning_strategy import XLAEagerFabricStrategy, XLAEagerStrategy
from tests.isolation import isolated, run_in_child
from tests.lightning_strategy.scenarios import Classifier, assert_close, fit
from tests.lightning_strategy.scenarios import loader as small_loader
from tests.lightning_strategy.scenarios import trainer as make_trainer
from tests.support import Stream
from tests.trainers import check_cuts
from xla_adapters import get_runtime
from xla_adapters.errors import ConfigError, RuntimeOrderError, UnsupportedOptionError
from xla_adapters.sharding import ShardingConfig

pytestmark = pytest.mark.isolated(env={"CPU_NUM_DEVICES": "8"})

TOLERANCE = 1e-5
WIDTH, LENGTH, FEATURES, CLASSES, BATCH = 16, 4, 8, 8, 16


def devices(number: int) -> dict[str, str]:
    return {"CPU_NUM_DEVICES": str(number), "PJRT_DEVICE": "CPU"}


def loader(batches: int = 12, *, seed: int = 0, rows: int | None = None, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    rows = batches * BATCH if rows is None else rows
    inputs = torch.randn(rows, LENGTH, FEATURES, generator=generator)
    classes = torch.randint(0, CLASSES, (rows, LENGTH), generator=generator)
    return DataLoader(TensorDataset(inputs, classes), **{"batch_size": BATCH, **options})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down_proj(nn.functional.gelu(self.up(self.norm(values))))  # type: ignore[no-any-return]


class Tagger(Classifier):
    """Two equal blocks between linear layers; predicts a class for each position."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__(optimizer=lambda p: torch.optim.AdamW(p, lr=lr))
        del self.net
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = self.embed(inputs)
        for block in self.blocks:
            values = block(values)
        return self.head(values)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, classes = batch
        return nn.functional.cross_entropy(self(inputs).flatten(0, 1), classes.flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])  # type: ignore[no-any-return]


class Watches(L.Callback):
    """Counts compiles and executions of each training batch; checks the sharding after the last one."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.cut: set[str] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._before = get_runtime().counters.metrics()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        now = get_runtime().counters.metrics()
        self.steps.append((now.compiles - self._before.compiles, now.executions - self._before.executions))
        self._before = now

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.cut = check_cuts(trainer.strategy.sharding_plan, pl_module, trainer.optimizers[0])


def assert_same_weights(ours: nn.Module, plain: nn.Module, tolerance: float = 5 * TOLERANCE) -> None:
    """Less strict than for losses: AdamW also moves weights whose gradient is rounding error only."""
    for (name, value), other in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=tolerance, msg=name)


def both(sharding: Any, make: Callable[[], Any] = Tagger, **options: Any) -> tuple[Any, Any]:
    """The same fit sharded and on the plain CPU, one epoch; losses and weights must agree."""
    options = {"data": loader, "max_epochs": 1, **options}
    ours = fit(make, XLAEagerStrategy(sharding=sharding), **options)
    plain = fit(make, None, **{**options, "callbacks": list})
    assert_close(ours.module.losses, plain.module.losses, TOLERANCE)
    assert_same_weights(ours.module, plain.module)
    return ours, plain


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "number"), [("dp", 8), ("fsdp", 8), ("tp", 8), ("2d", 8), ("2d", 4)], ids=lambda value: str(value)
)
def test_schemes_train_as_one_device(scheme: str, number: int) -> None:
    run_in_child(functools.partial(check_scheme, scheme, number), env=devices(number))


def check_scheme(scheme: str, number: int) -> None:
    watches = Watches()
    ours, plain = both(
        scheme,
        validation=lambda: loader(2, seed=1),
        callbacks=lambda: [watches],
        gradient_clip_val=0.5,
    )
    assert watches.steps == [(1, 1)] + [(0, 1)] * 11, ours.compiles
    # Training and validation.
    assert ours.counters.compiles == 2, ours.compiles
    assert ours.counters.eager_ops == 0
    plan = ours.trainer.strategy.sharding_plan
    assert (plan.name, plan.mesh.size) == (scheme, number)
    names = {name for name, _ in ours.module.named_parameters()}
    if scheme == "dp":
        assert not watches.cut
    else:
        assert {"blocks.0.up.weight", "blocks.1.down_proj.weight"} <= watches.cut <= names
    assert_close(
        [float(ours.trainer.callback_metrics["val_loss"])],
        [float(plain.trainer.callback_metrics["val_loss"])],
        TOLERANCE,
    )
    assert {parameter.device.type for parameter in ours.module.parameters()} == {"cpu"}


def test_batch_norm_has_the_statistics_of_the_whole_batch() -> None:
    xla_adapters.initialize(spmd=True)
    ours, _ = both("dp", Classifier, data=functools.partial(small_loader, 12))
    assert float(ours.module.net[1].running_var.sub(1).abs().max()) > 0.01
    assert int(ours.module.net[1].num_batches_tracked) == 12


@pytest.mark.parametrize("accumulation", ["per_micro_batch", "unrolled"])
def test_accumulation(accumulation: Any) -> None:
    strategy = XLAEagerStrategy(sharding="fsdp", accumulation=accumulation)
    options: dict[str, Any] = {"data": lambda: loader(8), "max_epochs": 1, "accumulate_grad_batches": 2}
    ours = fit(Tagger, strategy, **options)
    plain = fit(Tagger, None, **options)
    assert ours.trainer.global_step == 4
    assert ours.counters.compiles == (2 if accumulation == "per_micro_batch" else 1), ours.compiles
    assert_close(ours.module.losses, plain.module.losses, TOLERANCE)
    assert_same_weights(ours.module, plain.module)


def test_partial_last_batch_is_held_whole() -> None:
    ours, plain = both(
        "2d",
        data=lambda: loader(rows=3 * BATCH + 5),
        validation=lambda: loader(rows=BATCH + 3, seed=1),
        max_epochs=2,
    )
    assert ours.counters.compiles == 4, ours.compiles
    assert_close(
        [float(ours.trainer.callback_metrics["val_loss"])],
        [float(plain.trainer.callback_metrics["val_loss"])],
        TOLERANCE,
    )


class Manual(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        optimizer.zero_grad()


def test_manual_optimization() -> None:
    watches = Watches()
    both("fsdp", Manual, callbacks=lambda: [watches])
    assert watches.steps == [(1, 1)] + [(0, 1)] * 11
    assert watches.cut


class Augmenting(Tagger):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, classes = batch
        return inputs * 2 - 1, classes


def test_batches_changed_on_the_device() -> None:
    watches = Watches()
    both("2d", Augmenting, callbacks=lambda: [watches], data=lambda: loader(4))
    assert [compiles for compiles, _ in watches.steps] == [watches.steps[0][0], 0, 0, 0]


# ---- errors in a step ----------------------------------------------------------------------------


class Fails(Tagger):
    """Raises after the backward of batch 3."""

    def on_after_backward(self) -> None:
        if len(self.kept) == 3:
            raise ValueError("from the model")


class LooksBehindTheError(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.before = get_runtime().transfers.to_host(list(pl_module.parameters()))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.after = get_runtime().transfers.to_host(list(pl_module.parameters()))
        self.cut = check_cuts(trainer.strategy.sharding_plan, pl_module, trainer.optimizers[0])


def test_a_failed_step_leaves_the_parameters_and_their_cut() -> None:
    looks = LooksBehindTheError()
    with pytest.raises(ValueError, match="from the model"):
        fit(Fails, XLAEagerStrategy(sharding="fsdp"), data=loader, callbacks=lambda: [looks])
    assert looks.cut
    for before, after in zip(looks.before, looks.after, strict=True):
        assert torch.equal(before, after)


# ---- evaluation ----------------------------------------------------------------------------------


def test_evaluation_alone() -> None:
    strategy = XLAEagerStrategy(sharding="2d")
    L.seed_everything(7, verbose=False)
    module = Tagger()
    ours, plain = make_trainer(strategy), make_trainer()
    expected = [plain.validate(module, loader(2), verbose=False)[0]["val_loss"]], plain.predict(module, loader(2))
    validated = [ours.validate(module, loader(2), verbose=False)[0]["val_loss"]]
    with xla_adapters.count() as counters:
        predicted = ours.predict(module, loader(2))
    assert counters.compiles == 1
    assert_close(validated, expected[0], TOLERANCE)
    for one, other in zip(predicted, expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    # Another module of the same Trainer gets a plan of its own.
    ours.validate(Classifier(), small_loader(1), verbose=False)
    assert "net.0.weight" in {parameter.name for parameter in strategy.sharding_plan.parameters}


# ---- checkpoints ---------------------------------------------------------------------------------


def saving(folder: Path) -> Callable[[], list[Any]]:
    return lambda: [ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=6, save_top_k=-1)]


def test_checkpoints_both_ways(tmp_path: Path) -> None:
    strategy = XLAEagerStrategy(sharding="2d")
    whole = fit(Tagger, strategy, data=lambda: loader(6), max_epochs=2, callbacks=saving(tmp_path / "ours"))
    assert whole.counters.compiles == 1, whole.compiles
    plain = fit(Tagger, None, data=lambda: loader(6), max_epochs=2, callbacks=saving(tmp_path / "plain"))
    files = [torch.load(tmp_path / name / "step=6.ckpt", weights_only=False) for name in ("ours", "plain")]
    assert {key for key in files[0] if key != "xla_adapters"} == set(files[1])
    for name, value in files[0]["state_dict"].items():
        assert (type(value), value.device.type) == (torch.Tensor, "cpu")
        torch.testing.assert_close(value, files[1]["state_dict"][name], rtol=0, atol=TOLERANCE)
    for index, state in files[0]["optimizer_states"][0]["state"].items():
        for key, value in state.items():
            other = files[1]["optimizer_states"][0]["state"][index][key]
            torch.testing.assert_close(value, other, rtol=0, atol=TOLERANCE)
    for name in ("ours", "plain"):
        path = tmp_path / name / "step=6.ckpt"
        watches = Watches()
        sharded = resume(path, XLAEagerStrategy(sharding="2d"), callbacks=[watches])
        assert_close(sharded.losses, whole.module.losses[6:], 1e-6)
        # Only the step is executed. The new strategy traces it, and the runtime may have its executable already.
        assert all(executions == 1 for _, executions in watches.steps)
        assert [compiles for compiles, _ in watches.steps][1:] == [0] * 5
        assert watches.cut
        assert_close(resume(path, None).losses, plain.module.losses[6:], TOLERANCE)


def resume(path: Path, strategy: Any, **options: Any) -> Any:
    L.seed_everything(11, verbose=False)
    module = Tagger()
    make_trainer(strategy, max_epochs=2, **options).fit(module, loader(6), ckpt_path=path)
    return module


class LoadsInBetween(L.Callback):
    """Loads the weights with their own values."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[-1] == 5:
            state = pl_module.state_dict()
            values = get_runtime().transfers.to_host(list(state.values()))
            trainer.strategy.load_model_state_dict({"state_dict": dict(zip(state, values, strict=True))})
            self.cut = check_cuts(trainer.strategy.sharding_plan, pl_module)


def test_weights_that_are_loaded_in_a_run_are_cut() -> None:
    loads, watches = LoadsInBetween(), Watches()
    both("fsdp", callbacks=lambda: [loads, watches])
    assert loads.cut == watches.cut != set()


# ---- options -------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_the_fix() -> None:
    def refused(kind: type[Exception], match: str, **options: Any) -> None:
        for strategy in (XLAEagerStrategy, XLAEagerFabricStrategy):
            with pytest.raises(kind, match=match):
                strategy(**options)

    refused(ConfigError, "sharding='ddp'.*valid values: 'auto', 'dp', 'fsdp', 'tp', '2d'", sharding="ddp")
    refused(ConfigError, "auto_sharding= or sharding=, not both", sharding="dp", auto_sharding=True)
    refused(
        UnsupportedOptionError, "eager.dynamo.*use xla_mode='eager.compile'", sharding="dp", xla_mode="eager+dynamo"
    )
    shape = ShardingConfig(scheme="2d", mesh_shape=(2, 2))
    refused(ConfigError, r"mesh_shape=\(2, 2\) is for 4 devices, and there are 8", sharding=shape)
    for number in (2, 4, [0, 1]):
        with pytest.raises(ConfigError, match=r"devices=.*mesh of all 8 devices.*devices=8"):
            make_trainer(XLAEagerStrategy(sharding="dp"), devices=number)
        with pytest.raises(ConfigError, match=r"devices=.*mesh of all 8 devices.*devices=8"):
            L.Fabric(strategy=XLAEagerFabricStrategy(sharding="dp"), devices=number)
    for good in ("auto", 1, -1, 8):
        make_trainer(XLAEagerStrategy(sharding={"scheme": "dp"}), devices=good)
        L.Fabric(strategy=XLAEagerFabricStrategy(sharding="dp"), devices=good)
    with pytest.raises(ConfigError, match="no sharding plan yet"):
        _ = XLAEagerStrategy(sharding="dp").sharding_plan
    with pytest.raises(ConfigError, match=r"batch_size=12.*8 parts \(data=8.*12 does not divide; use 16 or 8"):
        fit(Tagger, XLAEagerStrategy(sharding="dp"), data=lambda: loader(batch_size=12))
    with pytest.raises(RuntimeOrderError, match=r"under SPMD.*Give it auto_sharding=True or sharding="):
        XLAEagerStrategy()


@isolated
def test_plan_of_a_strategy_that_does_not_shard() -> None:
    with pytest.raises(ConfigError, match="does not shard; create it with auto_sharding=True or sharding="):
        _ = XLAEagerStrategy().sharding_plan


def test_automatic_plan_takes_nothing_from_the_run() -> None:
    def shuffled() -> DataLoader[Any]:
        return loader(6, shuffle=True)

    ours, _ = both({"measure_top_k": 0}, data=shuffled)
    assert ours.trainer.strategy.sharding_plan.mesh.size == 8
    assert ours.counters.compiles == 1


def test_a_stream_of_data_is_not_looked_into() -> None:
    with pytest.warns(UserWarning, match="no batch to plan for"):
        ours, _ = both("auto", data=lambda: DataLoader(Stream(loader(4).dataset), batch_size=BATCH))
    assert ours.trainer.strategy.sharding_plan.name == "fsdp"


# ---- Fabric --------------------------------------------------------------------------------------


def fabric_losses(fabric: Any, batches: DataLoader[Any], *, seen: Callable[..., None] = lambda *_: None) -> list[float]:
    fabric.launch()
    L.seed_everything(7, verbose=False)
    module = Tagger()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    step = getattr(fabric.strategy, "step", None)
    losses = []

    def update(batch: Any) -> torch.Tensor:
        inputs, classes = batch
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), classes.flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for batch in fabric.setup_dataloaders(batches):
        losses.append(float((update if step is None else step(update))(batch)))
    seen(module, optimizer.optimizer)
    return losses


@pytest.mark.parametrize("scheme", ["fsdp", "2d"])
def test_fabric(scheme: Any, tmp_path: Path) -> None:
    strategy = XLAEagerFabricStrategy(sharding=scheme)
    path = tmp_path / "fabric.ckpt"
    fabric = L.Fabric(strategy=strategy)

    def seen(module: Any, optimizer: Any) -> None:
        assert check_cuts(strategy.sharding_plan, module, optimizer)
        with xla_adapters.count() as saving:
            fabric.save(path, {"model": module, "optimizer": optimizer})
        assert (saving.compiles, saving.executions) == (0, 0)
        # One graph per batch shape.
        assert get_runtime().counters.metrics().compiles - before == 2
        fabric.load(path, {"model": module, "optimizer": optimizer})
        assert check_cuts(strategy.sharding_plan, module)

    before = get_runtime().counters.metrics().compiles
    ours = fabric_losses(fabric, loader(6, rows=6 * BATCH + 3), seen=seen)
    strategy.teardown()
    plain = fabric_losses(L.Fabric(accelerator="cpu", devices=1), loader(6, rows=6 * BATCH + 3))
    assert_close(ours, plain, TOLERANCE)
    saved = torch.load(path, weights_only=False)
    assert {value.device.type for value in saved["model"].values()} == {"cpu"}
    with pytest.raises(ConfigError, match=r"batch_size=10.*10 does not divide"):
        fabric_losses(L.Fabric(strategy=XLAEagerFabricStrategy(sharding=scheme)), loader(batch_size=10))
