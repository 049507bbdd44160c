"""Random words of a count and a key alone, the same on every device: splitmix64 in whole numbers that wrap."""

from __future__ import annotations

from torch import Tensor


def mixed(counter: Tensor, key: int | Tensor) -> Tensor:
    """splitmix64 of each count, in its place; multiplication wraps, and shifts are made logical by masking."""
    words = counter.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    words = _xor_shifted(words, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    words = _xor_shifted(words, 27).mul_(_signed(0x94D049BB133111EB))
    return _xor_shifted(words, 31)


def _xor_shifted(words: Tensor, shift: int) -> Tensor:
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
