"""`Accelerator`: accelerate's loops on XLA devices. Their steps are found; the loop does not mark them."""

from __future__ import annotations

import inspect
import json
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import accelerate.accelerator
import torch
from accelerate import DistributedType, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend, send_to_device
from torch.utils.data import DataLoader

from hf_trainer.data import DeviceLoader
from hf_trainer.model import own_scalars
from hf_trainer.options import check_optimizer, check_runtime, take_options
from hf_trainer.patches import as_if_compiling, reduced_in_one_process
from xla_adapters import XLAConfig, get_runtime, initialize
from xla_adapters.checkpoint import CheckpointStore, verify
from xla_adapters.data.batches import example_of
from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.loop.script_steps import ScriptSteps
from xla_adapters.runtime import check_mode, eager
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.sharding import Sharder, ShardingConfig
from xla_adapters.tracing.deferred_numbers import DeferredNumber, make_plain
from xla_adapters.tracing.optimizers import keep_own_kernels
from xla_adapters.utils.nested_values import tensors_in
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import keeping_parameters

_HINT = (
    " (after optimizer.step(), or behind `with accelerator.accumulate(model)`; .item() may come before it, for a value "
    "that is only added up or logged)"
)
_EVALUATION_HINT = " (a value that is read ends the step of an evaluation)"
# Beside accelerate's files in a saved state: how many steps there were, on which random numbers depend.
_STATE_FILE = "xla_adapters.json"


