"""What a person says of device classes: `hardware.yaml`, and `--device NAME=tflops:..,memory:..,bandwidth:..`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetctl.comm.contract.cluster import SCHEMA_VERSION, Cluster, read_versioned
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.natives import NATIVES
from hetctl.comm.contract.units import parse_bytes, parse_rate
from hetctl.comm.contract.values import decode
from hetctl.trainer.planning.hardware import CLASSES, Hardware

HERE = Path("hardware.yaml")
_PCIE = 12e9  # bytes per second: what nobody said is assumed to be a PCIe 3 card behind a NIC of 100 Gb/s


@dataclass(frozen=True)
class OwnDevice:
    """What is said of one class; what is left out is as in the table's row of that name, or of the one it is `like`."""

    like: str | None = None
    vendor: str | None = None
    tflops: float | None = None  # sustained in training LLaMA-8B
    peak: float | None = None  # of the vendor's data sheet, dense bf16 (or fp16 where it has no bf16)
    fp32: float | None = None  # peaks, without TF32
    fp64: float | None = None
    bf16: bool | None = None  # whether it multiplies bf16 in hardware
    tf32: bool | None = None  # and fp32 values as TF32
    memory: str | int | None = None
    bandwidth: str | float | None = None  # of its memory
    nic: str | float | None = None  # beside one such GPU
    native: str | float | None = None  # to its neighbour in a host
    host: str | float | None = None  # copies to and from the host
    price: float | None = None  # per hour
    names: tuple[str, ...] = ()  # as drivers call it

    def row(self, name: str, table: Hardware, where: str) -> DeviceClass:
        """The row of the hardware table that this makes. Raises ConfigError for what is missing or cannot be."""
        base = table[self.like] if self.like else table.get(name)
        if base is None:
            base = self._new(name, where)
        if self.vendor is not None and self.vendor not in NATIVES:
            raise ConfigError(f"{where}: '{self.vendor}' is no vendor hetctl knows", hint=nearest(self.vendor, NATIVES))
        for key in ("tflops", "peak", "fp32", "fp64", "price"):
            if (value := getattr(self, key)) is not None and not 0 < value < 1e6:
                raise ConfigError(f"{where}: {key} must be above zero, found {value:g}")
        return replace(
            base,
            name=name,
            vendor=self.vendor or base.vendor,
            memory_bytes=base.memory_bytes if self.memory is None else parse_bytes(self.memory),
            memory_bytes_per_s=_rate(self.bandwidth, base.memory_bytes_per_s),
            nic_bytes_per_s=_rate(self.nic, base.nic_bytes_per_s),
            native_bytes_per_s=_rate(self.native, base.native_bytes_per_s),
            host_bytes_per_s=_rate(self.host, base.host_bytes_per_s),
            peak_tflops=base.peak_tflops if self.peak is None else self.peak,
            published_tflops=self.tflops or (base.published_tflops if self.peak is None else None),
            fp32_tflops=base.fp32_tflops if self.fp32 is None else self.fp32,
            fp64_tflops=base.fp64_tflops if self.fp64 is None else self.fp64,
            bf16=base.bf16 if self.bf16 is None else self.bf16,
            tf32=base.tf32 if self.tf32 is None else self.tf32,
            price_per_hour=base.price_per_hour if self.price is None else self.price,
            product_names=self.names or (() if self.like else base.product_names),
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


@dataclass(frozen=True)
class HardwareFile:
    """hardware.yaml."""

    devices: Mapping[str, OwnDevice] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def own_classes(file: Path | None, devices: Sequence[str] = ()) -> tuple[DeviceClass, ...]:
    """The rows that a file (./hardware.yaml where none is named and there is one) and options describe, these last."""
    path = file or (HERE if HERE.is_file() else None)
    said = [*read_versioned(path, HardwareFile, what="hardware file").devices.items()] if path else []
    places = [f"{path}, {name}" for name, _ in said]
    said += [_parsed(text) for text in devices]
    table = CLASSES
    for (name, one), where in zip(said, [*places, *(f"--device {d}" for d in devices)], strict=True):
        table = table.with_own([one.row(name, table, where)])
    return tuple(table[name] for name in dict.fromkeys(name for name, _ in said))


def with_own(cluster: Cluster, rows: Sequence[DeviceClass]) -> Cluster:
    """The cluster with what is said of classes that it has, in place of what its file says of them."""
    present = {d.device_class.partition("/")[0] for h in cluster.hosts for d in h.devices}
    known = {row.name: row for row in (*cluster.classes, *rows) if row.name in present}
    return replace(cluster, classes=tuple(known.values()))


def _parsed(text: str) -> tuple[str, OwnDevice]:
    """`NAME=key:value,..`."""
    name, equals, rest = text.partition("=")
    pairs = [part.partition(":") for part in rest.split(",")]
    if not equals or not name.strip() or not all(colon and value.strip() for _, colon, value in pairs):
        raise ConfigError(
            f"--device {text} is not NAME=key:value,..",
            hint="for example a40=tflops:70,memory:48GiB,bandwidth:696GB/s",
        )
    data = {key.strip(): _value(value.strip()) for key, _, value in pairs}
    return name.strip().lower(), decode(OwnDevice, data, where=f"--device {name}")


def _rate(said: str | float | None, otherwise: float) -> float:
    return otherwise if said is None else parse_rate(said)


def _value(text: str) -> str | float | bool:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text
