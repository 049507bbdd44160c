"""Chat templates in the styles of public models, written for these tests, and a tokenizer that has their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetctl.trainer.recipe import DataSection

WORDS = "Answer in one word, please: is the sky blue? Yes. You are a helpful assistant, and it is a nice day today."
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|head|>", "<|tail|>", "<turn>", "<end_turn>")

# `bos_token`, `eos_token` as the tokenizer has them; each marks nothing, so what the assistant says is found by prefix
BY_PREFIX = {
    "chatml": """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "chatml with a system of its own": """{% if messages[0].role != 'system' %}
{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
{% for m in messages %}{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>' ~ '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "headers": """{{ bos_token }}{% for m in messages %}
    {{- '<|head|>' + m.role + '<|tail|>\n\n' + m.content | trim + '<|eot|>' -}}
{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\n\n' }}{% endif %}""",
    "headers, tools and the day": """{{- bos_token }}{{ '<|head|>system<|tail|>\n\n' }}
{{- 'Today: ' + strftime_now('%Y') + '\n' }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=2) + '\n' }}{% endfor %}{% endif %}{{ '<|eot|>' }}
{%- for m in messages %}{{- '<|head|>' + m['role'] + '<|tail|>\n\n' }}
{%- if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}
{%- else %}{{ m['content'] | trim }}{% endif %}{{ '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|tail|>\n\n' }}{% endif %}""",
    "instructions": """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{{- '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- else %}{{ '[SYS]' + m.content + '[/SYS]' }}{% endif %}{% endfor %}""",
    "instructions that alternate": """{% if messages[0].role == 'system' %}{% set told = messages[0].content + '\n\n' %}
{% set loop_messages = messages[1:] %}{% else %}{% set told = '' %}{% set loop_messages = messages %}{% endif %}
{{ bos_token }}{% for m in loop_messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if m.role == 'user' %}{{ '[INST] ' + (told if loop.first else '') + m.content.strip() + ' [/INST]' }}
{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "turns of a model": """{{ bos_token }}{% for m in messages %}
{% set role = 'model' if m.role == 'assistant' else 'user' %}
{{ '<turn>' + role + '\n' + m.content | trim + '<end_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}""",
    "words and an end": """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "plain words": """{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}
{%- elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}
{%- else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}""",
    "a macro and a namespace": """{% macro turn(who, what) %}
{{- '<|' ~ who ~ '|>' ~ what ~ eos_token ~ '\n' }}{% endmacro %}
{%- set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}
{{- turn(m.role ~ ns.count, m.content) }}{% if ns.count > 50 %}{% break %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant' ~ (ns.count + 1) ~ '|>' }}{% endif %}""",
    "thoughts of the last turn": """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
}
# the same styles, marked as they are for training
MARKED = {
    "marked chatml": """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}
{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}
{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "marked thoughts, the last alone": """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{%- generation %}{% if loop.last %}
{{- '<think>' + (m.reasoning_content or '') + '</think>' }}
{%- endif %}{{ m.content + '<|im_end|>' }}{%- endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}
{{- '\n' }}{% endfor %}""",
}
UNSTABLE = (
    MARKED["marked thoughts, the last alone"].replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
)
TALKS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Is the sky blue?"}, {"role": "assistant", "content": "Yes."}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Ist 日 the sun? é"},
        {"role": "assistant", "content": " Yes \n"},
        {"role": "user", "content": "And <|im_end|> today?"},
        {"role": "assistant", "content": "日, it is", "thinking": "a nice day"},
    ],
)


def tokenizer_folder(folder: Path, template: str | Mapping[str, str] | None, *, in_config: bool = False) -> Path:
    """A byte-level BPE tokenizer as transformers saves it, with its chat template (or several by name)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    made.train_from_iterator([WORDS], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    if not in_config:
        whole.chat_template = template if template is None or isinstance(template, str) else dict(template)
    whole.save_pretrained(folder)
    if in_config and isinstance(template, Mapping):  # as transformers wrote them once
        file = folder / "tokenizer_config.json"
        listed = [{"name": name, "template": text} for name, text in template.items()]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": listed}))
    return folder


def chat_file(path: Path, rows: Sequence[Any]) -> Path:
    """A .jsonl of these rows, a text as it stands."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def section_of(source: Path, tokenizer: Path | None = None, **more: Any) -> DataSection:
    """The data of a recipe: these rows by the tokenizer of this folder, or by bytes."""
    named = "bytes" if tokenizer is None else str(tokenizer / "tokenizer.json")
    return DataSection(source=str(source), tokenizer=named, **more)
