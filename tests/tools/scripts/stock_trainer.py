"""Fine-tunes a small classifier of texts, as the examples of transformers do."""

import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
import torch
from neighbour import accuracy
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    hidden_size: int = field(default=16, metadata={"help": "Width of the model."})


@dataclass
class DataArguments:
    max_seq_length: int = field(default=12)
    train_samples: int = field(default=60)


class Sentences(Dataset):
    def __init__(self, samples, length):
        generator = np.random.default_rng(0)
        self.rows = generator.integers(1, 50, (samples, length))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = torch.tensor(self.rows[index])
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row.sum()) % 3}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(format="%(asctime)s %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    set_seed(training_args.seed)
    config = BertConfig(
        vocab_size=50,
        hidden_size=model_args.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        train_dataset=Sentences(data_args.train_samples, data_args.max_seq_length),
        eval_dataset=Sentences(10, data_args.max_seq_length),
        compute_metrics=accuracy,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
