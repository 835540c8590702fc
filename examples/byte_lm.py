"""Trains a small byte-level language model on Python's standard library, with an interruption and a resume.

    python -m examples.byte_lm

Runs on any PJRT device. Half way the training is stopped, and a new Trainer resumes from the checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from transformers import (
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from examples.stdlib_text import byte_blocks, sizes_parser
from hf_trainer import Trainer, XLAStatsCallback


class InterruptAt(TrainerCallback):
    """Stops the training after a step, as a lost machine would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = sizes_parser(__doc__)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--output-dir", type=Path, default=None, help="where checkpoints go (a temporary folder)")
    return parser.parse_args(arguments)


def build_model(options: argparse.Namespace, tokenizer: ByT5Tokenizer) -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.width,
            intermediate_size=options.width * 8 // 3,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            max_position_embeddings=2 * options.block,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Returns the final evaluation's metrics."""
    options = parse(arguments)
    tokenizer = ByT5Tokenizer()
    train_set, eval_set = byte_blocks(tokenizer, block=options.block, characters=options.characters)
    half = options.steps // 2

    with tempfile.TemporaryDirectory() as scratch:
        args = TrainingArguments(
            output_dir=str(options.output_dir or scratch),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            per_device_eval_batch_size=options.batch,
            learning_rate=3e-3,
            warmup_steps=options.steps // 20,
            lr_scheduler_type="cosine",
            logging_steps=max(options.steps // 20, 1),
            eval_strategy="steps",
            eval_steps=half,
            save_steps=half,
            bf16=options.bf16,
            dataloader_drop_last=True,
            report_to=[],
        )

        def new_trainer(*callbacks: TrainerCallback) -> Trainer:
            return Trainer(
                build_model(options, tokenizer),
                args,
                train_dataset=train_set,
                eval_dataset=eval_set,
                processing_class=tokenizer,
                callbacks=[XLAStatsCallback(), *callbacks],
                xla_mode="eager+compile",
            )

        print(f"\n== training, interrupted after step {half}")
        new_trainer(InterruptAt(half)).train()
        print(f"\n== a new trainer resumes at step {half}")
        trainer = new_trainer()
        trainer.train(resume_from_checkpoint=True)
        metrics = trainer.evaluate()

        prompt = "def read(self, "
        tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        set_seed(0)
        written = trainer.generate(
            **tokens, max_new_tokens=options.block - len(prompt), do_sample=True, temperature=0.7
        )
    print(f"\n== what it writes after {prompt!r}\n{tokenizer.decode(written[0], skip_special_tokens=True)}")
    print(f"\nloss on held-out source: {metrics['eval_loss']:.3f} nats per byte")
    return metrics


if __name__ == "__main__":
    main()
