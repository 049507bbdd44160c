"""What a person says of device classes: `hardware.yaml`, and `--device NAME=tflops:..,memory:..,bandwidth:..`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.comm.contract.cluster import Cluster, read_versioned
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.values import decode
from hetctl.trainer.planning.hardware import CLASSES, HardwareFile, OwnDevice

HERE = Path("hardware.yaml")


def own_classes(
    file: Path | None, devices: Sequence[str] = (), *, known: Iterable[DeviceClass] = ()
) -> tuple[DeviceClass, ...]:
    """The rows that a file (./hardware.yaml where none is named and there is one) and options describe, these last.

    What they leave out is as in the hardware table, or as in the rows of a cluster (`known`).
    """
    path = file or (HERE if HERE.is_file() else None)
    said = read_versioned(path, HardwareFile, what="hardware file") if path else HardwareFile()
    table, names = said.rows(CLASSES.with_own(known), str(path)), dict.fromkeys(said.devices)
    for text in devices:
        name, one = _parsed(text)
        table = table.with_own([one.row(name, table, f"--device {text}")])
        names[name] = None
    return tuple(table[name] for name in names)


def with_own(cluster: Cluster, rows: Sequence[DeviceClass]) -> Cluster:
    """The cluster with what is said of classes that it has, in place of what its file says of them."""
    present = {d.device_class.partition("/")[0] for h in cluster.hosts for d in h.devices} | {cluster.runs_class}
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


def _value(text: str) -> str | float | bool:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text
