"""Trains a vision transformer on scikit-learn's handwritten digits to over 95% accuracy.

python -m examples.digits_vit
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
from datasets import Dataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import EvalPrediction, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from hf_trainer import Trainer, XLAStatsCallback


def digits() -> tuple[Dataset, Dataset]:
    """1,797 images of 8 x 8 pixels, a fifth of them held out; pixels from -1 to 1."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 1, 8, 8) / 8.0 - 1.0).astype(np.float32)
    parts = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    train_pixels, test_pixels, train_labels, test_labels = parts
    train = Dataset.from_dict({"pixel_values": train_pixels, "labels": train_labels}).with_format("torch")
    test = Dataset.from_dict({"pixel_values": test_pixels, "labels": test_labels}).with_format("torch")
    return train, test


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Returns the final evaluation's metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25)
    options = parser.parse_args(arguments)

    train, test = digits()
    set_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            hidden_dropout_prob=0.1,
            num_labels=10,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                num_train_epochs=options.epochs,
                per_device_train_batch_size=64,
                per_device_eval_batch_size=90,
                learning_rate=2e-3,
                warmup_steps=25,
                lr_scheduler_type="cosine",
                dataloader_drop_last=False,
                eval_strategy="epoch",
                save_strategy="epoch",
                save_total_limit=1,
                load_best_model_at_end=True,
                metric_for_best_model="accuracy",
                logging_strategy="epoch",
                report_to=[],
            ),
            train_dataset=train,
            eval_dataset=test,
            compute_metrics=accuracy,
            # On the device, so that class numbers come to the host and not logits.
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            callbacks=[XLAStatsCallback()],
        )
        trainer.train()
        metrics = trainer.evaluate()
    print(f"\naccuracy on held-out digits: {metrics['eval_accuracy']:.1%}")
    return metrics


if __name__ == "__main__":
    main()
