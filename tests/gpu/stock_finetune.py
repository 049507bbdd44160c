"""TRL's SFTTrainer with PEFT's adapters on one device, for `finetune_check.py` to be held against: prints one line.

python3 tests/gpu/stock_finetune.py CONFIG.json --quantize nf4 --seq-len 2048 --batch 16 --micro 1 [--recompute]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer


def quantised(model: Any) -> Any:
    """Its blocks' projections by bitsandbytes, as `load_in_4bit` leaves them."""
    import bitsandbytes as bnb

    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, old in list(part.named_children()):
                if isinstance(old, torch.nn.Linear):
                    new = bnb.nn.Linear4bit(
                        old.in_features, old.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                    )
                    new.weight = bnb.nn.Params4bit(old.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                    setattr(part, name, new.to(old.weight.device))
    model.is_loaded_in_4bit = True
    return model


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--quantize", choices=["none", "nf4"], default="none")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--recompute", action="store_true")
    asked = parser.parse_args()
    config = AutoConfig.for_model(**json.loads(asked.config.read_text()))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if asked.quantize == "nf4":
        model = quantised(model)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    count = asked.batch * asked.steps
    rows = torch.randint(0, config.vocab_size, (count, asked.seq_len)).tolist()
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")), eos_token="b", pad_token="a"
    )
    clock = Clock()
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="build/trl",
            max_length=asked.seq_len,
            per_device_train_batch_size=asked.micro,
            gradient_accumulation_steps=asked.batch // asked.micro,
            max_steps=asked.steps,
            bf16=True,
            gradient_checkpointing=asked.recompute,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            optim="adamw_torch_fused",
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset(InMemoryTable.from_pydict({"input_ids": rows}), fingerprint="random"),
        processing_class=words,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[clock],
    )
    trainer.train()
    seconds = median(b - a for a, b in zip(clock.ends[1:-1], clock.ends[2:], strict=True))
    rate, peak = asked.batch * asked.seq_len / seconds, torch.cuda.max_memory_allocated()
    print(json.dumps({"tokens_per_s": rate, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
