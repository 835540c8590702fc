"""`FullySharded`: ranks train one model, of which each holds a shard: of parameters, gradients and optimizer states.

A parameter is split evenly along one dimension, and the `Parameter` itself holds this rank's shard. So optimizers
update shards, and have no more state than that. While the model is called, its modules see whole parameters as
attributes (`self.weight`): they are gathered in the step's program. The backward of the gathering is a reduce-scatter,
which leaves this rank's shard of the mean gradient.

Source: ZeRO stage 3 (Rajbhandari et al. 2020) and torch's `fully_shard`, which gathers in hooks of wrapped modules.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from xla_adapters.errors import ConfigError, UnsupportedOptionError
from xla_adapters.open_step import in_step
from xla_adapters.runtime import get_runtime
from xla_adapters.runtime.ranks import Ranks
from xla_adapters.sharding.collectives import whole_of
from xla_adapters.sharding.plan_report import human_bytes
from xla_adapters.sharding.shard_calls import SHARD, ShardCalls
from xla_adapters.tracing.step_scope import when_step_ends

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_log = logging.getLogger(__name__)
# Of the bytes of parameters, that cannot be split.
_TOLERATED = 0.05
# The attribute of a module that says which of its parameters are shards.
_SHARDS = "_xla_adapters_shards"


def only_tensors(hook: _Hook) -> _Hook:
    """Marks a hook whose Python a replay may leave out: it computes with tensors alone."""
    vars(hook)["only_tensors"] = True
    return hook


class Shard(NamedTuple):
    """How a tensor is split.

    Attributes:
        dim: along which dimension.
        shape: of each rank's shard.
    """

    dim: int
    shape: tuple[int, ...]

    def of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's shard of a whole tensor, with memory of its own."""
        size = self.shape[self.dim]
        return whole.narrow(self.dim, rank * size, size).clone(memory_format=torch.contiguous_format)

    def fits_whole(self, shape: Iterable[int], ranks: int) -> bool:
        """Whether a tensor has the shape of the whole."""
        sizes = [size * ranks if dim == self.dim else size for dim, size in enumerate(self.shape)]
        return list(shape) == sizes


