"""Recordings as data: every folder `tests/facts/<tool>/<case>/`; the README there says what stands in one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from hetctl.comm.contract.values import decode
from hetctl.probe.capture import read_capture
from hetctl.probe.raw import Raw, ToolOutput, load
from hetctl.probe.topology import PCI
from hetctl.probe.vendors import amd, intel, nvidia
from hetctl.probe.words import size

FACTS = Path(__file__).resolve().parents[2] / "facts"
# Folder or file name -> what the probe calls the tool
TOOLS = {
    "nvidia-smi": nvidia.XML,
    "nvidia-smi-query": nvidia.OPINION,
    "nvidia-smi-capability": nvidia.QUERY,
    "nvidia-smi-topo": nvidia.TOPO,
    "nvidia-smi-nvlink": nvidia.NVLINK,
    "nvidia-smi-list": nvidia.LIST,
    "amd-smi-static": amd.STATIC,
    "amd-smi-metric": amd.METRIC,
    "amd-smi-process": amd.PROCESS,
    "amd-smi-topology": amd.TOPO,
    "rocm-smi": amd.ROCM,
    "xpu-smi": intel.DUMP,
    "ibv_devinfo": "ibv_devinfo",
    "fi_info": "fi_info",
    "hy-smi": "hy-smi",
}
DOCUMENTS = ("raw", "capture")


@dataclass(frozen=True)
class NotYet:
    """What a recording says and hetctl does not read yet: an expectation that must fail until it is mended."""

    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    says: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """One `expected.yaml`."""

    version: str  # of the tool or driver, as it says it
    products: tuple[str, ...]
    source: str  # repository and path, or issue; 'documentation' pages by their address
    licence: str  # of that source; 'facts' for values out of issue threads
    seen: Literal["recorded elsewhere", "documentation", "real hardware"]
    kept: str  # 'whole', or what was left out
    condition: str = "healthy"
    exit_code: int = 0
    stderr: str = ""
    pci: Mapping[str, str] = field(default_factory=dict)  # address -> `10de:2335 nvidia`: id and driver, beside a tool
    parsed: Any = None  # everything that the tool's own parser makes of it
    facts: Mapping[str, Any] = field(default_factory=dict)  # what must stand in the facts of a host that says only this
    says: tuple[str, ...] = ()  # patterns, each found in a warning, a vendor's state or a reason of the facts
    not_yet: tuple[NotYet, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """One case: its folder, what was written down, and what is expected."""

    folder: Path
    expected: Expected

    @property
    def tool(self) -> str:
        return self.folder.parent.name

    @property
    def name(self) -> str:
        return f"{self.tool}/{self.folder.name}"

    @property
    def outputs(self) -> dict[str, str]:
        """What each tool printed, by the name of its file; `output` is the folder's own tool."""
        files = (p for p in self.folder.iterdir() if p.stem not in (*DOCUMENTS, "expected"))
        return {self.tool if p.stem == "output" else p.stem: p.read_bytes().decode() for p in files}

    def text(self) -> str:
        """The one file that the tool's own parser reads."""
        return next(p for p in self.folder.iterdir() if p.stem in ("output", "raw")).read_bytes().decode()

    def raw(self) -> Raw:
        """The host that says all of this and nothing else."""
        raw = self._document()
        outputs, files, links = self.outputs, dict(raw.files), dict(raw.links)
        listed = lspci(outputs.pop("lspci", "")) | self.expected.pci
        for address, words in listed.items():
            of_device = device(address, words)
            files, links = files | of_device[0], links | of_device[1]
        ran = {
            TOOLS.get(name, name): ToolOutput(
                exit_code=self.expected.exit_code, stdout=text, stderr=self.expected.stderr if name == self.tool else ""
            )
            for name, text in outputs.items()
        }
        return replace(raw, files=files, links=links, tools={**raw.tools, **ran})

    def _document(self) -> Raw:
        if (self.folder / "raw.json").exists():
            return load((self.folder / "raw.json").read_bytes())
        if (self.folder / "capture.tgz").exists():
            hosts = [host.raw for host in read_capture(self.folder / "capture.tgz") if host.raw]
            assert len(hosts) == 1, f"{self.name}: a recording is of one host"
            return hosts[0]
        return Raw(1)


def recordings() -> list[Recorded]:
    """Every case, in order. A folder without an `expected.yaml` is an error: it would test nothing."""
    return [read(folder) for folder in sorted(FACTS.glob("*/*")) if folder.is_dir()]


def read(folder: Path) -> Recorded:
    data = yaml.safe_load((folder / "expected.yaml").read_text())
    return Recorded(folder, decode(Expected, data, where=f"{folder.parent.name}/{folder.name}"))


def device(address: str, words: str) -> tuple[dict[str, str], dict[str, str]]:
    """sysfs files and links of `[class] vendor:device [driver]`; a display device (0300) where no class stands."""
    match = re.fullmatch(r"(?:([0-9a-f]{4}) )?([0-9a-f]{4}):([0-9a-f]{4})(?: (\S+))?", words)
    assert match, f"{address}: {words!r} is no `[class] vendor:device [driver]`"
    kind, vendor, product, driver = match.groups()
    base = PCI + address
    files = {"class": f"0x{kind or '0302'}00", "vendor": f"0x{vendor}", "device": f"0x{product}"}
    links = {base: f"/sys/devices/pci0000:00/{address}"}
    if driver:
        links[base + "/driver"] = f"/sys/bus/pci/drivers/{driver}"
    return {f"{base}/{name}": text + "\n" for name, text in files.items()}, links


def lspci(text: str) -> dict[str, str]:
    """`lspci -nn` or `-nnk` as the probe would find it in sysfs: address -> `class vendor:device [driver]`."""
    found: dict[str, str] = {}
    address = ""
    for line in text.splitlines():
        head = re.match(r"((?:[0-9a-f]{4,}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) .*?\[([0-9a-f]{4})\]: .*", line)
        used = re.match(r"\s+Kernel driver in use: (\S+)", line)
        if head:
            address = head.group(1) if head.group(1).count(":") == 2 else f"0000:{head.group(1)}"
            ids = re.findall(r"\[([0-9a-f]{4}:[0-9a-f]{4})\]", line)
            found[address] = f"{head.group(2)} {ids[-1]}"
        elif used and address:
            found[address] += f" {used.group(1)}"
    return found


def missing(found: Any, expected: Any, where: str = "facts") -> list[str]:
    """What of `expected` does not stand in `found`, in words.

    Mappings hold for the keys they name, lists for their whole length; null is unknown; `{count: 8, each: {...}}`
    stands for a list; `143771 MiB` for that many bytes.
    """
    if isinstance(expected, Mapping) and isinstance(found, list):
        count, each = expected.get("count", len(found)), expected.get("each", {})
        short = [] if count == len(found) else [f"{where}: {len(found)} instead of {count}"]
        return short + [m for i, entry in enumerate(found) for m in missing(entry, each, f"{where}[{i}]")]
    if isinstance(expected, Mapping) and (found is None or isinstance(found, Mapping)):
        found = found or {}
        return [m for key, value in expected.items() for m in missing(found.get(key), value, f"{where}.{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [m for i, (f, e) in enumerate(zip(found, expected, strict=True)) for m in missing(f, e, f"{where}[{i}]")]
    if isinstance(expected, str) and isinstance(found, int) and size(expected) == found:
        return []
    return [] if found == expected else [f"{where}: {found!r} instead of {expected!r}"]
