"""`XLAConfig`: the options that both adapters and hand-written loops share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypedDict, get_args

from xla_adapters.errors import ConfigError

XLAMode = Literal["eager", "eager+compile", "eager+dynamo", "lazy"]
OnGraphBreak = Literal["error", "warn", "allow"]
Accumulation = Literal["per_micro_batch", "unrolled"]
FreeGrads = Literal["auto"] | bool
StepReplay = Literal["auto"] | bool
OnRecompile = Literal["warn", "error", "ignore"]
OnReplayMismatch = Literal["error", "retrace"]
RngAlgorithm = Literal["auto", "default", "philox", "three_fry"]
# A folder; False for no cache; None for that of the environment, or the default.
CacheDir = str | os.PathLike[str] | Literal[False] | None


# Options of earlier versions, and what to do instead.
REMOVED_OPTIONS = {
    "steps_per_execution": "each step is an execution of its own; leave it out (step_replay keeps short steps cheap)",
    "steps_form": "each step is an execution of its own; leave it out",
    "profile_signal": "use profile_steps=(first, last)",
    "profile_slow_steps": "use profile_steps=(first, last)",
}


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises `ConfigError`, which lists the choices, on a value that is none of them."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{name}={value!r} is not a valid value; valid values: {listed}")


def check_switch(name: str, value: object) -> bool:
    """The value of an option that is on or off.

    Raises:
        ConfigError: it is not a bool.
    """
    check_choice(name, value, (True, False))
    return bool(value)


def check_cache_dir(value: object) -> None:
    """Checks a value of `CacheDir`.

    Raises:
        ConfigError: it is none.
    """
    is_path = isinstance(value, (str, os.PathLike)) and str(value) and "\0" not in str(value)
    if value is not None and value is not False and not is_path:
        raise ConfigError(
            f"cache_dir={value!r} is not a valid value; valid values: the path of a folder, False (compiled programs "
            "are not kept), or None (the folder in the variable XLA_ADAPTERS_CACHE_DIR, or the default)"
        )


class XLAOptions(TypedDict, total=False):
    """The options of `XLAConfig` as the type of keyword arguments, `**options: Unpack[XLAOptions]`."""

    xla_mode: XLAMode | None
    on_graph_break: OnGraphBreak | None
    compile_eval: bool | None
    max_graphs: int | None
    on_recompile: OnRecompile | None
    free_grads: FreeGrads | None
    accumulation: Accumulation | None
    step_replay: StepReplay | None
    replay_verify_every: int | None
    on_replay_mismatch: OnReplayMismatch | None
    rng_algorithm: RngAlgorithm | None
    cache_dir: CacheDir
    profile_steps: tuple[int, int] | None
    profile_folder: str | None


@dataclass(frozen=True, kw_only=True)
class XLAConfig:
    """How training steps are traced and executed.

    Args:
        xla_mode: `"eager"` executes every operation immediately, in steps, too. `"eager+compile"` executes everything
            immediately, except steps, each of which is one compiled graph. `"eager+dynamo"` does so, too, and compiles
            the model with `torch.compile(backend="openxla")`, which is what runs where it is called outside of steps.
            `"lazy"` is torch_xla's lazy tracing with a sync after each step.
        on_graph_break: what a read, save or sync inside a step does: `"error"` raises an error with the line of your
            code; `"warn"` executes what is recorded so far, continues, and warns once per line; `"allow"` does the same
            without a warning.
        compile_eval: whether evaluation and prediction steps are compiled graphs, too.
        max_graphs: how many different graphs a step may compile before `GraphLimitError`; `None` for no limit.
        on_recompile: what a graph after the first one of a training step does: `"warn"` logs a warning that says what
            has changed; `"error"` raises `GraphLimitError` with the same text before it compiles; `"ignore"` logs it
            as information.
        free_grads: whether gradients are freed inside the step, so that they are not outputs of its graph (less
            memory); `"auto"` does so if nothing can read them afterwards.
        accumulation: with gradient accumulation, `"per_micro_batch"` executes one graph per micro batch;
            `"unrolled"` traces all micro batches of an optimizer step into one graph.
        step_replay: whether a step that gave the same graph twice is replayed from then on: its executable is called,
            and its Python does not run. `"auto"` does so if everything that the Python can reach is known to be safe
            (see `docs/replay.md`). `True` is your promise that the step depends only on its tensors, on learning rates,
            and on guarded values; other effects of its Python are lost. `xla_adapters.replay_safe` makes that promise
            for one function.
        replay_verify_every: how often a replayed step is traced again and compared with its replay: after 8, 16, 32,
            ... 1024 replays, then after each `replay_verify_every` replays. Shorter values also limit the first
            intervals. `None` for never.
        on_replay_mismatch: what happens if they differ: `"error"` raises `ReplayMismatchError`, which names the
            difference and the first step that is affected; `"retrace"` warns, and traces all further steps.
        rng_algorithm: the algorithm of random numbers on the device, for the whole process: `"default"` is the
            device's own; `"auto"` is `"three_fry"` on CPU devices, where it is the fastest, else `"default"`.
            Algorithms draw different numbers. The environment variable `XLA_RNG_BIT_GENERATOR` has priority.
        cache_dir: the folder in which compiled programs are kept for later processes, for the whole process; see
            `xla_adapters.initialize`, whose option of this name can be given before the runtime starts.
        profile_steps: the first and the last call of the training step (from 1, each micro batch of an accumulation is
            one) of which a profile is recorded; `None` for no profile. An error, or the end of the run, ends it early.
        profile_folder: where the profile is written; `None` for `xla-profile` in the run's folder (HF's `output_dir`,
            Lightning's `default_root_dir`), else in the working directory.

    Raises:
        ConfigError: a value is not valid, or two options contradict each other.
    """

    xla_mode: XLAMode = "eager+compile"
    on_graph_break: OnGraphBreak = "error"
    compile_eval: bool = True
    max_graphs: int | None = None
    on_recompile: OnRecompile = "warn"
    free_grads: FreeGrads = "auto"
    accumulation: Accumulation = "per_micro_batch"
    step_replay: StepReplay = "auto"
    replay_verify_every: int | None = 1000
    on_replay_mismatch: OnReplayMismatch = "error"
    rng_algorithm: RngAlgorithm = "auto"
    cache_dir: CacheDir = None
    profile_steps: tuple[int, int] | None = None
    profile_folder: str | None = None

    def __post_init__(self) -> None:
        check_choice("xla_mode", self.xla_mode, get_args(XLAMode))
        check_choice("on_graph_break", self.on_graph_break, get_args(OnGraphBreak))
        check_choice("on_recompile", self.on_recompile, get_args(OnRecompile))
        check_choice("compile_eval", self.compile_eval, (True, False))
        check_choice("free_grads", self.free_grads, ("auto", True, False))
        check_choice("step_replay", self.step_replay, ("auto", True, False))
        check_choice("on_replay_mismatch", self.on_replay_mismatch, get_args(OnReplayMismatch))
        check_choice("rng_algorithm", self.rng_algorithm, get_args(RngAlgorithm))
        check_choice("accumulation", self.accumulation, get_args(Accumulation))
        check_cache_dir(self.cache_dir)
        self._check_profile()
        for name in ("max_graphs", "replay_verify_every"):
            limit = getattr(self, name)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
                raise ConfigError(f"{name}={limit!r} is not a valid value; valid values: None or an integer >= 1")
        if self.step_replay is True and self.accumulation == "unrolled":
            raise ConfigError(
                "step_replay=True with accumulation='unrolled': micro batches of one step are traced together, and "
                "only whole steps of one micro batch are replayed; use accumulation='per_micro_batch'"
            )
        if not self.compiles_step:
            self._check_without_a_step()

    def _check_without_a_step(self) -> None:
        limit = "on_recompile='error'" if self.on_recompile == "error" else f"max_graphs={self.max_graphs}"
        for given, option, why in (
            (self.accumulation == "unrolled", "accumulation='unrolled'", "micro batches are unrolled into its graph"),
            (self.step_replay is True, "step_replay=True", "what is replayed is its graph"),
            (self.limits_graphs, limit, "what is counted are its graphs"),
        ):
            if given:
                raise ConfigError(
                    f"{option} needs xla_mode='eager+compile' or 'eager+dynamo' (it is {self.xla_mode!r}): in the "
                    f"other modes no step is compiled, and {why}"
                )

    def _check_profile(self) -> None:
        steps = self.profile_steps
        if steps is None:
            if self.profile_folder is not None:
                raise ConfigError(f"profile_folder={self.profile_folder!r} without profile_steps: nothing is recorded")
            return
        is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2 and all(type(step) is int for step in steps)
        if not is_pair or not 1 <= steps[0] <= steps[1]:
            raise ConfigError(
                f"profile_steps={steps!r} is not a valid value; valid values: None, or two integers, the first "
                "step and the last, counted from 1"
            )
        # JSON and YAML have lists only.
        object.__setattr__(self, "profile_steps", tuple(steps))
        if not self.compiles_step:
            raise ConfigError(
                f"a profile needs xla_mode='eager+compile' or 'eager+dynamo' (it is {self.xla_mode!r}): the other "
                "modes have no step at whose edges a profile could begin and end; use torch_xla.debug.profiler itself"
            )

    @staticmethod
    def names() -> list[str]:
        """The names of the options."""
        return [field.name for field in fields(XLAConfig)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> XLAConfig:
        """Builds a config from plain values (JSON, YAML, a command line); `"true"` and `"false"` are those of Python.

        Raises:
            ConfigError: a key is unknown, or an option of an earlier version; or a value is not valid.
        """
        known = cls.names()
        for name in sorted(values.keys() & REMOVED_OPTIONS.keys()):
            raise ConfigError(f"{name} is no longer an option: {REMOVED_OPTIONS[name]}")
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"unknown option(s) {', '.join(unknown)}; valid options: {', '.join(known)}")
        words = {"true": True, "false": False}
        given = dict(values)
        given.update({name: words[str(value).lower()] for name, value in values.items() if str(value).lower() in words})
        return cls(**given)

    @classmethod
    def resolve(cls, config: XLAConfig | None, options: Mapping[str, Any]) -> XLAConfig:
        """The config from a whole config, or from single options.

        Args:
            config: all options; None if single options are given.
            options: single options by name. None counts as not given, except of `replay_verify_every`.

        Raises:
            ConfigError: both ways were used, an option is unknown, or a value is not valid.
        """
        given = {name: value for name, value in options.items() if value is not None or name == "replay_verify_every"}
        if config is None:
            return cls.from_dict(given)
        if given:
            singly = ", ".join(f"{name}=" for name in sorted(given))
            raise ConfigError(f"the XLA options were given twice: as an XLAConfig and as {singly}")
        return config

    def of_numbers(self) -> dict[str, Any]:
        """The options by name that may decide the numbers of a run, for its checkpoints."""
        return {
            name: value
            for name, value in asdict(self).items()
            if not name.startswith("profile_") and name != "cache_dir"
        }

    @property
    def compiles_step(self) -> bool:
        """Whether training steps run as one compiled graph."""
        return self.xla_mode in ("eager+compile", "eager+dynamo")

    @property
    def limits_graphs(self) -> bool:
        """Whether a further graph may be an error."""
        return self.max_graphs is not None or self.on_recompile == "error"

    def without_graph_limits(self) -> XLAConfig:
        """The same options for steps that may have several graphs, as evaluations with a partial last batch have."""
        on_recompile: OnRecompile = "warn" if self.on_recompile == "error" else self.on_recompile
        return replace(self.unprofiled(), max_graphs=None, on_recompile=on_recompile)

    def unprofiled(self) -> XLAConfig:
        """The same options without a profile, for steps that are no training steps."""
        return replace(self, profile_steps=None, profile_folder=None)

    def of_run(self, folder: str | None) -> XLAConfig:
        """The same options for a run that writes into this folder."""
        if folder is None or self.profile_steps is None or self.profile_folder is not None:
            return self
        return replace(self, profile_folder=os.path.join(folder, "xla-profile"))

    @property
    def may_replay(self) -> bool:
        """Whether these options allow an adapter to replay training steps."""
        return self.compiles_step and self.step_replay is not False and self.accumulation == "per_micro_batch"

    @property
    def eager_by_default(self) -> bool:
        """Whether operations outside of steps are executed immediately."""
        return self.xla_mode != "lazy"
