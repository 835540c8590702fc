"""Trains a byte-level GPT on Python's standard library in Lightning; stops and resumes where you like.

    python -m examples.lightning_gpt --output-dir runs/gpt             # Ctrl-C saves a checkpoint and ends
    python -m examples.lightning_gpt --output-dir runs/gpt --resume    # continues from the last checkpoint

A resumed run continues with the bytes that the interrupted one would have read next.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_strategy  # noqa: F401 (gives Lightning the strategy "xla_eager")
from examples.stdlib_text import read_sources, sizes_parser

BYTES = 256
_PROMPT = "def read(self, "


class RandomBlocks(IterableDataset[torch.Tensor]):
    """An endless stream of random blocks of a text; block n is always the same.

    Args:
        text: the bytes of the text, of shape (length,).
        block: length of a block.
    """

    def __init__(self, text: torch.Tensor, block: int) -> None:
        self._text = text
        self._block = block

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in itertools.count():
            generator = torch.Generator().manual_seed(number)
            start = int(torch.randint(len(self._text) - self._block, (), generator=generator))
            yield self._text[start : start + self._block]


class StdlibBytes(L.LightningDataModule):
    """The sources of the standard library as bytes; the last 2% are held out."""

    def __init__(self, *, characters: int, block: int, batch_size: int) -> None:
        super().__init__()
        text = "\n".join(read_sources(characters)).encode()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._held_out = max(len(self._bytes) // 50, block * batch_size)
        self._block = block
        self._batch_size = batch_size

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        # Starts with the first block; a resumed run skips those that were already seen.
        blocks = RandomBlocks(self._bytes[: -self._held_out], self._block)
        return DataLoader(blocks, batch_size=self._batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        held_out = self._bytes[-self._held_out :]
        blocks = held_out[: len(held_out) // self._block * self._block].view(-1, self._block)
        return DataLoader(TensorDataset(blocks), batch_size=self._batch_size, drop_last=True)


class ByteGPT(L.LightningModule):
    """GPT-2 from transformers over bytes; nothing in it knows of XLA."""

    def __init__(self, *, width: int, layers: int, block: int, learning_rate: float, warmup_steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": block, "vocab_size": BYTES}
        # Without dropout: blocks start anywhere in the text, so the model hardly sees one twice.
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.gpt = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=None, eos_token_id=None))

    def training_step(self, blocks: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.gpt(input_ids=blocks, labels=blocks).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> None:
        (blocks,) = batch
        self.log("val_loss", self.gpt(input_ids=blocks, labels=blocks).loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        warmup = self.hparams["warmup_steps"]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(warmup, 1)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def write(self, prompt: str, length: int) -> str:
        """Generates text after a prompt."""
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        written = self.gpt.eval().generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=length,
            do_sample=True,
            temperature=0.7,
            pad_token_id=0,
        )
        return bytes(written[0].tolist()).decode(errors="replace")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = sizes_parser(__doc__)
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed, bf16-true")
    parser.add_argument("--strategy", default="xla_eager", help="any of Lightning's names; auto is the plain CPU here")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints and validations")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output-dir")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/lightning_gpt"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Returns the last losses, and the steps."""
    options = parse(arguments)
    L.seed_everything(0)
    module = ByteGPT(
        width=options.width, layers=options.layers, block=options.block, learning_rate=3e-3, warmup_steps=20
    )
    data = StdlibBytes(characters=options.characters, block=options.block, batch_size=options.batch)
    checkpoints = ModelCheckpoint(
        options.output_dir,
        every_n_train_steps=options.save_every,
        save_last=True,
        save_on_exception=True,
        # So that "last.ckpt" is overwritten, and no "last-v1.ckpt" is created.
        enable_version_counter=False,
    )
    trainer = L.Trainer(
        strategy=options.strategy,
        precision=options.precision,
        max_steps=options.steps,
        val_check_interval=options.save_every,
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        callbacks=[checkpoints],
        logger=False,
        log_every_n_steps=10,
    )
    trainer.fit(module, data, ckpt_path=options.output_dir / "last.ckpt" if options.resume else None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print(f"\nafter step {trainer.global_step}, in nats per byte:")
    print("\n".join(f"  {name} {value:.3f}" for name, value in metrics.items()))
    print(f"\nwhat it writes:\n{module.write(_PROMPT, options.block - len(_PROMPT))}")
    return {**metrics, "steps": trainer.global_step}


if __name__ == "__main__":
    main()
