"""A program as people have it: transformers' Trainer on a small random model. Its losses are the last line."""

import json
import os
import sys

import torch
from leaving import leave
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


def rows(count: int = 48, length: int = 16) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 96, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="steps",
        save_steps=4,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(8))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    if os.environ["RANK"] == "0":
        print(json.dumps({"backend": torch.distributed.get_backend(), "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
    leave()
