"""Programs of the HF Trainer with user code in the step, as in forums and guides."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import TrainerCallback

from hf_trainer import Trainer
from tests.programs import data
from tests.programs.hf_models import arguments, pixels_of

_LABELS = 5


def _bert(layers: int = 1) -> transformers.BertForSequenceClassification:
    config = transformers.BertConfig(
        vocab_size=data.VOCABULARY,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=_LABELS,
    )
    return transformers.BertForSequenceClassification(config)


# ---- losses ------------------------------------------------------------------------------------------


class WeightedLossTrainer(Trainer):
    """Rare classes weigh more."""

    def __init__(self, *args: Any, class_weights: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights.to(self.args.device)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels, weight=self.class_weights)
        return (loss, outputs) if return_outputs else loss


def weighted_loss(folder: str, **xla: Any) -> Trainer:
    train_set = data.classified(64)
    counts = torch.bincount(torch.tensor(train_set["label"]), minlength=_LABELS)
    return WeightedLossTrainer(
        model=_bert(),
        args=arguments(folder, eval_strategy="epoch"),
        train_dataset=train_set,
        eval_dataset=data.classified(16, skip=64),
        class_weights=len(train_set) / (_LABELS * counts.clamp(min=1)).float(),
        **xla,
    )


def weighted_loss_function(folder: str, **xla: Any) -> Trainer:
    weights = torch.tensor([1.0, 2.0, 1.5, 4.0, 0.25])

    def compute_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs.logits
        loss = F.cross_entropy(logits, labels, weight=weights.to(logits.device), reduction="sum")
        return loss / num_items_in_batch

    return Trainer(
        model=_bert(),
        args=arguments(folder),
        train_dataset=data.classified(64),
        compute_loss_func=compute_loss,
        **xla,
    )


class FocalLoss(nn.Module):
    """Counts what is classified well already for less; `alpha` weighs the classes."""

    alpha: torch.Tensor

    def __init__(self, alpha: list[float], gamma: float = 2.0) -> None:
        super().__init__()
        self.gamma = gamma
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_probabilities = F.log_softmax(logits, dim=-1).gather(1, labels.unsqueeze(1)).squeeze(1)
        factors = (1 - log_probabilities.exp()) ** self.gamma
        return (-self.alpha[labels] * factors * log_probabilities).mean()


class FocalTrainer(Trainer):
    """Trains with the focal loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.criterion = FocalLoss([0.5, 1.0, 1.0, 2.0, 0.25]).to(self.args.device)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.get("labels")
        outputs = model(**inputs)
        loss = self.criterion(outputs["logits"].view(-1, _LABELS), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


def focal_loss(folder: str, **xla: Any) -> Trainer:
    return FocalTrainer(model=_bert(), args=arguments(folder, warmup_steps=3), train_dataset=data.classified(64), **xla)


class DistillationTrainer(Trainer):
    """The student learns the teacher's distribution beside the labels."""

    def __init__(
        self, *args: Any, teacher: nn.Module, temperature: float = 2.0, alpha: float = 0.5, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device)
        self.teacher.eval()
        self.temperature = temperature
        self.alpha = alpha

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            teacher_logits = self.teacher(**inputs).logits
        soft = F.kl_div(
            F.log_softmax(outputs.logits / self.temperature, dim=-1),
            F.softmax(teacher_logits / self.temperature, dim=-1),
            reduction="batchmean",
        )
        loss = self.alpha * outputs.loss + (1 - self.alpha) * soft * self.temperature**2
        return (loss, outputs) if return_outputs else loss


def distillation(folder: str, **xla: Any) -> Trainer:
    return DistillationTrainer(
        model=_bert(),
        teacher=_bert(layers=2),
        args=arguments(folder, max_steps=16),
        train_dataset=data.classified(64),
        **xla,
    )


# ---- models ------------------------------------------------------------------------------------------


class MultiTask(nn.Module):
    """One trunk with several heads, whose losses are weighted by a config."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        # Not `config`: the Trainer takes that for one of transformers.
        self.settings = config
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, config["hidden"]), nn.GELU(), nn.Dropout(0.1))
        self.heads = nn.ModuleDict({name: nn.Linear(config["hidden"], size) for name, size in config["heads"].items()})

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        features = self.trunk(pixel_values)
        logits = {name: head(features) for name, head in self.heads.items()}
        if labels is None:
            return {"logits": logits["digit"]}
        targets = {"digit": labels, "parity": labels % 2, "size": (labels > 4).long()}
        loss = torch.zeros((), device=features.device)
        for name, weight in self.settings["loss_weights"].items():
            loss = loss + weight * F.cross_entropy(logits[name], targets[name])
        return {"loss": loss, "logits": logits["digit"]}


def several_heads(folder: str, **xla: Any) -> Trainer:
    config = {
        "hidden": 32,
        "heads": {"digit": 10, "parity": 2, "size": 2},
        "loss_weights": {"digit": 1.0, "parity": 0.5, "size": 0.25},
    }
    return Trainer(
        model=MultiTask(config),
        args=arguments(folder, remove_unused_columns=False, lr_scheduler_type="cosine"),
        data_collator=pixels_of,
        train_dataset=data.images(64),
        **xla,
    )


def lora(folder: str, **xla: Any) -> Trainer:
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["query", "value"]
    )
    return Trainer(
        model=get_peft_model(_bert(layers=2), config),
        args=arguments(folder, learning_rate=1e-2, label_names=["labels"]),
        train_dataset=data.classified(64),
        **xla,
    )


# ---- optimizers and schedules ------------------------------------------------------------------------


def sgd(folder: str, **xla: Any) -> Trainer:
    args = arguments(folder)
    # The Trainer asks for that on XLA, before there is an optimizer.
    model = _bert().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    return Trainer(
        model=model,
        args=args,
        train_dataset=data.classified(64),
        optimizers=(optimizer, scheduler),
        **xla,
    )


def layerwise_rates(folder: str, **xla: Any) -> Trainer:
    args = arguments(folder)
    model = _bert(layers=2).to(args.device)
    rate, decay = 2e-3, 0.8
    groups = [{"params": list(model.classifier.parameters()), "lr": rate}]
    assert model.bert.pooler is not None
    layers = [model.bert.embeddings, *model.bert.encoder.layer, model.bert.pooler]
    for depth, layer in enumerate(reversed(layers)):
        plain = [p for name, p in layer.named_parameters() if "LayerNorm" not in name and "bias" not in name]
        others = [p for name, p in layer.named_parameters() if "LayerNorm" in name or "bias" in name]
        groups.append({"params": plain, "lr": rate * decay**depth, "weight_decay": 0.01})
        if others:
            groups.append({"params": others, "lr": rate * decay**depth, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 3, 16)
    return Trainer(
        model=model,
        args=args,
        train_dataset=data.classified(64),
        optimizers=(optimizer, scheduler),
        **xla,
    )


class AuxiliaryTrainer(Trainer):
    """Adds the norm of the logits with a weight that a callback lowers."""

    auxiliary_weight = 0.1

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + self.auxiliary_weight * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class Anneal(TrainerCallback):
    """Lowers the weight of the auxiliary loss at each step."""

    def __init__(self, trainer: AuxiliaryTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.auxiliary_weight = 0.1 * (1 - state.global_step / state.max_steps)


def annealed_loss(folder: str, **xla: Any) -> Trainer:
    trainer = AuxiliaryTrainer(model=_bert(), args=arguments(folder), train_dataset=data.classified(64), **xla)
    trainer.add_callback(Anneal(trainer))
    return trainer
