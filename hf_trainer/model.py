"""A trainer's model and its optimizer on the device: chosen, moved, prepared and sharded."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments
from transformers.optimization import Adafactor
from transformers.training_args import OptimizerNames

from hf_trainer.options import check_optimizer, checkpointing_option
from hf_trainer.patches import as_if_compiling
from xla_adapters import XLAConfig, get_runtime, register_eager_optimizer, register_state_init
from xla_adapters.data.batches import example_of
from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.sharding import DataParallel, Sharder, ShardingConfig, ShardingPlan, accept_placements
from xla_adapters.sharding.state import names_of_updated

_Choice = tuple[Any, dict[str, Any]]


def choose_optimizer(choose: Callable[..., _Choice], args: TrainingArguments, model: Any) -> _Choice:
    """As `Trainer.get_optimizer_cls_and_kwargs`. The default, fused AdamW, becomes plain AdamW.

    Args:
        choose: the method of the class that the mixin is mixed into.
        args: `optim` and `optim_args` name the optimizer; not changed.
        model: to be trained.

    Returns:
        The class of the optimizer, and its arguments.

    Raises:
        UnsupportedOptionError: the optimizer cannot work on XLA.
    """
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        args = copy.copy(args)
        args.optim = OptimizerNames.ADAMW_TORCH
    cls, kwargs = choose(args, model)
    check_optimizer(None, (cls, kwargs))
    if args.optim == OptimizerNames.STABLE_ADAMW:
        # Its default asks triton for a GPU, on whatever device the parameters are.
        kwargs = {**kwargs, "triton": False}
    return cls, kwargs


class OptimizerChoice:
    """`Trainer.get_optimizer_cls_and_kwargs` with `choose_optimizer` around that of the next class.

    transformers' is a static method, and may be called on the class; an override may be a method of instances.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, trainer: object | None, cls: type) -> Callable[..., _Choice]:
        found: Any = super(self._owner, cls if trainer is None else trainer)
        choose: Callable[..., _Choice] = getattr(found, self._name)

        def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> _Choice:
            return choose_optimizer(choose, args, model)

        return get_optimizer_cls_and_kwargs


def follow_moved_parameters(
    optimizer: torch.optim.Optimizer, moved: Mapping[torch.nn.Parameter, torch.nn.Parameter]
) -> None:
    """Lets an optimizer that was made before its model was moved update the model's new parameters.

    Args:
        optimizer: changed in place. Its state follows the parameters, as when it is loaded.
        moved: the parameters on the device by those that they replace.
    """
    groups = optimizer.param_groups
    present = {parameter for group in groups for parameter in group["params"]}
    # A tie that the move had undone, and that was made again: the optimizer has the tied parameter already.
    followed = {new: old for old, new in moved.items() if old in present and new not in present}
    moved = {old: new for new, old in followed.items()}
    if not moved:
        return
    state = optimizer.state_dict()
    for group in groups:
        group["params"] = [moved.get(parameter, parameter) for parameter in group["params"]]
    optimizer.state.clear()
    if state["state"]:
        optimizer.load_state_dict(state)


def innermost(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer inside accelerate's wrappers; None if there is none yet."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _adafactor_state(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The state that `transformers.optimization.Adafactor.step` creates in its first call (5.23)."""
    factored, first_moment = optimizer._get_options(group, parameter.shape)
    dtype = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype

    def zeros(shape: torch.Size) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype).to(parameter.device)

    state: dict[str, Any] = {"step": 0}
    shape = parameter.shape
    if first_moment:
        state["exp_avg"] = zeros(shape)
    if factored:
        state["exp_avg_sq_row"] = zeros(shape[:-1])
        state["exp_avg_sq_col"] = zeros(shape[:-2] + shape[-1:])
    else:
        state["exp_avg_sq"] = zeros(shape)
    # The update sets it before reading it. A number instead of a tensor would make the first step another graph.
    state["RMS"] = zeros(torch.Size())
    return state


