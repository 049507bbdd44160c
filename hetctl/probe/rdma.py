"""RDMA readiness: what a process of ours finds when it opens a NIC or registers device memory with it."""

from __future__ import annotations

import re

from hetctl.comm.contract.facts import Bytes, Library, RdmaFacts
from hetctl.probe.notes import Notes
from hetctl.probe.port_fabric import fabric_report
from hetctl.probe.raw import Raw
from hetctl.probe.vendors import VENDORS
from hetctl.probe.words import items, mapping

DMA_BUF_KERNEL = (5, 12)
_OPTIONS = ("CONFIG_DMABUF_MOVE_NOTIFY", "CONFIG_PCI_P2PDMA")


def rdma(raw: Raw, notes: Notes) -> RdmaFacts:
    """Devices, device files this user may open, libraries, memlock as launched, and the two ways to device memory."""
    libraries = parse_ldconfig(raw.tool("ldconfig").stdout) if raw.tool("ldconfig").ok else None
    blocker = _dma_buf_blocker(raw)
    return RdmaFacts(
        devices=raw.children("/sys/class/infiniband"),
        device_files=_openable(raw),
        libraries=notes.pick("libraries", (libraries, "ldconfig -p"), why=raw.tool("ldconfig").problem),
        providers=_providers(raw),
        fabric_providers=parse_fi_info(raw.tool("fi_info").stdout),
        memlock_bytes=notes.pick("memlock_bytes", (_memlock(raw), "getrlimit in the probe, started as workers are")),
        peer_memory_modules=notes.pick("peer_memory_modules", (_peer_memory(raw), "/proc/modules, memory_peers")),
        dma_buf=notes.pick("dma_buf", (blocker[0], blocker[1]), why=blocker[1]),
        report=fabric_report(raw),
    )


def parse_ldconfig(text: str) -> tuple[Library, ...]:
    """`ldconfig -p` lines `libibverbs.so.1 (libc6,x86-64) => /lib/...`; the version is what the path's end says."""
    rows = re.findall(r"^\s*(\S+)\s+\(([^)]*)\)\s+=>\s+(\S+)\s*$", text, re.MULTILINE)
    found: dict[str, Library] = {}
    for name, kind, path in rows:
        if "x86-64" in kind or "AArch64" in kind or "64bit" in kind:  # not the 32-bit twin
            found.setdefault(name, Library(name, path, library_version(path)))
    return tuple(found[name] for name in sorted(found))


def parse_fi_info(text: str) -> tuple[str, ...] | None:
    """The providers of `fi_info -l` (each at the start of a line) or of `fi_info`; None where it names none."""
    found = re.findall(r"^(?:provider:[ \t]*([\w;]{1,40})|([a-z][\w;]{1,40}):)[ \t]*$", text, re.MULTILINE)
    return tuple(sorted({one or other for one, other in found})) or None


def library_version(path: str) -> str | None:
    """2.27.3 of .../libnccl.so.2.27.3; None when the name carries no more than a major version."""
    match = re.search(r"\.so\.(\d+(?:\.\d+)+)$", path)
    return match.group(1) if match else None


def modules(raw: Raw) -> dict[str, str]:
    """Loaded kernel modules of interest, with the version of those that carry one."""
    names = [line.split()[0] for line in raw.files.get("/proc/modules", "").splitlines() if line.split()]
    return {name: raw.text(f"/sys/module/{name}/version") or "" for name in names}


def _openable(raw: Raw) -> tuple[str, ...] | None:
    """Device files of RDMA that this user may open."""
    if "openable" not in raw.values:
        return None
    files = mapping(raw.values["openable"])
    return tuple(sorted(f for f, ours in files.items() if ours is True and str(f).startswith("/dev/infiniband/")))


def limit(value: object) -> Bytes | None:
    """A resource limit as the probe sent it: a whole number or the word unlimited."""
    if value == "unlimited":
        return "unlimited"
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _providers(raw: Raw) -> tuple[str, ...] | None:
    """`driver mlx5` lines; None where no such folder shows what is installed."""
    texts = [text for path, text in raw.files.items() if path.startswith("/etc/libibverbs.d/")]
    found = re.findall(r"^\s*driver\s+(\w+)", "\n".join(texts), re.MULTILINE)
    return tuple(sorted(set(found))) or None


def _memlock(raw: Raw) -> Bytes | None:
    pair = items(mapping(raw.values.get("limits")).get("memlock"))
    return limit(pair[0]) if pair else None


def _peer_memory(raw: Raw) -> tuple[str, ...] | None:
    """Modules, and clients registered with the RDMA core, through which NICs reach device memory."""
    if "/proc/modules" not in raw.files:
        return None
    known = {name for vendor in VENDORS for name in vendor.peer_memory}
    return tuple(sorted(known & set(modules(raw)) | set(raw.children("/sys/kernel/mm/memory_peers"))))


def _dma_buf_blocker(raw: Raw) -> tuple[bool | None, str]:
    """Whether device memory can be registered through dma-buf as far as files tell, and what tells it."""
    release = raw.text("/proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d{1,3})\.(\d{1,3})", release)
    if match and (int(match.group(1)), int(match.group(2))) < DMA_BUF_KERNEL:
        return False, f"kernel {release} is older than 5.12"
    config = raw.files.get(f"/boot/config-{release}")
    if config is not None:
        for option in _OPTIONS:
            if option + "=y" not in config:
                return False, f"kernel built without {option}"
    loaded = modules(raw)
    for vendor in VENDORS:
        blocker = vendor.dma_buf_blocker(raw) if loaded.keys() & set(vendor.drivers) else None
        if blocker:
            return False, blocker
    if config is None:
        return None, "the kernel's configuration is not readable in /boot"
    return True, "kernel configuration and driver (only registering memory proves it)"
