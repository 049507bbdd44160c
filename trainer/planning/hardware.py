"""The hardware table: device classes, what they are, and what the planner may assume of them.

It is `devices.yaml`, in the keys of a person's `hardware.yaml`: a further product is a row there, a further vendor also
a row in `comm/contract/natives.py` and a probe file. A product of no row is estimated, never dropped.
`peak_tflops` is the vendor's dense bf16 figure, 0 where none is known: CPUs differ. `sustained_tflops` is what training
reached on LLaMA-8B (roofline.py makes other shapes of it): published for the classes marked so (H200 and MI325X: arXiv
2602.18007; A100 and H100: fitted to LLM Foundry's table, tests/published), otherwise the share of its peak that the
class sustains which a row is `like`, `DEFAULT_MFU` where none is; of the CPU it is a guess.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hetctl.comm.contract.cluster import SCHEMA_VERSION, read_versioned
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.natives import NATIVES
from hetctl.comm.contract.units import GiB, parse_memory, parse_rate, show_bytes

TABLE = Path(__file__).with_name("devices.yaml")
CAUTION = 0.5  # of the slowest class alike that an unknown product is taken for: most that no table has are smaller
_PCIE = 12e9  # bytes per second: what nobody said is assumed to be a PCIe 3 card behind a NIC of 100 Gb/s
_CPU = DeviceClass("cpu", "cpu", 4 * GiB, 20e9, 0.0, 0.05, 1.25e9, 4e9, 10e9, launch_s=300e-6, runtime_bytes=GiB // 4)
# after a product's name these make it another product
_OTHER = r"[A-Z0-9]| (?:TI|SUPER|D|GRE|XTX|CNX|LAPTOP|MOBILE|EMBEDDED|MAX-Q|WITH MAX-Q)(?![A-Z0-9])"


@dataclass(frozen=True)
class OwnDevice:
    """What is said of one class; what is left out is as in the table's row of that name, or of the one it is `like`."""

    like: str | None = None
    vendor: str | None = None
    tflops: float | None = None  # sustained in training LLaMA-8B
    peak: float | None = None  # of the vendor's data sheet, dense bf16 (or fp16 where it has no bf16)
    fp16: float | None = None  # peaks; of fp16 where it differs from bf16
    fp8: float | None = None
    fp32: float | None = None  # without TF32
    fp64: float | None = None
    bf16: bool | None = None  # whether it multiplies bf16 in hardware
    tf32: bool | None = None  # and fp32 values as TF32
    memory: str | int | None = None
    bandwidth: str | float | None = None  # of its memory
    nic: str | float | None = None  # beside one such GPU
    native: str | float | None = None  # to its neighbour in a host
    host: str | float | None = None  # copies to and from the host
    price: float | None = None  # per hour
    slices: int | None = None  # that MIG shares out
    chiplets: int | None = None  # that partition modes share out
    architecture: str | None = None  # sm_90, gfx942
    names: tuple[str, ...] = ()  # as drivers call it
    ids: tuple[str, ...] = ()  # PCI vendor:device, or vendor:device/vendor:device with the subsystem's
    source: str | None = None  # of these figures: a word of the file's `sources`, or a document

    def row(self, name: str, table: Hardware, where: str) -> DeviceClass:
        """The row of the hardware table that this makes. Raises ConfigError for what is missing or cannot be."""
        base = table[self.like] if self.like else table.get(name)
        if base is None:
            base = self._new(name, where)
        if self.vendor is not None and self.vendor not in NATIVES:
            raise ConfigError(f"{where}: '{self.vendor}' is no vendor hetctl knows", hint=nearest(self.vendor, NATIVES))
        for key in ("tflops", "peak", "fp16", "fp8", "fp32", "fp64", "price"):
            if (value := getattr(self, key)) is not None and not 0 < value < 1e6:
                raise ConfigError(f"{where}: {key} must be above zero, found {value:g}")
        said = {
            "vendor": self.vendor,
            "memory_bytes": None if self.memory is None else parse_memory(self.memory),
            "peak_tflops": self.peak,
            "price_per_hour": self.price,
            **{key: getattr(self, key) for key in ("bf16", "tf32", "slices", "chiplets", "architecture")},
            **{f"{key}_tflops": getattr(self, key) for key in ("fp16", "fp8", "fp32", "fp64")},
            **{f"{to}_bytes_per_s": _rate(getattr(self, key)) for key, to in _RATES.items()},
        }
        return replace(
            base,
            name=name,
            published_tflops=self.tflops or (base.published_tflops if self.peak is None else None),
            mfu=base.sustained_tflops / base.peak_tflops if base.peak_tflops else base.mfu,
            product_names=self.names or (() if self.like else base.product_names),
            ids=self.ids or (() if self.like else base.ids),
            source=self.source or ("" if self.like else base.source),
            estimate="" if self.tflops or self.peak else base.estimate,
            **{key: value for key, value in said.items() if value is not None},
        )

    def _new(self, name: str, where: str) -> DeviceClass:
        """A row for a class that the table does not have."""
        needed = {"vendor": self.vendor, "memory": self.memory, "bandwidth": self.bandwidth}
        needed |= {"tflops (sustained) or peak": self.tflops or self.peak}
        if missing := [key for key, value in needed.items() if value is None]:
            raise ConfigError(
                f"{where}: '{name}' is not in the hardware table, and nothing is said of its {', '.join(missing)}",
                hint="name those, or a class that it is like: like:a100",
            )
        return DeviceClass(name, self.vendor or "", 0, 0.0, self.peak or 0.0, None, _PCIE, _PCIE, _PCIE)


