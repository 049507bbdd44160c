"""Sizes, rates, durations and lists of names, as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, isfinite

from hetctl.comm.contract.errors import ConfigError

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
_FACTORS = {"": 1, "B": 1, "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB}
_FACTORS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_RATE = re.compile(
    r"(?P<value>\d+(?:\.\d+)?(?:e\d+)?)\s*(?P<unit>(?P<factor>[kMGT]?)(?:(?P<byte>B/s)|b/s|bit/s|bps|bE))?"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str | int) -> int:
    """Bytes of `40GiB`, `512MB`, `1024`. Raises ConfigError for anything else, and for zero."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"'{text}' is not a size", hint="write for example 40GiB, 512MiB or 16GB")
    value = float(match.group(1)) * factor
    if not 1 <= value < 2**63:
        raise ConfigError(f"'{text[:40]}' is not a positive size, or not of any memory", hint="write for example 40GiB")
    return int(value)


def parse_memory(text: str | int) -> int:
    """Bytes of a device's memory, as `parse_bytes` reads them. Raises ConfigError also where a unit was forgotten."""
    value = parse_bytes(text)
    if value < MiB:
        raise ConfigError(f"'{text}' is {value} bytes of memory, which no device has", hint=f"write {text}GiB")
    return value


def parse_rate(text: str | float) -> float:
    """Bytes per second of `696GB/s`, `25GbE`, `400Gb/s`, `1.25e9`. Raises ConfigError for anything else, and for zero.

    Links are sold in bits (a small b, or GbE), memories in bytes; both decimal.
    """
    match = _RATE.fullmatch(str(text).strip())
    value = float(match["value"]) * _DECIMAL[match["factor"] or ""] * (1 if match["byte"] else 1 / 8) if match else 0.0
    if match and not match["unit"]:
        value = float(match["value"])
    if not 0 < value < inf:
        raise ConfigError(f"'{text}' is not a rate", hint="write for example 696GB/s, 400Gb/s or 25GbE")
    return value


def show_bytes(count: float | None) -> str:
    """`40.0 GiB`; unknown stays the word unknown, never zero."""
    if count is None:
        return "unknown"
    for factor, unit in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def show_rate(bytes_per_s: float | None) -> str:
    """`12.5 GB/s` from bytes per second (decimal units, as links are sold)."""
    if bytes_per_s is None:
        return "unknown"
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.1f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def show_seconds(seconds: float) -> str:
    """`1h02m`, `3m05s`, `12.3s`, `4.1ms`: one readable duration."""
    if not isfinite(seconds):
        return "unknown"
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    if seconds >= 1:
        return f"{seconds:.1f}s"
    return f"{seconds * 1e3:.1f}ms"


def count_of(number: int, noun: str, plural: str = "") -> str:
    """`1 host`, `2 hosts`; `2 losses` by a plural of its own."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def span_of(first: int, last: int) -> str:
    """`3-5`, and `3` alone."""
    return str(first) if first == last else f"{first}-{last}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """`a, b, c and 4 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
