"""Trainings by TRL's trainers under `XLATrainerMixin`, and by the stock ones on plain CPU torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest

from tests.hf_trainer.scenarios import Run, steps_of, train, without_xla
from tests.hf_trainer.text_models import tokenizer
from xla_adapters import get_runtime

datasets = pytest.importorskip("datasets")

# Log-probabilities of sequences are sums over tokens, about -100.
TOLERANCE = 1e-5
_TIMES = ("runtime", "per_second", "step_time", "flos")


def rows_of(make: Callable[[int], dict[str, Any]], count: int = 24) -> Any:
    return datasets.Dataset.from_list([make(index) for index in range(count)])


def text(index: int) -> dict[str, Any]:
    return {"text": f"row {index % 10} " * 3}


def completion(index: int) -> dict[str, Any]:
    return {"prompt": f"q{index % 10}:", "completion": f" a{index % 7}"}


def preference(index: int) -> dict[str, Any]:
    return {"prompt": f"q{index % 10}:", "chosen": f" good {index % 10}", "rejected": f" bad {index % 7}"}


def pair(index: int) -> dict[str, Any]:
    return {"chosen": f"q{index % 10}: good", "rejected": f"q{index % 10}: bad{index % 7}"}


def judged(index: int) -> dict[str, Any]:
    return {**completion(index), "label": index % 3 > 0}


def arguments_of(kind: Any, **options: Any) -> Any:
    defaults = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "bf16": False,
    }
    return kind(**{**defaults, **options})


def both(
    kind: Any,
    config: Any,
    make: Callable[[], Any],
    rows: Any,
    *,
    args: dict[str, Any],
    lora: bool = False,
    **options: Any,
) -> tuple[Run, list[dict[str, Any]]]:
    """Our run, and what the stock trainer logs on plain CPU torch."""
    stock = kind.__mro__[2]

    def more() -> dict[str, Any]:
        peft = pytest.importorskip("peft") if lora else None
        adapter = (
            {} if peft is None else {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)}
        )
        return {"train_dataset": rows, "processing_class": tokenizer(), **adapter, **options}

    with without_xla():
        reference = stock(model=make(), args=arguments_of(config, use_cpu=True, **args), **more())
        reference.train()
    get_runtime().device.initialize()
    run = train(kind(model=make(), args=arguments_of(config, **args), **more()))
    return run, reference.state.log_history


def assert_logs_are_equal(run: Run, expected: list[dict[str, Any]], tolerance: float = TOLERANCE) -> None:
    logged = [
        {name: value for name, value in entry.items() if not name.startswith("xla/")}
        for entry in run.trainer.state.log_history
    ]
    assert len(logged) == len(expected) > 0
    for ours, theirs in zip(logged, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not any(part in name for part in _TIMES):
                assert type(ours[name]) is type(value), name
                assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def assert_replayed(run: Run, *, traced: int = 2) -> None:
    program = steps_of(run.trainer).train
    assert program.replays >= program.calls - traced, program.replay_reasons


def assert_one_execution(run: Run, *, graphs: int | None = 1) -> None:
    assert [step.executions for step in run.steps] == [1] * len(run.steps), run.explain()
    assert [step.transfers_to_host for step in run.steps] == [0] * len(run.steps), run.explain()
    if graphs is not None:
        assert sum(step.compiles for step in run.steps) == graphs, run.explain()