def split_of(shape: Iterable[int], ranks: int) -> Shard | None:
    """How ranks split a parameter: along its largest dimension that they divide; None if there is none.

    Shards of one row are not made: broadcasting would take them for the whole.
    """
    sizes = tuple(shape)
    even = [dim for dim, size in enumerate(sizes) if size % ranks == 0 and size >= 2 * ranks]
    if not even:
        return None
    dim = max(even, key=sizes.__getitem__)
    return Shard(dim, tuple(size // ranks if index == dim else size for index, size in enumerate(sizes)))


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """How a parameter is split; None if it is whole."""
    found: Shard | None = getattr(parameter, SHARD, None)
    return found


def own_shard(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Of a whole value for a parameter what this process holds of it: all, if the parameter is whole."""
    shard = shard_of(parameter)
    return whole if shard is None else shard.of(whole, get_runtime().device.process_index())


def mark_shards(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter, Shard]]:
    """Marks the parameters that are shards: those of a copy of a model, or of one that was moved, are not known yet.

    Returns:
        Them, with their modules and names there.
    """
    found = []
    for module in model.modules():
        for name, shard in vars(module).get(_SHARDS, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None and tuple(parameter.shape) == shard.shape:
                setattr(parameter, SHARD, shard)
                found.append((module, name, parameter, shard))
    return found


class FullySharded:
    """A model of which each rank holds a shard.

    `state_dict()` gathers whole values on the host, and `load_state_dict` takes this rank's shard of whole values. All
    ranks call them.

    Args:
        model: with the same values on all ranks, on the host or the device.
        ranks: that train together.
        calls: looks at what a step computes with shards.

    Raises:
        ConfigError: no parameter of the model can be split.
    """

    def __init__(self, model: torch.nn.Module, ranks: Ranks, calls: ShardCalls) -> None:
        # Its hooks are this object's: as a reference it would never be freed.
        self._known = weakref.ref(model)
        self._ranks, self._calls = ranks, calls
        self._begin()
        self.split()
        whole = [parameter for parameter in model.parameters() if shard_of(parameter) is None]
        bytes_of_whole = sum(parameter.nbytes for parameter in whole)
        if bytes_of_whole > _TOLERATED * sum(parameter.nbytes for parameter in model.parameters()):
            _log.warning(
                "sharding='fsdp': %d parameters of %s, the largest of the shape %s, have no dimension that %d ranks "
                "can split evenly: each rank holds all of them (%s)",
                len(whole),
                type(model).__name__,
                list(max(whole, key=torch.Tensor.numel).shape),
                ranks.size,
                human_bytes(bytes_of_whole),
            )
        if not any(_SHARDS in vars(module) for module in model.modules()):
            raise ConfigError(
                f"sharding='fsdp': no parameter of {type(model).__name__} has a dimension that {ranks.size} ranks "
                "can split evenly; use sharding='dp'"
            )

    @property
    def _model(self) -> torch.nn.Module:
        model = self._known()
        assert model is not None
        return model

    def _begin(self) -> None:
        self._kept: torch.nn.Module | None = None
        # How many calls of modules are under way, one in another.
        self._depth = 0
        # The gathered parameters, by the `id` of the parameter, with their version.
        self._wholes: dict[int, tuple[torch.nn.Parameter, torch.Tensor, int]] = {}
        self._hooked: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> FullySharded:
        """For a copy of the model, whose hooks it is."""
        made = FullySharded.__new__(FullySharded)
        vars(made).update(vars(self))
        memo[id(self)] = made
        made._begin()
        model = copy.deepcopy(self._model, memo)
        # Of a copy of a part of the model nothing else may keep the rest.
        made._known, made._kept = weakref.ref(model), model
        return made

    def __reduce__(self) -> Any:
        """A pickled model would be a shard without the others."""
        raise UnsupportedOptionError(
            f"{type(self._model).__name__} is pickled, and this rank has a shard of it (sharding='fsdp'): pickle "
            "model.state_dict(), which is whole, and which all ranks call"
        )

    # ---- splitting -------------------------------------------------------------------------------

    def split(self) -> None:
        """Splits the parameters that are whole; can be called again, when some were replaced."""
        for module in self._model.modules():
            own: dict[str, Shard] = {}
            for name, parameter in module._parameters.items():
                before = vars(module).get(_SHARDS, {}).get(name)
                if parameter is not None and (shard := self._split(parameter, before)) is not None:
                    own[name] = shard
            if own and vars(module).get(_SHARDS) != own:
                if _SHARDS not in vars(module):
                    # A bound method has no attributes, of which torch sets one.
                    module.register_state_dict_post_hook(functools.partial(self._give_whole_values))
                    module.register_load_state_dict_pre_hook(self._take_shards_of_values)
                vars(module)[_SHARDS] = own
            if id(module) not in self._hooked:
                self._hooked.add(id(module))
                module.register_forward_pre_hook(self._enters)
                module.register_forward_hook(self._leaves, always_call=True)

    def _split(self, parameter: torch.nn.Parameter, before: Shard | None) -> Shard | None:
        # Moving a module may have made another parameter of it.
        known = shard_of(parameter) or before
        if known is not None and tuple(parameter.shape) == known.shape:
            setattr(parameter, SHARD, known)
            return known
        shard = split_of(parameter.shape, self._ranks.size)
        if shard is not None:
            with torch.no_grad():
                gradient = parameter.grad
                parameter.grad = None
                parameter.data = shard.of(parameter.data, self._ranks.rank)
                if gradient is not None:
                    parameter.grad = shard.of(gradient, self._ranks.rank)
            setattr(parameter, SHARD, shard)
        return shard

    def join(self) -> None:
        """Moves the model to the host of each rank, whole; `split` splits it again."""
        self._model.to("cpu")
        for _, _, parameter, shard in mark_shards(self._model):
            if shard_of(parameter) is not None:
                parameter.grad = None
                parameter.data = gathered_on_host(parameter, shard, self._ranks)
                delattr(parameter, SHARD)

    # ---- calls of the model ----------------------------------------------------------------------

    @only_tensors
    def _enters(self, module: torch.nn.Module, args: Any) -> None:
        if self._depth == 0 and not self._wholes:
            self._show()
        self._depth += 1
        own = vars(module)
        for name in own.get(_SHARDS, ()):
            known = self._wholes.get(id(module._parameters.get(name)))
            if known is not None:
                own[name] = known[1]
            else:
                # `torch.func.functional_call` has put another tensor there.
                own.pop(name, None)

    @only_tensors
    def _leaves(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        # The loss, too, may use parameters.
        if self._depth == 0 and not (in_step() and torch.is_grad_enabled()):
            self.hide()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Meanwhile the modules see whole parameters, gathered once; afterwards their memory is free again."""
        if self._depth == 0 and not self._wholes:
            self._show()
        self._depth += 1
        try:
            yield
        finally:
            # Not after a step that was left by an error.
            self._depth = max(0, self._depth - 1)
            self.hide()

    def _show(self) -> None:
        """Has the modules see whole parameters."""
        sharded = mark_shards(self._model)
        if not sharded:
            return
        if in_step():
            when_step_ends(self._abandon)
        else:
            self._ranks.wait(f"a call of {type(self._model).__name__} outside of a step")
        try:
            for module, name, parameter, shard in sharded:
                known = self._wholes.get(id(parameter))
                if known is None:
                    # A model that is first called without gradients can be called with them afterwards.
                    with torch.set_grad_enabled(parameter.requires_grad):
                        whole = self._gather(parameter, shard)
                    self._calls.wholes[whole] = None
                    known = self._wholes[id(parameter)] = parameter, whole, whole._version
                vars(module)[name] = known[1]
        except BaseException:
            self._abandon()
            raise

    def _gather(self, parameter: torch.nn.Parameter, shard: Shard) -> torch.Tensor:
        if get_runtime().device.owns(parameter):
            return whole_of(parameter, shard.dim)
        return gathered_on_host(parameter, shard, self._ranks)

    def hide(self) -> None:
        """Has the modules see their shards again, unless one of them is being called.

        Raises:
            UnsupportedOptionError: a gathered parameter was changed, which would be lost.
        """
        if self._depth == 0:
            changed = [whole for _, whole, version in self._wholes.values() if whole._version != version]
            self._abandon()
            if changed:
                raise UnsupportedOptionError(
                    f"a parameter of the shape {list(changed[0].shape)} was changed in the model's forward: under "
                    "sharding='fsdp' that is a gathered copy, and the change would be lost. Change it between steps, "
                    "by model.parameters(), or use sharding='dp'"
                )

    def _abandon(self) -> None:
        self._depth = 0
        wholes, self._wholes = self._wholes, {}
        if wholes:
            for module in self._model.modules():
                for name in vars(module).get(_SHARDS, ()):
                    vars(module).pop(name, None)

    # ---- values on the host ----------------------------------------------------------------------

    def _give_whole_values(
        self, module: torch.nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any
    ) -> None:
        for name, shard in vars(module)[_SHARDS].items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and tuple(value.shape) == shard.shape:
                state[prefix + name] = gathered_on_host(value, shard, self._ranks)

    def _take_shards_of_values(
        self, module: torch.nn.Module, state: MutableMapping[str, Any], prefix: str, *rest: Any
    ) -> None:
        for name, shard in vars(module)[_SHARDS].items():
            parameter, value = module._parameters.get(name), state.get(prefix + name)
            is_split = parameter is not None and tuple(parameter.shape) == shard.shape
            if is_split and isinstance(value, torch.Tensor) and shard.fits_whole(value.shape, self._ranks.size):
                state[prefix + name] = shard.of(value, self._ranks.rank)


@contextmanager
def whole_parameters(module: torch.nn.Module) -> Iterator[None]:
    """Meanwhile a module that is called often has whole parameters, gathered once; all ranks enter it.

    Without it each call outside of a step gathers them. Inside, ranks may call the module a different number of times.

    Args:
        module: does not train meanwhile; nothing happens if no rank has only a shard of it.
    """
    hooks = (hook for part in module.modules() for hook in part._forward_pre_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    with ExitStack() as stack:
        for sharded in dict.fromkeys(owner for owner in owners if isinstance(owner, FullySharded)):
            stack.enter_context(sharded.shown())
        yield


class SharedStates:
    """Has `state_dict()` of optimizers gather whole states on the host, and `load_state_dict` take shards of them.

    All ranks call them. A state that has the shape of a shard is one.

    Args:
        ranks: that train together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known = WeakIdKeyDictionary()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds an optimizer; can be called again."""
        if optimizer not in self._known:
            self._known[optimizer] = None
            optimizer.register_state_dict_post_hook(self._give_whole)
            optimizer.register_load_state_dict_pre_hook(self._take_shards)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises if an optimizer has whole states of parameters that are shards.

        Raises:
            ConfigError: they were loaded before it was added.
        """
        for parameter, values in optimizer.state.items():
            shard = shard_of(parameter)
            for key, value in values.items():
                if shard and isinstance(value, torch.Tensor) and shard.fits_whole(value.shape, self._ranks.size):
                    raise ConfigError(
                        f"{type(optimizer).__name__} has a whole {key!r} of the shape {list(value.shape)} for a shard "
                        f"of the shape {list(shard.shape)} (sharding='fsdp'): its state was loaded too early. Call "
                        "xla_adapters.sharding.share_state(optimizer) before optimizer.load_state_dict(...), and make "
                        "the optimizer after distribute_module"
                    )

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the states of an optimizer whole, on the host."""
        for parameter, values in optimizer.state.items():
            shard = shard_of(parameter)
            for key, value in values.items():
                if shard is not None and isinstance(value, torch.Tensor) and tuple(value.shape) == shard.shape:
                    values[key] = gathered_on_host(value, shard, self._ranks)

    def _give_whole(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        def whole(value: torch.Tensor, shard: Shard) -> torch.Tensor:
            return gathered_on_host(value, shard, self._ranks) if tuple(value.shape) == shard.shape else value

        return self._changed(optimizer, saved, whole)

    def _take_shards(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        def part(value: torch.Tensor, shard: Shard) -> torch.Tensor:
            return shard.of(value, self._ranks.rank) if shard.fits_whole(value.shape, self._ranks.size) else value

        return self._changed(optimizer, saved, part)

    def _changed(
        self,
        optimizer: torch.optim.Optimizer,
        saved: dict[str, Any],
        change: Callable[[torch.Tensor, Shard], torch.Tensor],
    ) -> dict[str, Any]:
        updated = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        shards = list(map(shard_of, updated))
        states = dict(saved["state"])
        for index, values in states.items():
            shard = shards[index] if isinstance(index, int) and index < len(shards) else None
            if shard is not None:
                states[index] = {
                    key: change(value, shard) if isinstance(value, torch.Tensor) else value
                    for key, value in values.items()
                }
        return {**saved, "state": states}


class _Gathering(threading.local):
    """Whether other ranks than the first get whole values, too."""

    for_all = True


_gathering = _Gathering()


@contextmanager
def for_first_rank() -> Iterator[None]:
    """Meanwhile only the first rank gets whole values of shards; others get tensors without values (`meta`)."""
    before, _gathering.for_all = _gathering.for_all, False
    try:
        yield
    finally:
        _gathering.for_all = before


def gathered_on_host(value: torch.Tensor, shard: Shard, ranks: Ranks) -> torch.Tensor:
    """The whole of a tensor of which each rank has a shard, on the host. See `for_first_rank`."""
    with torch.no_grad():
        (host,) = get_runtime().transfers.to_host([value.detach()])
        shards = ranks.gather_tensor(host, "the gathering of shards, as for a state_dict", to_all=_gathering.for_all)
        return torch.cat(shards or [host.to("meta")] * ranks.size, shard.dim)
