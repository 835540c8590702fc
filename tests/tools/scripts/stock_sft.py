"""Supervised fine-tuning with TRL, as its quickstart does, on a model and texts that are made here."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = ["the", "a", "cat", "dog", "sees", "hears", "likes", "red", "blue", "small", "big", "runs", "sits"]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

dataset = Dataset.from_list([{"text": " ".join(words[n % 7 : n % 7 + 4 + n % 3])} for n in range(64)])
config = GPT2Config(vocab_size=len(vocabulary), n_layer=1, n_head=2, n_embd=16, n_positions=32)
trainer = SFTTrainer(
    model=GPT2LMHeadModel(config),
    args=SFTConfig(output_dir="sft", per_device_train_batch_size=4, max_length=16, logging_steps=2),
    train_dataset=dataset,
    processing_class=tokenizer,
)
trainer.train()
