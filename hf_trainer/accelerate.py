"""`Accelerator`: accelerate's loops on XLA devices. Their steps are found; the loop does not mark them."""

from __future__ import annotations

import atexit
import inspect
import json
import os
import shutil
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from xla_adapters import StepProgram, StepSeed, XLAConfig, get_runtime, in_step, initialize
from xla_adapters.checkpoint import CheckpointStore, verify
from xla_adapters.data.batches import example_of
from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.runtime.modes import check_mode, eager
from xla_adapters.runtime.transfers import to_host_in_one_transfer, uploading
from xla_adapters.sharding import Sharder, ShardingConfig
from xla_adapters.tracing.deferred_numbers import DeferredNumber, make_plain
from xla_adapters.tracing.discarding import Discarding
from xla_adapters.tracing.library_reads import answering, reads_of_packages
from xla_adapters.utils.location import stack_frames
from xla_adapters.utils.nested_values import tensors_in
from xla_adapters.utils.patching import replaced
from xla_adapters.utils.torch_modes import keeping_parameters, use_no_grad_for_inference_mode

_HINT = (
    " (after optimizer.step(), or behind `with accelerator.accumulate(model)`; .item() may come before it, for a value "
    "that is only added up or logged)"
)
_EVALUATION_HINT = " (a value that is read ends the step of an evaluation)"
# Of the random numbers on the device.
_TRAIN, _EVALUATION = 0, 1
# Beside accelerate's files in a saved state: how many steps there were, on which random numbers depend.
_STATE_FILE = "xla_adapters.json"
_CALL = torch.nn.Module._call_impl.__code__