def register_transformers_optimizers() -> None:
    """Registers the optimizers with the core; called when this package is imported."""
    register_state_init(Adafactor, _adafactor_state)
    register_eager_optimizer(
        Adafactor,
        "scale_parameter=True compares the norm of every parameter on the host",
        when=lambda optimizer: any(group["scale_parameter"] for group in optimizer.param_groups),
    )


class ParameterMoves:
    """The parameters that were replaced when a model was moved.

    torch does so if the two devices have different kinds of tensors. An optimizer made before has the old ones.
    """

    def __init__(self) -> None:
        # Weak references, so that the host's copy of a model without optimizer is freed.
        self._known: list[tuple[str, weakref.ref[torch.nn.Parameter]]] = []

    def note(self, model: torch.nn.Module) -> None:
        """Notes the parameters that an optimizer may have: before the model is moved, and when a training begins."""
        self._known += [(name, weakref.ref(value)) for name, value in model.named_parameters(remove_duplicate=False)]

    def follow(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Lets an optimizer update the model's parameters in place of those noted before."""
        now = dict(model.named_parameters(remove_duplicate=False))
        pairs = [(old(), now.get(name)) for name, old in self._known]
        moved = {old: new for old, new in pairs if old is not None and new is not None and old is not new}
        self._known.clear()
        self.note(model)
        if moved and isinstance(optimizer, torch.optim.Optimizer):
            follow_moved_parameters(optimizer, moved)

    def bring_back(self, trainer: transformers.Trainer) -> None:
        """Moves a model to the device that was moved away from it since the last run (`model.cpu()`)."""
        model, device = trainer.model, trainer.args.device
        if not isinstance(model, torch.nn.Module):
            return
        if trainer.place_model_on_device and any(value.device != device for value in model.parameters()):
            trainer._move_model_to_device(model, device)
        self.follow(model, innermost(trainer.optimizer))


def model_of(trainer: transformers.Trainer) -> torch.nn.Module:
    """The model of a constructed trainer."""
    model = trainer.model
    assert isinstance(model, torch.nn.Module)
    return model


def own_scalars(model: torch.nn.Module) -> None:
    """Gives each scalar parameter (CLIP's temperature) and scalar buffer a device buffer that it does not share.

    `model.to("xla")` lets equal scalars share one buffer, which is then never donated to the updated value:
    the first step would be another graph than the later ones. Costs one transfer per scalar.

    Args:
        model: on the device; changed in place.
    """
    runtime = get_runtime()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 0 and tensor.device == runtime.device.torch_device():
                tensor.data = runtime.transfers.to_device(*runtime.transfers.to_host([tensor]))


def prepare_for_xla(trainer: transformers.Trainer, config: XLAConfig) -> None:
    """Makes model and optimizer of a trainer ready for compiled steps.

    Args:
        trainer: the trainer, after `_prepare_for_training`.
        config: how steps are run.

    Raises:
        UnsupportedOptionError: the optimizer, or an option of activation checkpointing, cannot work on XLA.
    """
    check_optimizer(innermost(trainer.optimizer), None)
    _check_activation_checkpointing(trainer)
    if config.eager_by_default and get_runtime().tracing.pending_count():
        # What the program left pending must not become part of the first step.
        get_runtime().tracing.flush()
    if trainer.model is not None:
        own_scalars(trainer.model)


def _check_activation_checkpointing(trainer: transformers.Trainer) -> None:
    name = checkpointing_option(trainer.args)
    given: Any = getattr(trainer.args, f"{name}_kwargs")
    if getattr(trainer.args, name) and dict(given or {}).get("offload"):
        raise UnsupportedOptionError(
            f"{name}_kwargs={{'offload': True}}: activations cannot move to the host inside one "
            "XLA graph; leave offload off (recomputation alone already frees them)"
        )


def bfloat16_autocast(trainer: transformers.Trainer) -> torch.autocast:
    """The autocast that `bf16=True` means for the forward pass."""
    return torch.autocast(trainer.args.device.type, dtype=torch.bfloat16)


class ModelSharding:
    """Plans the sharding when the first run begins, and shards the model again whenever it was loaded or replaced.

    Args:
        trainer: the trainer.
        config: the options.
        sharder: makes and applies the plan; None on one device, where most methods do nothing.
        ranks: trains together with other processes instead.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        config: ShardingConfig | None,
        sharder: Sharder | None,
        ranks: DataParallel | None,
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._sharder = sharder
        self.ranks = ranks
        self._applied = ExitStack()
        self._applied_to: torch.nn.Module | None = None
        # Names of parameters that the user's model had as DTensors.
        self._were_dtensors: list[str] = []

    @property
    def plan(self) -> ShardingPlan:
        """How the model is sharded.

        Raises:
            ConfigError: it is not sharded, or no run has begun yet.
        """
        if self._sharder is None:
            raise ConfigError("this trainer does not shard; create it with auto_sharding=True or sharding=")
        return self._sharder.plan

    def summary(self) -> str:
        """How the model is sharded, in words; empty if it is not."""
        return "" if self._sharder is None else self._sharder.summary

    @property
    def devices(self) -> int:
        """How many devices train together."""
        if self.ranks is not None:
            return self.ranks.ranks.size
        return 1 if self._sharder is None else self._sharder.devices

    @property
    def saves_shards(self) -> bool:
        """Whether checkpoints are written shard by shard (`ShardingConfig(checkpoints="sharded")`)."""
        return self._sharder is not None and self._sharder.config.checkpoints == "sharded"

    @property
    def holds_shards(self) -> bool:
        """Whether this process has only a shard of the model; then all take part in reading its state."""
        return self.ranks is not None and self.ranks.has_shards(model_of(self._trainer))

    def accept_dtensors(self, model: torch.nn.Module) -> None:
        """Takes over the placements of the user's DTensors, before the model moves to the device."""
        if self.ranks is not None:
            self.ranks.prepare(model, self._config)
        if self._sharder is not None:
            self._were_dtensors += accept_placements(model)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Around a run: parameters are sharded, and intermediate values constrained, by the plan."""
        if self.ranks is not None:
            self.apply()
        if self._sharder is None:
            yield
            return
        try:
            with self._applied:
                self.apply()
                yield
        finally:
            self._applied_to = None

    def apply(self) -> None:
        """Shards the model: at the start of a run, and after its weights were loaded."""
        trainer, model = self._trainer, self._trainer.model
        if self.ranks is not None and isinstance(model, torch.nn.Module):
            self.ranks.prepare(model, self._config)
        if self._sharder is None or not isinstance(model, torch.nn.Module):
            # Without a model `train` makes one by `model_init`, which is sharded when the training begins.
            return
        writes = trainer.args.output_dir is not None and trainer.args.should_save
        folder = Path(trainer.args.output_dir) if writes else None  # type: ignore[arg-type]
        self._sharder.prepare(model, self._example_batch, around=as_if_compiling, folder=folder)
        if self._applied_to is not model:
            self._applied.close()
            self._applied.enter_context(self._sharder.holding(model))
            self._applied_to = model

    def training_begins(self) -> None:
        """Shards the model of a training, whose weights may come from a checkpoint.

        Raises:
            ConfigError: batches cannot be split over the devices.
        """
        trainer = self._trainer
        if self._were_dtensors and isinstance(trainer.optimizer, torch.optim.Optimizer):
            # The user made it before the trainer, from the DTensors.
            names_of_updated(model_of(trainer), trainer.optimizer)
        if self._sharder is not None:
            self.apply()
            self._sharder.check_batch_size(trainer.args.train_batch_size, "per_device_train_batch_size")

    def _example_batch(self) -> Any:
        """A batch like those of the training, on the host. Neither data nor random numbers are used up."""
        trainer = self._trainer
        dataset: Any = trainer.train_dataset if trainer.train_dataset is not None else trainer.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        collate: Callable[[Any], Any] = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
        return example_of(dataset, trainer.args.train_batch_size, lambda samples: dict(collate(samples)))
