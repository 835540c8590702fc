"""`XLAConfig`: the options both adapters and hand-written loops share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from xla_adapters.errors import ConfigError

XLAMode = Literal["eager", "eager+compile", "eager+dynamo", "lazy"]
OnGraphBreak = Literal["error", "warn", "allow"]
Accumulation = Literal["per_micro_batch", "unrolled"]
FreeGrads = Literal["auto"] | bool
StepReplay = Literal["auto"] | bool
StepsForm = Literal["loop", "unrolled"]
RngAlgorithm = Literal["auto", "default", "philox", "three_fry"]


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{name}={value!r} is not a valid value; valid values: {listed}")


@dataclass(frozen=True, kw_only=True)
class XLAConfig:
    """How training steps are traced and executed.

    Args:
        xla_mode: `"eager"` runs every operation at once, step included. `"eager+compile"` runs
            everything eagerly but the step, which is one compiled graph. `"eager+dynamo"` compiles
            the model with `torch.compile(backend="openxla")` and the optimizer step as a graph of
            its own. `"lazy"` is classic lazy tracing with a sync at each step.
        on_graph_break: what a read, save or sync inside a step does: `"error"` raises with the
            line that did it; `"warn"` executes what is pending once, goes on, and says so once per
            line; `"allow"` does the same in silence.
        compile_eval: whether evaluation and prediction steps are compiled graphs too.
        max_graphs: the number of different graphs one step may compile before `GraphLimitError`;
            `None` for no limit.
        free_grads: whether gradients are dropped inside the step, so that they are not outputs of
            its graph (less memory); `"auto"` does so when nothing can look at them afterwards.
        accumulation: under gradient accumulation, `"per_micro_batch"` executes one graph per micro
            batch; `"unrolled"` traces all micro batches of an optimizer step into one graph.
        step_replay: whether a step that was traced twice alike is from then on the call of its executable,
            without its Python. `"auto"` does so where all that the Python does beside tensors is known;
            `True` also where it is your own (prints, counters and the like are left out then).
        replay_verify_every: replays after which a step is traced again and held against them; `None` for never.
        steps_per_execution: how many replayed steps are one call of an executable. Until the last of them is
            called, they wait; who uses a tensor that they change has them executed at once, one by one.
        steps_form: `"loop"` or `"unrolled"`: whether that executable holds the step once and loops over it, or once
            for each step, which takes so many times as long to compile.

        rng_algorithm: what random numbers on the device are drawn with, in the whole process: `"default"` is the
            device's own; `"auto"` is `"three_fry"` on CPU devices, where it is the fastest (see
            `xla_adapters.dropout`), else `"default"`. Another algorithm draws other numbers. The variable
            `XLA_RNG_BIT_GENERATOR`, if it is set, wins.

    Raises:
        ConfigError: a value is not one of those listed.
    """

    xla_mode: XLAMode = "eager+compile"
    on_graph_break: OnGraphBreak = "error"
    compile_eval: bool = True
    max_graphs: int | None = None
    free_grads: FreeGrads = "auto"
    accumulation: Accumulation = "per_micro_batch"
    step_replay: StepReplay = "auto"
    replay_verify_every: int | None = 1000
    steps_per_execution: int = 1
    steps_form: StepsForm = "loop"
    rng_algorithm: RngAlgorithm = "auto"

    def __post_init__(self) -> None:
        _check_choice("xla_mode", self.xla_mode, get_args(XLAMode))
        _check_choice("on_graph_break", self.on_graph_break, get_args(OnGraphBreak))
        _check_choice("compile_eval", self.compile_eval, (True, False))
        _check_choice("free_grads", self.free_grads, ("auto", True, False))
        _check_choice("step_replay", self.step_replay, ("auto", True, False))
        _check_choice("rng_algorithm", self.rng_algorithm, get_args(RngAlgorithm))
        _check_choice("accumulation", self.accumulation, get_args(Accumulation))
        _check_choice("steps_form", self.steps_form, get_args(StepsForm))
        several = self.steps_per_execution
        if isinstance(several, bool) or not isinstance(several, int) or several < 1:
            raise ConfigError(f"steps_per_execution={several!r} is not a valid value; valid values: an integer >= 1")
        if several > 1 and not self.may_replay:
            raise ConfigError(
                f"steps_per_execution={several}: only replayed steps are executed together, and with xla_mode="
                f"{self.xla_mode!r}, step_replay={self.step_replay!r}, accumulation={self.accumulation!r} none is; it "
                "needs 'eager+compile', 'auto' or True, and 'per_micro_batch'"
            )
        for name in ("max_graphs", "replay_verify_every"):
            limit = getattr(self, name)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
                raise ConfigError(f"{name}={limit!r} is not a valid value; valid values: None or an integer >= 1")
        if self.accumulation == "unrolled" and self.xla_mode != "eager+compile":
            raise ConfigError(
                f"accumulation='unrolled' needs xla_mode='eager+compile' (it is {self.xla_mode!r}): "
                "the other modes have no step graph to unroll micro batches into"
            )
        if self.step_replay is True and self.accumulation == "unrolled":
            raise ConfigError(
                "step_replay=True with accumulation='unrolled': micro batches of one step are traced together, and "
                "only whole steps of one micro batch are replayed; use accumulation='per_micro_batch'"
            )
        if self.step_replay is True and self.xla_mode != "eager+compile":
            raise ConfigError(
                f"step_replay=True needs xla_mode='eager+compile' (it is {self.xla_mode!r}): "
                "the other modes have no step graph to replay"
            )
        if self.max_graphs is not None and self.xla_mode != "eager+compile":
            raise ConfigError(
                f"max_graphs={self.max_graphs} needs xla_mode='eager+compile' (it is {self.xla_mode!r}): "
                "only there does the step own its graphs and can count them"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> XLAConfig:
        """Builds a config from plain values (JSON, YAML); an unknown key lists the valid ones."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"unknown option(s) {', '.join(unknown)}; valid options: {', '.join(known)}")
        return cls(**values)

    @classmethod
    def resolve(cls, config: XLAConfig | None, options: Mapping[str, Any]) -> XLAConfig:
        """The config from either way of giving the options: as a whole, or singly.

        Args:
            config: the options as a whole.
            options: single options by name; those that are `None` count as not given.

        Raises:
            ConfigError: both ways were used, or a value is not valid.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if config is None:
            return cls.from_dict(given)
        if given:
            singly = ", ".join(f"{name}=" for name in sorted(given))
            raise ConfigError(f"the XLA options were given twice: as an XLAConfig and as {singly}")
        return config

    @property
    def compiles_step(self) -> bool:
        """Whether training steps run as one compiled graph."""
        return self.xla_mode == "eager+compile"

    @property
    def may_replay(self) -> bool:
        """Whether training steps of an adapter may be replayed."""
        return self.compiles_step and self.step_replay is not False and self.accumulation == "per_micro_batch"

    @property
    def needs_replay(self) -> str | None:
        """The option, if there is one, that has no effect where steps cannot be replayed."""
        if self.steps_per_execution > 1:
            return f"steps_per_execution={self.steps_per_execution}"
        return "step_replay=True" if self.step_replay is True else None

    @property
    def eager_by_default(self) -> bool:
        """Whether operations outside steps execute at once."""
        return self.xla_mode != "lazy"
