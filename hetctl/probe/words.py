"""The words in which kernels and tools write numbers, sizes, absence and addresses; None wherever one is not told."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from hetctl.comm.contract.units import GiB, KiB, MiB, TiB

ABSENT = frozenset(
    (
        *("", "n/a", "na", "none", "null", "not supported", "insufficient permissions", "unknown error", "unknown"),
        *("not available", "not found", "error", "not active in guest"),
        *("gpu is lost", "gpu requires reset", "err!"),
        "gpu access blocked by the operating system",
    )
)
_DEPRECATED = "deprecated"
_NUMBER = re.compile(r"\s*([-+]?\d{1,24}(?:\.\d{1,12})?)\s*([A-Za-z/%]*)")
# Tools of both vendors write MB and mean 2**20; the kernel writes kB and means 2**10.
_SIZES = {"B": 1, "KB": KiB, "KIB": KiB, "MB": MiB, "MIB": MiB, "GB": GiB, "GIB": GiB, "TB": TiB, "TIB": TiB}
NO_NODE = (-1, 4294967295, 65535)
LARGEST = 2**64


def told(text: object) -> str | None:
    """`text` unless it is one of the many ways of saying that nothing is known: N/A, [Not Supported], deprecated ..."""
    if not isinstance(text, str):
        return None
    clean = text.strip()
    bare = clean.strip("[]<>").strip()
    if bare.lower() in ABSENT or _DEPRECATED in bare.lower():
        return None
    return bare if clean[:1] + clean[-1:] in ("[]", "<>") else clean  # a name may end in a bracket: "... [AMD/ATI]"


def serial(text: object) -> str | None:
    """A serial number; 0 and the like stand for none."""
    clean = told(text)
    return clean if clean and clean.strip("0") else None


def number(value: object) -> float | None:
    """The number in 41, "41", "41 C", "16x" or {"value": 41, "unit": "C"}."""
    return _quantity(value)[0]


def integer(value: object) -> int | None:
    """A whole number of the same shapes, also "0x12"; None for fractions and for what no counter can hold."""
    if isinstance(value, str) and re.fullmatch(r"\s*0[xX][0-9a-fA-F]{1,16}\s*", value):
        return int(value, 16)
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[0-9]{1,20}\s*", value):
        value = int(value)  # a float has no room for 64 bits
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < LARGEST else None
    found, _ = _quantity(value)
    return int(found) if found is not None and found == int(found) and abs(found) < LARGEST else None


def count(value: object) -> int | None:
    """A whole number that is not negative."""
    found = integer(value)
    return found if found is not None and found >= 0 else None


def size(value: object, *, unit: str = "") -> int | None:
    """Bytes of "143771 MiB", {"value": 192, "unit": "GB"}, 4096; `unit` where the text has none (and B otherwise)."""
    found, named = _quantity(value)
    factor = _SIZES.get((named or unit or "B").upper())
    if found is None or factor is None or not 0 <= found * factor < LARGEST:
        return None
    if isinstance(value, int) and factor == 1:
        return value  # a float has no room for the last digits
    exact = re.fullmatch(r"(\d+)\s*[A-Za-z]*", value.strip()) if isinstance(value, str) else None
    return int(exact.group(1)) * factor if exact else int(found * factor)


def flag(value: object) -> bool | None:
    """True of yes, enabled, active; False of their opposites; None of anything else."""
    word = value.strip().strip("[]").lower() if isinstance(value, str) else value
    if word in (True, "yes", "enabled", "enable", "active", "true", "on", "y", "1"):
        return True
    if word in (False, "no", "disabled", "disable", "not active", "inactive", "false", "off", "n", "0"):
        return False
    return None


def node(value: object) -> int | None:
    """A NUMA node; the ways to say none (-1, 4294967295) are None."""
    found = integer(value)
    return None if found is None or found in NO_NODE or not 0 <= found < 65536 else found


_PCI = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


def pci_address(text: object) -> str | None:
    """`0000:18:00.0` of 00000000:18:00.0, 18:00.0 or 0000:18:00.0 in any case."""
    match = _PCI.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        return None
    domain = int(match.group(1) or "0", 16)
    return f"{domain:04x}:{match.group(2)}:{match.group(3)}.{match.group(4)}".lower()


def pci_id(vendor: object, device: object) -> str | None:
    """`1002:74a1` of 0x1002 and 0x74a1."""
    found = [re.fullmatch(r"0x([0-9a-f]{4})", str(word).strip().lower()) for word in (vendor, device)]
    return ":".join(match[1] for match in found if match) if all(found) else None


def gt_per_s(text: object) -> float | None:
    """GT/s of "32.0 GT/s PCIe" or {"value": 32, "unit": "GT/s"}; None of "Unknown"."""
    found, unit = _quantity(text)
    return found if found and (not unit or unit.upper().startswith("GT")) else None


PCIE_GENERATIONS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0, 7: 128.0}


def key_values(text: str, separator: str = ":") -> dict[str, str]:
    """`key: value` lines as a mapping; the first of equal keys holds."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, there, value = line.partition(separator)
        if there:
            found.setdefault(key.strip(), value.strip())
    return found


def whole_lines(text: str) -> list[str]:
    """The lines that have an end: half a line of an output that was cut off tells a wrong figure."""
    return text[: text.rfind("\n") + 1].splitlines()


def json_documents(text: str) -> list[Any]:
    """Every JSON object or array in a tool's output, whatever warnings and legends stand around them."""
    decoder, at, failures = json.JSONDecoder(), 0, 0
    found: list[Any] = []
    while failures < 64:
        match = _OPENING.search(text, at)
        if match is None:
            return found
        try:
            document, at = decoder.raw_decode(text, match.start())
            found.append(document)
        except (ValueError, RecursionError):
            at, failures = match.start() + 1, failures + 1
    return found


_OPENING = re.compile(r"[\[{]")


def mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is an object with text keys, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _quantity(value: object) -> tuple[float | None, str]:
    if isinstance(value, Mapping):
        inner, named = value.get("value"), value.get("unit")
        found, unit = (None, "") if isinstance(inner, Mapping) else _quantity(inner)
        return found, named if isinstance(named, str) else unit
    if isinstance(value, bool):
        return None, ""
    if isinstance(value, (int, float)):
        finite = math.isfinite(value) if isinstance(value, float) else abs(value) < LARGEST
        return (float(value), "") if finite else (None, "")
    match = _NUMBER.match(value) if isinstance(value, str) else None
    return (float(match.group(1)), match.group(2)) if match else (None, "")
