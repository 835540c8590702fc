"""Options are checked where they are given, and errors list what is valid."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest

from xla_adapters import CompiledStep, ConfigError, XLAAdapterError, XLAConfig, step
from xla_adapters.config import REMOVED_OPTIONS, XLAOptions


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ({"xla_mode": "compile"}, ["'eager'", "'eager+compile'", "'eager+dynamo'", "'lazy'"]),
        ({"on_graph_break": "raise"}, ["'error'", "'warn'", "'allow'"]),
        ({"compile_eval": "yes"}, ["True", "False"]),
        ({"free_grads": "never"}, ["'auto'", "True", "False"]),
        ({"accumulation": "all"}, ["'per_micro_batch'", "'unrolled'"]),
        ({"max_graphs": 0}, ["None", ">= 1"]),
        ({"on_recompile": "raise"}, ["'warn'", "'error'", "'ignore'"]),
        ({"max_graphs": True}, ["None", ">= 1"]),
        ({"max_graphs": 1.5}, ["None", ">= 1"]),
    ],
)
def test_unknown_values_list_the_valid_ones(options: dict[str, Any], listed: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        XLAConfig(**options)
    for text in (*options, repr(next(iter(options.values()))), *listed):
        assert text in str(caught.value)


_OF_COMPILED_STEPS = (
    {"accumulation": "unrolled"},
    {"max_graphs": 3},
    {"on_recompile": "error"},
    {"step_replay": True},
    {"profile_steps": (1, 2)},
)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("option", _OF_COMPILED_STEPS)
def test_options_that_could_not_take_effect_are_refused(mode: Any, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'eager\+compile' or 'eager\+dynamo'"):
        XLAConfig(xla_mode=mode, **option)


@pytest.mark.parametrize("option", _OF_COMPILED_STEPS)
def test_both_modes_that_compile_steps_have_the_same_options(option: dict[str, Any]) -> None:
    compiled, dynamo = (XLAConfig(xla_mode=mode, **option) for mode in ("eager+compile", "eager+dynamo"))
    assert dynamo == dataclasses.replace(compiled, xla_mode="eager+dynamo")


def test_config_is_frozen_and_keyword_only() -> None:
    config = XLAConfig()
    assert (config.xla_mode, config.on_graph_break, config.compile_eval) == ("eager+compile", "error", True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.xla_mode = "lazy"  # type: ignore[misc]
    with pytest.raises(TypeError):
        XLAConfig("lazy")  # type: ignore[misc]


def test_from_dict_names_unknown_options() -> None:
    assert XLAConfig.from_dict({"max_graphs": 2}) == XLAConfig(max_graphs=2)
    with pytest.raises(ConfigError, match=r"colour.*valid options: xla_mode, on_graph_break"):
        XLAConfig.from_dict({"colour": "red"})


@pytest.mark.parametrize("option", REMOVED_OPTIONS)
def test_options_of_earlier_versions_say_what_to_do_instead(option: str) -> None:
    for use in (lambda: XLAConfig.from_dict({option: 2}), lambda: step(**{option: 2})):
        with pytest.raises(ConfigError, match=f"{option} is no longer an option: "):
            use()


def test_keyword_arguments_have_the_types_of_the_options() -> None:
    keywords, options = get_type_hints(XLAOptions), get_type_hints(XLAConfig)
    assert list(keywords) == list(options)
    assert all(keywords[name] == option | None for name, option in options.items())


def test_step_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        step(config=XLAConfig(), max_graphs=2)
    with pytest.raises(ConfigError, match="openxla"):
        step(xla_mode="eager+dynamo")
    with pytest.raises(ConfigError, match="openxla"):
        CompiledStep(lambda: None, config=XLAConfig(xla_mode="eager+dynamo"))
    with pytest.raises(ConfigError, match="valid options"):
        step(modus="lazy")


def test_every_error_is_one_family() -> None:
    from xla_adapters import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    raised = [cls for cls in classes if not cls.__name__.endswith("Warning")]
    assert len(raised) > 8
    assert all(issubclass(cls, XLAAdapterError) for cls in raised)
    assert set(errors.GRAPH_BREAK_ERRORS) == set(errors.BreakKind)
