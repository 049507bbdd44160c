"""A program as people have it: trl's SFTTrainer with adapters of peft. Its losses are the last line."""

import json
import os
import sys

import torch
from datasets import Dataset
from leaving import leave
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", *(f"w{n}" for n in range(62))]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    texts = [" ".join(f"w{int(n)}" for n in torch.randint(0, 62, (12,), generator=random)) for _ in range(48)]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    arguments = SFTConfig(
        output_dir=sys.argv[1],
        max_steps=5,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(WORDS))),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if os.environ["RANK"] == "0":
        print(json.dumps({"backend": torch.distributed.get_backend(), "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
    leave()