class StepLoader(DeviceLoader):
    """A prepared loader: hands out batches on the device, with which steps begin.

    Args:
        dataloader: accelerate's prepared loader.
        device: where batches go; None leaves them on the host.
        steps: of the loop.
        place: shards a batch on the device.
    """

    def __init__(
        self, dataloader: Any, device: torch.device | None, steps: ScriptSteps, place: Callable[[Any], Any]
    ) -> None:
        super().__init__(dataloader, device or torch.device("cpu"))
        self._moves, self._steps, self._place = device is not None, steps, place

    def __iter__(self) -> Iterator[Any]:
        self._steps.end()
        batches = iter(self.dataloader)
        ticket = None
        try:
            while True:
                # Before the next batch is read, so that the device computes meanwhile.
                self._steps.end()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                if self._moves:
                    with uploading():
                        batch = self._place(send_to_device(batch, self.device))
                ticket = self._steps.begin(batch, of_loader=True)
                yield batch
        finally:
            if ticket is not None:
                self._steps.end(ticket)

    def of_rest(self, dataloader: Any) -> StepLoader:
        """The loader of the rest of an epoch."""
        return StepLoader(dataloader, self.device if self._moves else None, self._steps, self._place)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` on XLA devices: a script changes the import, and keeps its loop.

        from hf_trainer.accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    What the loop computes from a batch to the next one is a step, which is compiled as one graph and executed once. It
    is executed when the loop takes the next batch, or when it reads a value after `optimizer.step()`. A value that is
    read before the update is an error with the line, but for `.item()`: that gives a number whose value is known when
    the step has been executed. In an evaluation (`model.eval()`, or without gradients) a read executes the step.

    From its construction on the process is in eager mode: what no step computes is executed at once.

    Args:
        args: as for `accelerate.Accelerator`.
        auto_sharding: shards prepared models over all devices of the process, by the plan with the lowest estimated
            cost; `prepare` needs to be given the loader together with the model.
        sharding: how to shard, by name (`"dp"`, `"fsdp"`, `"tp"`, `"2d"`, `"auto"`) or as a `ShardingConfig`.
        kwargs: as for `accelerate.Accelerator`, and the options of `XLAConfig`. `accumulation`, `free_grads` and
            `step_replay` have no effect in a loop of your own, and are refused.

    Raises:
        ConfigError: an option is not valid, or the process has several devices and nothing shards.
        UnsupportedOptionError: an option cannot work on XLA.
        RuntimeOrderError: the XLA runtime was started earlier in a mode that does not fit.
    """

    flag_tensor: torch.Tensor | None

    def __init__(
        self,
        *args: Any,
        auto_sharding: bool | Mapping[str, Any] | None = None,
        sharding: str | Mapping[str, Any] | ShardingConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self.xla_config = XLAConfig.resolve(None, take_options(kwargs))
        _check_config(self.xla_config)
        _check_arguments(inspect.signature(accelerate.Accelerator).bind(*args, **kwargs).arguments)
        self._sharding = ShardingConfig.resolve(auto_sharding=auto_sharding, sharding=sharding)
        self._sharders: weakref.WeakKeyDictionary[torch.nn.Module, Sharder] = weakref.WeakKeyDictionary()
        self._lasting = ExitStack()
        self._place_batch: Callable[[Any], Any] = lambda batch: batch
        self._example: Callable[[], Any] = lambda: None
        runtime = get_runtime()
        runtime.device.use_compile_cache(self.xla_config.cache_dir)
        runtime.device.initialize(spmd=self._sharding is not None)
        check_runtime(self._sharding is not None)
        initialize(eager=self.xla_config.eager_by_default)
        PartialState().device = runtime.device.torch_device()
        super().__init__(*args, **kwargs)
        _check_accelerator(self)
        for state in (PartialState(), self.state):
            # accelerate asks torch_xla on TPUs only, and takes -1 elsewhere: then nothing is printed.
            state.local_process_index = max(0, state.local_process_index)
        # It leaves bfloat16 to a variable of the environment that torch_xla does not look at any more.
        if self.state.mixed_precision == "bf16":
            self.native_amp = True
        self._steps = ScriptSteps(self.xla_config, as_if_compiling, hint=_HINT, evaluation_hint=_EVALUATION_HINT)
        # What could not be logged yet.
        self._logs: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = []

    # ---- preparation -----------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As `accelerate.Accelerator.prepare`."""
        self._steps.end()
        loaders = [one for one in args if isinstance(one, DataLoader)]
        if loaders:
            loader = loaders[0]
            self._example = lambda: example_of(loader.dataset, loader.batch_size or 1, loader.collate_fn)
        # In eager mode the move would compile a program for each shape.
        with keeping_parameters(), eager(False):
            return super().prepare(*args, **kwargs)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """As `accelerate.Accelerator.prepare_model`."""
        is_new = model not in self._models
        with keeping_parameters(), eager(False):
            prepared: torch.nn.Module = super().prepare_model(model, *args, **kwargs)
        if is_new:
            own_scalars(prepared)
            if self._sharding is not None:
                self._shard(prepared)
            self._steps.note_model(prepared)
        return prepared

    def _shard(self, model: torch.nn.Module) -> None:
        assert self._sharding is not None
        sharder = self._sharders[model] = Sharder(self._sharding, self.xla_config)
        sharder.prepare(model, self._example, around=as_if_compiling)
        self._lasting.enter_context(sharder.holding(model))

        def place(batch: Any) -> Any:
            for tensor in tensors_in(batch):
                sharder.place_batch(tensor)
            return batch

        self._place_batch = place

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> AcceleratedOptimizer:
        """As `accelerate.Accelerator.prepare_optimizer`.

        Raises:
            UnsupportedOptionError: the optimizer cannot work on XLA.
        """
        is_new = not isinstance(optimizer, AcceleratedOptimizer)
        check_optimizer(optimizer, None)
        with eager(False):
            prepared: AcceleratedOptimizer = super().prepare_optimizer(optimizer, *args, **kwargs)
        if is_new:
            self._steps.note_optimizer(prepared.optimizer)
            keep_own_kernels(prepared.optimizer)
            step = prepared.step

            def discarding_step(optimizer: AcceleratedOptimizer, closure: Any = None) -> Any:
                with self._steps.discarding():
                    return step(closure)

            # A method: schedules of torch count its calls.
            prepared.step = MethodType(discarding_step, prepared)
        return prepared

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, **kwargs: Any) -> StepLoader:
        """As `accelerate.Accelerator.prepare_data_loader`."""
        if isinstance(data_loader, StepLoader):
            return data_loader
        places = self.device_placement if device_placement is None else device_placement
        # One process has nobody to dispatch batches to.
        with _as_on_one_device(), replaced(self.dataloader_config, "dispatch_batches", False):
            prepared = super().prepare_data_loader(data_loader, False, **kwargs)
        # There are no other processes whose random numbers are to be the same.
        prepared.rng_types = None
        return StepLoader(prepared, self.device if places else None, self._steps, lambda one: self._place_batch(one))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As `accelerate.Accelerator.skip_first_batches`."""
        with _as_on_one_device():
            if isinstance(dataloader, StepLoader):
                return dataloader.of_rest(super().skip_first_batches(dataloader.dataloader, num_batches))
            return super().skip_first_batches(dataloader, num_batches)

    # ---- the step --------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """As `accelerate.Accelerator.accumulate`. Each batch is a step."""
        with super().accumulate(*models):
            phase = "update" if self.sync_gradients else "accumulate"
            with self._steps.part_of_update(phase if self.gradient_accumulation_steps > 1 else ""):
                yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As `accelerate.Accelerator.backward`."""
        with self._steps.differentiating():
            super().backward(loss, **kwargs)

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        """As `accelerate.Accelerator.clip_grad_norm_`; returns the norm on the device."""
        with self._steps.discarding():
            return super().clip_grad_norm_(*args, **kwargs)

    # ---- what several processes would do together ------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """The tensors themselves, which are those of all devices."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The values themselves, which are those of all devices; of the last batch as many as it has rows."""
        with replaced(accelerate.accelerator, "gather_object", lambda values: values):
            return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Copies of the tensors, scaled."""
        return reduced_in_one_process(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The tensors themselves: no other process has longer ones."""
        return tensor

    def wait_for_everyone(self) -> None:
        """Does nothing: there is one process."""

    def set_trigger(self) -> None:
        """As `accelerate.Accelerator.set_trigger`, on the host."""
        self.flag_tensor = torch.tensor(1)

    def check_trigger(self) -> bool:
        """As `accelerate.Accelerator.check_trigger`, without a read in the step."""
        is_set, self.flag_tensor = self.flag_tensor is not None, None
        return is_set

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As `accelerate.Accelerator.log`. With numbers that the open step computes it waits for the step's end."""
        if self.trackers:
            self._logs.append((dict(values), args, kwargs))
            self._log_known()

    def _log_known(self) -> None:
        """Logs what waits, in its order, up to the first number that an open step computes."""
        while self._logs:
            values, args, kwargs = self._logs[0]
            if any(isinstance(value, DeferredNumber) and value.is_open() for value in values.values()):
                return
            self._logs.pop(0)
            super().log({name: make_plain(value) for name, value in values.items()}, *args, **kwargs)

    # ---- saving ----------------------------------------------------------------------------------

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        """As `accelerate.Accelerator.get_state_dict`, on the host."""
        self._steps.end()
        state = super().get_state_dict(model, unwrap)
        return OrderedDict(to_host_in_one_transfer(dict(state)))

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As `accelerate.Accelerator.save_state`. The folder appears when it is complete, and with checksums.

        Raises:
            CheckpointWriteError: the storage refused; an earlier state of this name is still there.
        """
        self._steps.end()
        config = self.project_configuration
        automatic = config.automatic_checkpoint_naming
        path = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}") if automatic else output_dir
        path = Path(os.path.abspath(path))
        if automatic and path.exists():
            raise ConfigError(f"{path} exists: set accelerator.save_iteration to the number of the next checkpoint")
        store = CheckpointStore(path.parent)
        with ExitStack() as stack:
            draft = stack.enter_context(store.writing(self._steps.count, name=path.name))
            stack.enter_context(replaced(config, "automatic_checkpoint_naming", False))
            super().save_state(str(draft.path), safe_serialization, **kwargs)
            (draft.path / _STATE_FILE).write_text(json.dumps(self._steps.state()))
        if automatic and config.total_limit is not None:
            saved = sorted(path.parent.glob("checkpoint_*"), key=_number)
            for old in saved[: len(saved) - config.total_limit]:
                store.remove(old.name)
        return path

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """As `accelerate.Accelerator.load_state`. The files are verified first.

        Raises:
            CheckpointDamagedError: a file is not as it was saved.
        """
        self._steps.end()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            saved = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            input_dir = max(saved, key=_number, default=None)
        if input_dir is not None and Path(input_dir).is_dir():
            verify(input_dir)
        with eager(False), uploading():
            super().load_state(input_dir, *args, **kwargs)
        for model, sharder in self._sharders.items():
            sharder.prepare(model, self._example, around=as_if_compiling)
        state = Path(input_dir, _STATE_FILE)
        if state.exists():
            self._steps.resume(json.loads(state.read_text()))

    def free_memory(self, *objects: Any) -> Any:
        """As `accelerate.Accelerator.free_memory`."""
        self._steps.forget()
        self._lasting.close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """As `accelerate.Accelerator.end_training`."""
        self._steps.end()
        self._log_known()
        super().end_training()


def _number(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


@contextmanager
def _as_on_one_device() -> Iterator[None]:
    """accelerate prepares loaders as for the CPU: in the same order, and without copies of batches by threads."""
    with replaced(PartialState(), "distributed_type", DistributedType.NO):
        yield


def _check_config(config: XLAConfig) -> None:
    check_mode(config.xla_mode)
    given = {
        "accumulation": config.accumulation == "unrolled",
        "free_grads": config.free_grads is True,
        "step_replay": config.step_replay is True,
        "xla_mode": config.xla_mode in ("lazy", "eager+dynamo"),
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise UnsupportedOptionError(
            f"{name}={getattr(config, name)!r} with Accelerator: the loop is yours, and its code runs at each batch; "
            "leave the option out"
        )


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    # Before accelerate keeps them for the whole process.
    if arguments.get("cpu"):
        raise UnsupportedOptionError(
            "cpu=True: leave it out (PJRT_DEVICE=CPU runs XLA on the CPU). For the plain CPU use accelerate's own "
            "Accelerator, with USE_TORCH_XLA=0 in the environment where torch_xla is installed"
        )
    precision = arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if str(precision) not in ("no", "bf16"):
        raise UnsupportedOptionError(
            f"mixed_precision={str(precision)!r}: XLA devices compute in bfloat16; use mixed_precision='bf16'"
        )


def _check_accelerator(accelerator: Accelerator) -> None:
    state, device = accelerator.state, get_runtime().device
    uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if uses_fsdp or state.distributed_type not in (DistributedType.XLA, DistributedType.NO):
        name = "FSDP" if uses_fsdp else state.distributed_type.value
        raise UnsupportedOptionError(
            f"{name}: this Accelerator shards by itself; leave plugins and their environment variables out, and say "
            "Accelerator(sharding='fsdp')"
        )
    if device.world_size() > 1 or accelerator.num_processes > 1:
        raise UnsupportedOptionError("several processes were launched, and this version trains in one")
    if state.dynamo_plugin.backend is not DynamoBackend.NO:
        raise UnsupportedOptionError(
            f"dynamo_backend={state.dynamo_plugin.backend.value!r}: the step is compiled by XLA already; leave it out"
        )
