"""`transformers.Trainer` is that of this package, and names of the hub have tiny models behind them."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

counts = {"trainers": 0, "replaceable": 0}


def prepare(mode: str, sources: Path) -> None:
    """Imports everything, and puts trainers, models and data in place."""
    home = Path(os.environ["HF_HOME"])
    os.environ.update(RUN_SLOW="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    if mode == "cpu":
        sys.modules["torch_xla"] = None  # type: ignore[assignment]
    else:
        os.environ.update(PJRT_DEVICE="CPU", TRANSFORMERS_TEST_DEVICE="xla")
    from tests.peer_suites import hub

    hub.make(home / "hub", sources / "tests" / "fixtures")
    # Its tests are in a package `tests`, as are those of this repository.
    importlib.import_module("tests").__path__.append(str(sources / "tests"))
    import transformers
    from transformers import testing_utils
    from transformers.trainer import Trainer

    modules = [transformers, sys.modules["transformers"]]
    if mode == "ours":
        _replace_trainers(modules)
    for module in modules:
        # Gone since these tests were written; one test uses them.
        module.GlueDataset = module.GlueDataTrainingArguments = None  # type: ignore[attr-defined]
    hub.replace_data(sources / "tests" / "fixtures")
    # Tests "for an accelerator" count, too, if they pass on the CPU.
    testing_utils.require_torch_accelerator = lambda test: test
    testing_utils.BACKEND_DEVICE_COUNT["xla"] = lambda: 0
    for names in (testing_utils.BACKEND_MANUAL_SEED, testing_utils.BACKEND_EMPTY_CACHE):
        names["xla"] = names["cpu"]
    _count_trainers(Trainer)
    for name in ("datasets", "peft", "transformers.trainer_seq2seq", "transformers.models.gpt2.modeling_gpt2"):
        importlib.import_module(name)


def begin() -> None:
    """In each child: nothing; the runtime starts with the first arguments of a training."""


def _replace_trainers(modules: list[Any]) -> None:
    import transformers
    from transformers import trainer, trainer_seq2seq

    import hf_trainer

    # Within this package the names go on to mean the stock trainers.
    stock = types.SimpleNamespace(Trainer=trainer.Trainer, Seq2SeqTrainer=trainer_seq2seq.Seq2SeqTrainer)
    hf_trainer.trainer.transformers = stock  # type: ignore[attr-defined]
    # transformers 5.23 puts a second module object into sys.modules while it is imported.
    for module in modules:
        module.Trainer, module.Seq2SeqTrainer = hf_trainer.Trainer, hf_trainer.Seq2SeqTrainer
    post_init = transformers.TrainingArguments.__post_init__

    def on_the_device(self: Any) -> None:
        self.use_cpu = False
        post_init(self)

    transformers.TrainingArguments.__post_init__ = on_the_device  # type: ignore[method-assign]


def _count_trainers(trainer: Any) -> None:
    stock = trainer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        counts["trainers"] += 1
        counts["replaceable"] += 1
        stock(self, *args, **kwargs)

    # transformers reads the signature.
    init.__wrapped__ = stock  # type: ignore[attr-defined]
    trainer.__init__ = init