_RATES = {"bandwidth": "memory", "nic": "nic", "native": "native", "host": "host"}


@dataclass(frozen=True)
class HardwareFile:
    """hardware.yaml, and the table itself."""

    devices: Mapping[str, OwnDevice] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # documents by the words that rows have for them
    schema_version: int = SCHEMA_VERSION

    def rows(self, table: Hardware, where: str) -> Hardware:
        """The table with these rows before its own. Raises ConfigError."""
        for name, one in self.devices.items():
            known = replace(one, source=self.sources.get(one.source or "", one.source))
            table = table.with_own([known.row(name, table, f"{where}, {name}")])
        return table


class Hardware(UserDict[str, DeviceClass]):
    """Device classes by name; a part of one (`a100/3g.40gb`, `mi300x/cpx`) is found as its share of the whole."""

    def __missing__(self, name: str) -> DeviceClass:
        whole, _, mode = name.partition("/")
        row = self[whole].part(mode) if mode and whole in self else None
        if row is None:
            near = nearest(whole, self)
            own = "--device NAME=vendor:..,tflops:..,memory:..,bandwidth:.. or hardware.yaml makes another known"
            raise ConfigError(f"'{name}' is not a device class hetctl knows", hint=f"{near}; {own}" if near else own)
        return row

    def get(self, name: str, default: Any = None) -> Any:
        """The row of a whole class."""
        return self[name] if name in self else default  # noqa: SIM401 (the same, without the partitions of __getitem__)

    def with_own(self, rows: Iterable[DeviceClass]) -> Hardware:
        """This table with a person's rows before its own."""
        own = {row.name: row for row in rows}
        return Hardware({**self, **own}) if own else self

    def of_gpu(
        self, vendor: str, names: Sequence[str], pci_id: str | None = None, subsystem: str | None = None
    ) -> DeviceClass | None:
        """The row of a GPU by its PCI ids, then by any of its names, a person's rows before ours; None: it has none."""
        rows = [row for row in self.values() if row.vendor == vendor]
        for some in ([row for row in rows if CLASSES.get(row.name) is not row], rows):
            for identity in (f"{pci_id}/{subsystem}", pci_id):
                if found := [row for row in some if identity in row.ids]:
                    return _named(found, names) or min(found, key=lambda row: row.sustained_tflops)
            if named := _named(some, names):
                return named
        return None

    def estimated(
        self, name: str, vendor: str, *, memory: int | None = None, architecture: str | None = None
    ) -> DeviceClass:
        """A cautious row for a product that the table does not have, with how it was estimated.

        A share of the slowest of its architecture, else of all of its vendor that multiply what it can: CAUTION, and
        less in proportion where it has less memory (so a partition of a GPU has its part).
        """
        every = [row for row in self.values() if row.vendor != "cpu" and not row.estimate]
        every = [row for row in every if row.vendor == vendor] or every
        alike = [row for row in every if architecture and row.architecture == architecture]
        slowest = min(alike or _computing_like(every, architecture), key=lambda row: row.sustained_tflops)
        share = CAUTION * min(1.0, (memory or slowest.memory_bytes) / slowest.memory_bytes)
        row = slowest.scaled(share, share)
        told = show_bytes(memory) if memory else f"{show_bytes(row.memory_bytes)} assumed, as none is told"
        figures = f"{row.sustained_tflops:.3g} TFLOPS, {row.memory_bytes_per_s / 1e9:.0f} GB/s of memory, {told}"
        of = f"{architecture} in the hardware table" if alike else "its vendor's in the hardware table"
        return replace(
            row,
            name=name,
            vendor=vendor,
            memory_bytes=memory or row.memory_bytes,
            architecture=architecture or "",
            estimate=f"{share:.0%} of what {slowest.name} has, the slowest {of}: {figures}",
            product_names=(),
            ids=(),
            source="",
            price_per_hour=None,
            slices=0,
            chiplets=0,
        )


