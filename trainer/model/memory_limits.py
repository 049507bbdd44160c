"""Limits that training keeps to and planning counts with. No torch."""

from __future__ import annotations

CHUNK_BYTES = 2 << 30  # of fp32 logits that a loss has at a time
NARROW = 128  # values along a row: products with so few cost what they write, and are not kept
