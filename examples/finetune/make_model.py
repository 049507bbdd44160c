"""A small model of random weights in the shape of Qwen 3, as a Hugging Face folder: what a downloaded one looks like.

    python make_model.py FOLDER CHATS.jsonl

Its tokenizer is made of the conversations themselves, and closes turns as Qwen does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(chats: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE, learnt from what is said in the conversations."""
    said = [m["content"] for line in chats.read_text().splitlines() for m in json.loads(line)["messages"]]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [END_OF_TEXT, TURN, END_OF_TURN]
    made.train_from_iterator(
        said,
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END_OF_TEXT, chat_template=TEMPLATE)


def make_model(tokens: int) -> Qwen3ForCausalLM:
    """Weights as large as trained ones: adapters leave the head alone, which from small weights is sure of nothing."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokens,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    logging.disable_progress_bar()
    folder, chats = map(Path, sys.argv[1:])
    tokenizer = make_tokenizer(chats)
    tokenizer.save_pretrained(folder)
    make_model(len(tokenizer)).save_pretrained(folder)