def _computing_like(rows: Sequence[DeviceClass], architecture: str | None) -> list[DeviceClass]:
    """Those with bf16 for an architecture that is no older than the first with it, or unknown; else those without."""
    first = min((_age(row.architecture) for row in rows if row.bf16 and row.architecture), default=0)
    bf16 = not architecture or _age(architecture) >= first
    return [row for row in rows if row.bf16 == bf16] or list(rows)


def not_in_the_table(row: DeviceClass) -> str:
    """What a person should know of a class whose figures are estimated, and what to do about it."""
    return (
        f"{row.name} is not in the hardware table and taken for {row.estimate}"
        f" (known better: --speed {row.name}=TFLOPS, hardware.yaml, or `hetctl bench ops`)"
    )


def _named(rows: Sequence[DeviceClass], names: Sequence[str]) -> DeviceClass | None:
    """The row of the first name that tells; of several products in brackets (`[MI250X/MI250]`) the slowest."""
    for name in names:
        listed = re.search(r"\[(.*/.*)\]", name[:200])
        found = [_longest(rows, one) for one in (listed[1].split("/") if listed else [name])]
        told = [row for row in found if row is not None]
        if told and len(told) == len(found):
            return min(told, key=lambda row: row.sustained_tflops)
    return None


def _longest(rows: Sequence[DeviceClass], product: str) -> DeviceClass | None:
    """The row of the longest known name in a product's as a whole word."""
    found = [
        (len(known), row)
        for row in rows
        for known in row.product_names
        if re.search(rf"(?<![A-Z0-9]){re.escape(known.upper())}(?!{_OTHER})", product.upper())
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _age(architecture: str) -> int:
    """Generations of one vendor in order: sm_86 before sm_100, gfx90a before gfx1100."""
    digits = re.sub(r"^[a-z_]*", "", architecture)
    return int(digits, 16) if re.fullmatch(r"[0-9a-f]{1,8}", digits) else 0


def _rate(said: str | float | None) -> float | None:
    return None if said is None else parse_rate(said)


class _Shipped(Hardware):
    """The table in `devices.yaml`, read when it is first asked: ranks never do, and have no YAML."""

    def __init__(self) -> None:
        """Nothing is read yet."""

    @cached_property
    def data(self) -> dict[str, DeviceClass]:  # type: ignore[override]
        known = read_versioned(TABLE, HardwareFile, what="hardware table")
        return {**known.rows(Hardware(), TABLE.name), _CPU.name: _CPU}


CLASSES: Hardware = _Shipped()
