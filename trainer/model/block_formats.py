"""How many bytes values take that are kept in fewer bits: blocks of codes, each with its factor. No torch."""

from __future__ import annotations

from typing import Literal

Quantised = Literal["int8", "nf4"]
BLOCK = 64  # values along a row that share a factor: QLoRA's (arXiv 2305.14314)
FACTOR_BYTES = 4  # a block's largest magnitude, fp32
MOMENT_BLOCK = 256  # values of an 8-bit moment of the optimiser that share a factor
MOMENT_BYTES = 1 + FACTOR_BYTES / MOMENT_BLOCK  # of such a value
CODE_BITS: dict[Quantised, int] = {"int8": 8, "nf4": 4}


def code_bytes(kind: Quantised) -> int:
    """Of one block, without its factor."""
    return BLOCK * CODE_BITS[kind] // 8


def row_bytes(kind: Quantised, values: int) -> int:
    """Of a row of so many values: whole blocks, the last one filled up."""
    return -(-values // BLOCK) * (code_bytes(kind) + FACTOR_BYTES)