class ScriptSteps:
    """The steps of a loop that marks none.

    A step begins where a prepared loader hands out a batch, or else where a prepared model is called. In a training it
    may end once an optimizer has updated; without `backward` it may end anywhere. It ends where the loop takes the next
    batch, or reads a value.

    Args:
        config: the options.
    """

    def __init__(self, config: XLAConfig) -> None:
        # Gradients are the loop's: it frees them by `zero_grad`.
        self.config = replace(config, free_grads=False)
        self.train = StepProgram("train_step", self.config, hint=_HINT)
        self.evaluation = StepProgram("eval_step", self.config.without_graph_limits(), hint=_EVALUATION_HINT)
        # Updates, batches since the last one, and steps of evaluations since then.
        self.count = self._micro_step = self._evaluated = 0
        self._seed: int | None = None
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._reads: Any = None
        self._around = ExitStack()
        self._discarding: Discarding | None = None
        # What is open, and its number among all that were open.
        self._open: StepProgram | None = None
        self._ticket = 0
        self._batch: Any = None
        # Tensors that were pending when it was opened.
        self._pending = 0
        self._of_loader = self._trains = self._computes = self._may_end = False
        # The optimizers that have updated in the open step, and those that update what was called in it.
        self._updates: set[int] = set()
        self._called: set[int] = set()
        self._updated_by: weakref.WeakKeyDictionary[torch.nn.Module, set[int]] = weakref.WeakKeyDictionary()
        # Calls of models that have not returned, and whether the last read was an error.
        self._depth, self._failed = 0, False
        # A loader that is still held then would close it when the runtime is gone.
        atexit.register(_abort, weakref.ref(self))
        # Where a step of an evaluation has ended by a read, its forward may still get a backward.
        self._split = False

    # ---- what is prepared ------------------------------------------------------------------------

    def note_model(self, model: torch.nn.Module) -> None:
        """Has calls of a model belong to steps."""
        self._models.add(model)
        use_no_grad_for_inference_mode(model)
        # With stand-ins a number that is read has no place in the step's program.
        defers = not get_runtime().has_placeholders
        self._reads = reads_of_packages((), torch.nn.ModuleList(self._models), defers_all=defers)
        watch = _ForwardWatch(self)
        model.register_forward_pre_hook(watch)
        model.register_forward_hook(watch.after)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Has updates of an optimizer end steps."""
        self._optimizers.add(optimizer)
        self._updated_by.clear()
        optimizer.register_step_post_hook(self._updated)

    # ---- the events of a loop --------------------------------------------------------------------

    def begin(self, batch: Any = None, *, of_loader: bool = False, phase: str = "") -> int:
        """A batch was handed out, or a model is called without one: opens a step. Returns its number.

        Args:
            batch: to explain compiles by.
            of_loader: whether a prepared loader has made it.
            phase: which part of an accumulation it is.
        """
        self.end()
        trains = torch.is_grad_enabled() and any(model.training for model in self._models)
        seed = self._next_seed(trains=trains)
        if not self.config.compiles_step or not (trains or self.config.compile_eval) or in_step():
            if not in_step():
                get_runtime().random.set_seed(seed.value())
                self._micro_step, self._evaluated = self._micro_step + trains, self._evaluated + (not trains)
            return self._ticket
        program = self.train if trains else self.evaluation
        self._discarding = Discarding(program)
        gradients = "present" if trains and self._gradients_present() else "absent"
        self._around.enter_context(answering(self._reads))
        program.open(
            inputs=batch,
            phase=(phase or "training") if trains else "evaluation",
            facts={"gradients": gradients} if trains else {},
            seed=seed,
            where=f"step {self.count}",
        )
        self._around.enter_context(as_if_compiling())
        self._open, self._batch, self._of_loader = program, batch, of_loader
        self._trains, self._computes, self._may_end = trains, False, not trains
        self._updates, self._called, self._depth, self._failed = set(), set(), 0, False
        self._ticket += 1
        ticket = self._ticket
        program.end_at_reads(lambda is_error: self._ends(ticket, is_error))
        self._pending = get_runtime().tracing.pending_count()
        return ticket

    def end(self, ticket: int | None = None) -> None:
        """Closes the open step, which executes it; one that has failed, or computed nothing, is discarded.

        Args:
            ticket: the number of the step; another one stays open.
        """
        program = self._open
        if program is None or (ticket is not None and ticket != self._ticket):
            return
        # If the loop goes on after an error of this package, it has caught it.
        if self._depth or (self._failed and ticket is not None) or self._is_untouched():
            self.abort()
            return
        self._open = None
        try:
            assert self._discarding is not None
            with self._discarding:
                program.close()
            if self._updates:
                self.count, self._micro_step, self._evaluated = self.count + 1, 0, 0
            elif program is self.evaluation:
                self._evaluated += 1
            else:
                self._micro_step += 1
        finally:
            self._around.close()

    def _is_untouched(self) -> bool:
        """Whether nothing was computed in the open step."""
        return not self._computes and get_runtime().tracing.pending_count() <= self._pending

    def abort(self) -> None:
        """Discards the open step."""
        program, self._open = self._open, None
        try:
            if program is not None:
                program.abort()
        finally:
            self._around.close()

    def _ends(self, ticket: int, is_error: bool) -> bool:
        """A value is read: ends the step if it may end; returns whether it has ended.

        Args:
            ticket: the number of the step.
            is_error: whether the read is one, since the step may not end.
        """
        if ticket != self._ticket or self._open is None:
            return True
        if is_error:
            # A loop over a loader may catch the error, and go on with the step. Without one nothing would end it.
            self._failed = True
            if not self._of_loader:
                self.abort()
            return False
        if self._has_failed():
            self.abort()
            return True
        if not self._may_end and not self._is_untouched():
            return False
        self._split = self._open is self.evaluation and self._computes and torch.is_grad_enabled()
        self.end()
        return True

    def before_forward(self, model: torch.nn.Module) -> None:
        """A prepared model is called."""
        if (self._open is None and not in_step()) or (self._open is not None and self._is_over(model)):
            self.begin()
        self._called |= self._updating(model)
        self._notice_errors()
        self._depth += 1
        if torch.is_grad_enabled() and self._trains:
            self._may_end = False
        elif self._trains and not self._computes:
            # In training mode, without gradients: metrics, or an evaluation that leaves the mode.
            self._may_end = True
        self._computes = True

    def after_forward(self) -> None:
        """A prepared model has returned."""
        self._depth = max(0, self._depth - 1)

    def _notice_errors(self) -> None:
        """The loop goes on with the step: it has caught the errors so far."""
        self._failed = False
        if self._has_failed():
            self._depth = 0

    def _has_failed(self) -> bool:
        """Whether a call of a prepared model did not return. Hooks are not told of errors in a step."""
        return self._depth > 0 and not any(frame.f_code is _CALL for frame in stack_frames(sys._getframe(1)))

    def _is_over(self, model: torch.nn.Module) -> bool:
        """Whether the call of a model begins another step than the open one.

        In a training it does if all that was called before, and the model, has been updated since.
        """
        if not self._trains:
            return not self._of_loader and self._computes
        return torch.is_grad_enabled() and bool(self._updates) and self._called | self._updating(model) <= self._updates

    def _updating(self, model: torch.nn.Module) -> set[int]:
        """The optimizers that update a model, by their `id`."""
        if model not in self._updated_by:
            owners = {id(parameter): id(one) for one in self._optimizers for parameter in _parameters_of(one)}
            self._updated_by[model] = {owners[id(one)] for one in model.parameters() if id(one) in owners}
        return self._updated_by[model]

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Around a backward."""
        if self._open is None and not in_step():
            if self._split:
                warnings.warn(
                    "a value was read between forward and backward, and all models were in evaluation mode, in which "
                    "a read ends the step: forward and backward are executed apart. Call model.train(), and read "
                    "after optimizer.step()",
                    stacklevel=4,
                )
            self.begin()
        self._notice_errors()
        self._trains = self._computes = True
        self._may_end = self._split = False
        with self.discarding():
            yield

    def _updated(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._notice_errors()
        if self._open is None:
            self.count, self._micro_step, self._evaluated = self.count + 1, 0, 0
        self._updates.add(id(optimizer))
        self._computes = self._may_end = True

    @contextmanager
    def part_of_update(self, phase: str) -> Iterator[None]:
        """Around the code of one batch of an accumulation, which may end with its last line.

        Args:
            phase: which part it is.
        """
        if self._open is not None and self._is_untouched():
            self.begin(self._batch, of_loader=self._of_loader, phase=phase)
        with self.discarding():
            yield
        self._may_end = True

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Discards the open step if the body raises, and raises the translated error."""
        try:
            yield
        except BaseException as error:
            self.discard(error)
            raise

    def discard(self, error: BaseException) -> None:
        """Discards the open step after an error.

        Raises:
            XLAAdapterError: the error in words of this package, if there is one.
        """
        program, self._open = self._open, None
        if program is None:
            return
        assert self._discarding is not None
        try:
            self._discarding.__exit__(type(error), error, error.__traceback__)
        finally:
            self._around.close()

    # ---- random numbers --------------------------------------------------------------------------

    def _next_seed(self, *, trains: bool) -> StepSeed:
        seed = torch.initial_seed()
        if seed != self._seed:
            # `set_seed` was called.
            self._seed, self.count, self._micro_step, self._evaluated = seed, 0, 0, 0
        stream, micro_step = (_TRAIN, self._micro_step) if trains else (_EVALUATION, self._evaluated)
        return StepSeed(seed=seed, step=self.count, micro_step=micro_step, stream=stream)

    def state(self) -> dict[str, Any]:
        """What random numbers of later steps depend on."""
        return {"steps": self.count, "micro_steps": self._micro_step, "device_seed": get_runtime().random.seed()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned; the random numbers of the host are there already."""
        self._seed, self._evaluated = torch.initial_seed(), 0
        self.count, self._micro_step = int(state["steps"]), int(state["micro_steps"])
        get_runtime().random.set_seed(int(state["device_seed"]))

    def _gradients_present(self) -> bool:
        return any(parameter.grad is not None for one in self._optimizers for parameter in _parameters_of(one))


def _abort(found: weakref.ref[ScriptSteps]) -> None:
    steps = found()
    if steps is not None:
        steps.abort()


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class _ForwardWatch:
    """Tells of calls of one model. A copy of the model has the same one; in another process it does nothing."""

    def __init__(self, steps: ScriptSteps | None) -> None:
        self._steps = steps

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if self._steps is not None:
            self._steps.before_forward(module)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """The model has returned."""
        if self._steps is not None:
            self._steps.after_forward()

    def __deepcopy__(self, memo: Any) -> _ForwardWatch:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardWatch, (None,)


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
        self._steps = ScriptSteps(self.xla_config)
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
            CheckpointWriteError: the storage refused; a former state of this name is still there.
        """
        self._steps.end()
        config = self.project_configuration
        automatic = config.automatic_checkpoint_naming
        path = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}") if automatic else output_dir
        path = Path(os.path.abspath(path))
        if automatic and path.exists():
            raise ConfigError(f"{path} exists: set accelerator.save_iteration to the number of the next checkpoint")
        with ExitStack() as stack:
            draft = stack.enter_context(CheckpointStore(path.parent).writing(self._steps.count, name=path.name))
            stack.enter_context(replaced(config, "automatic_checkpoint_naming", False))
            super().save_state(str(draft.path), safe_serialization, **kwargs)
            (draft.path / _STATE_FILE).write_text(json.dumps(self._steps.state()))
        if automatic and config.total_limit is not None:
            saved = sorted(path.parent.glob("checkpoint_*"), key=_number)
            for old in saved[: len(saved) - config.total_limit]:
                shutil.rmtree(old)
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
        self._steps.end()
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
            "cpu=True: leave it out (PJRT_DEVICE=CPU runs XLA on the CPU), or use accelerate's own Accelerator"
        )
    precision = arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if str(precision) not in ("no", "bf16"):
        raise UnsupportedOptionError(
            f"mixed_precision={str(precision)!r}: XLA devices compute in bfloat16; use mixed_precision='bf16'"
        )


def _check_accelerator(accelerator: Accelerator) -> None:
    state, device = accelerator.state, get_runtime().device
    if state.distributed_type not in (DistributedType.XLA, DistributedType.NO) or os.environ.get("ACCELERATE_USE_FSDP"):
        raise UnsupportedOptionError(
            f"{state.distributed_type}: this Accelerator shards by itself; leave plugins and their environment "
            "variables out, and say Accelerator(sharding='fsdp')"
        )
    if device.world_size() > 1 or accelerator.num_processes > 1:
        raise UnsupportedOptionError("several processes were launched, and this version trains in one")
    if state.dynamo_plugin.backend is not DynamoBackend.NO:
        raise UnsupportedOptionError(
            f"dynamo_backend={state.dynamo_plugin.backend.value!r}: the step is compiled by XLA already; leave it out"
        )
