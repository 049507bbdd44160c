"""The machine below: operating system, CPUs, NUMA nodes, memory, limits, settings that matter to training."""

from __future__ import annotations

import re

from hetctl.comm.facts import Cpu, Limit, NumaNode, System
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw
from hetctl.probe.rdma import limit, modules
from hetctl.probe.words import count, items, key_values, mapping, number, size, told

NODES = "/sys/devices/system/node/"
SETTINGS = {
    "numa_balancing": "/proc/sys/kernel/numa_balancing",
    "ip_local_port_range": "/proc/sys/net/ipv4/ip_local_port_range",
    "ip_local_reserved_ports": "/proc/sys/net/ipv4/ip_local_reserved_ports",
    "rmem_max": "/proc/sys/net/core/rmem_max",
    "wmem_max": "/proc/sys/net/core/wmem_max",
    "swappiness": "/proc/sys/vm/swappiness",
    "cmdline": "/proc/cmdline",
    "transparent_hugepage": "/sys/kernel/mm/transparent_hugepage/enabled",
    "scaling_governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "nccl.conf": "/etc/nccl.conf",
    "rocm": "/opt/rocm/.info/version",
}


def system(raw: Raw, notes: Notes) -> System:
    """What the host is, from procfs, sysfs and the probe process itself."""
    release = key_values(raw.files.get("/etc/os-release", ""), "=")
    memory = key_values(raw.files.get("/proc/meminfo", ""))
    pick, text, values = notes.pick, raw.text, raw.values
    shm = items(values.get("shm"))
    return System(
        hostname=pick("hostname", (told(text("/proc/sys/kernel/hostname")), "procfs")),
        machine=told(values.get("machine")),
        os=pick("os", (told(release.get("PRETTY_NAME", "").strip('"')), "/etc/os-release")),
        kernel=pick("kernel", (told(text("/proc/sys/kernel/osrelease")), "procfs")),
        machine_id=pick("machine_id", (told(text("/etc/machine-id")), "/etc/machine-id")),
        boot_id=pick("boot_id", (told(text("/proc/sys/kernel/random/boot_id")), "procfs")),
        user=told(values.get("user")),
        uptime_s=number((text("/proc/uptime") or "").split(" ")[0]),
        clock_s=number(values.get("clock_s")),
        probe_seconds=number(values.get("probe_seconds")),
        cpu=_cpu(raw, notes.at("cpu")),
        numa=_numa(raw),
        memory_total_bytes=pick("memory_total_bytes", (size(memory.get("MemTotal")) or None, "/proc/meminfo")),
        memory_available_bytes=pick("memory_available_bytes", (size(memory.get("MemAvailable")), "/proc/meminfo")),
        shm_total_bytes=pick("shm_total_bytes", (count(shm[0]) if shm else None, "statvfs /dev/shm")),
        shm_free_bytes=pick("shm_free_bytes", (count(shm[1]) if len(shm) > 1 else None, "statvfs /dev/shm")),
        container=_container(raw),
        settings=_settings(raw),
        modules=modules(raw),
        environment={str(k): v for k, v in mapping(values.get("environment")).items() if isinstance(v, str)},
        addresses=_own_addresses(raw, notes),
    )


def limits(raw: Raw) -> dict[str, Limit]:
    """Resource limits of a process started as workers are started."""
    pairs = {str(name): items(pair) for name, pair in mapping(raw.values.get("limits")).items()}
    found = {name: Limit(limit(pair[0]), limit(pair[1])) for name, pair in pairs.items() if len(pair) == 2}
    return {name: both for name, both in found.items() if both != Limit()}


def _cpu(raw: Raw, notes: Notes) -> Cpu:
    blocks = [key_values(b) for b in re.split(r"\n(?=processor\b)", raw.files.get("/proc/cpuinfo", "")) if b.strip()]
    blocks = [b for b in blocks if "processor" in b]
    models = [m for m in (told(b.get("model name")) for b in blocks) if m]
    sockets = {b["physical id"] for b in blocks if "physical id" in b}
    cores = {(b["physical id"], b["core id"]) for b in blocks if "physical id" in b and "core id" in b}
    pick = notes.pick
    return Cpu(
        model=pick("model", (models[0] if models else None, "/proc/cpuinfo")),
        sockets=pick("sockets", (len(sockets) or None, "/proc/cpuinfo")),
        cores=pick("cores", (len(cores) or None, "/proc/cpuinfo")),
        threads=pick("threads", (len(blocks) or None, "/proc/cpuinfo")),
        allowed=pick("allowed", (count(raw.values.get("affinity")) or None, "sched_getaffinity")),
    )


def _numa(raw: Raw) -> tuple[NumaNode, ...]:
    found = {}
    for path in raw.files:
        match = re.fullmatch(re.escape(NODES) + r"node(\d{1,4})/(?:cpulist|meminfo)", path)
        if match:
            number_ = int(match.group(1))
            memory = re.search(r"MemTotal:\s*(\d+ kB)", raw.files.get(f"{NODES}node{number_}/meminfo", ""))
            total = size(memory.group(1)) if memory else None
            found[number_] = NumaNode(number_, raw.text(f"{NODES}node{number_}/cpulist") or None, total)
    return tuple(found[n] for n in sorted(found))


def _container(raw: Raw) -> str | None:
    named = told(raw.text("/run/systemd/container"))
    if named:
        return named
    if "/.dockerenv" in raw.files:
        return "docker"
    return "podman" if "/run/.containerenv" in raw.files else "none"


def _settings(raw: Raw) -> dict[str, str]:
    found = {name: value for name, path in SETTINGS.items() if (value := raw.text(path)) is not None}
    iommu = raw.listings.get("/sys/class/iommu")
    if iommu is not None:
        found["iommu"] = " ".join(iommu) or "none"
    swaps = raw.files.get("/proc/swaps", "").splitlines()
    if swaps:
        found["swaps"] = " ".join(line.split()[0] for line in swaps[1:] if line.split()) or "none"
    return found


def _own_addresses(raw: Raw, notes: Notes) -> tuple[str, ...] | None:
    found = [a for a in items(raw.values.get("own_addresses")) if isinstance(a, str)]
    why = raw.failed.get("own name", "")
    return notes.pick("addresses", (tuple(found) or None, "getaddrinfo of the host's own name"), why=why)
