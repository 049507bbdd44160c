"""The machine below: operating system, CPUs, NUMA nodes, memory, limits, settings that matter to training."""

from __future__ import annotations

import re

from hetctl.comm.contract.facts import Cpu, Folder, Limit, NumaNode, System, ToolRun
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw, ToolOutput, printable
from hetctl.probe.rdma import limit, modules
from hetctl.probe.vendors import VENDORS
from hetctl.probe.words import count, items, json_documents, key_values, mapping, number, size, told

NODES = "/sys/devices/system/node/"
_USUAL_RULES = ("local", "main", "default")
_RECENT_S, _MOST_LINES = 900.0, 50
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
    "sys_vendor": "/sys/class/dmi/id/sys_vendor",
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
        clock_synchronized=_true_or_false(values.get("clock_synchronized")),
        policy_rules=_policy_rules(raw),
        folders=_folders(raw),
        tools=_tool_runs(raw),
        kernel_log=pick(
            "kernel_log", (_kernel_log(raw), "dmesg"), why=f"dmesg: {_said(raw.tool('dmesg'))}; root would see it"
        ),
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
    found |= _isolation(raw)
    swaps = raw.files.get("/proc/swaps", "").splitlines()
    if swaps:
        found["swaps"] = " ".join(line.split()[0] for line in swaps[1:] if line.split()) or "none"
    return found


def _isolation(raw: Raw) -> dict[str, str]:
    """What stands between devices and memory: the IOMMU's kind of domain per device, and PCIe access control."""
    found = {}
    types = {text.strip() for path, text in raw.files.items() if path.endswith("/iommu_group/type")}
    if types:
        found["iommu_types"] = " ".join(sorted(types))
    controls = [line for line in raw.tool("lspci").stdout.splitlines() if "ACSCtl" in line]
    if controls:
        on = [line for line in controls if "SrcValid+" in line or "ReqRedir+" in line]
        found["acs"] = f"on at {len(on)} of {len(controls)} bridges" if on else "off"
    return found


def _true_or_false(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _policy_rules(raw: Raw) -> int | None:
    """Routing rules beyond local, main and default, None when nobody could be asked."""
    rules = [rule for document in json_documents(raw.tool("ip rule").stdout) for rule in items(document)]
    return max(0, len(rules) - len(_USUAL_RULES)) if rules else None


def _folders(raw: Raw) -> tuple[Folder, ...]:
    found = []
    for entry in map(mapping, mapping(raw.values.get("folders")).values()):
        room, files = ([*items(entry.get(key)), None, None] for key in ("bytes", "files"))
        found.append(
            Folder(
                asked=str(entry.get("asked", "")),
                path=str(entry.get("path", "")),
                total_bytes=count(room[0]),
                free_bytes=count(room[1]),
                total_files=count(files[0]),
                free_files=count(files[1]),
                seconds=number(entry.get("seconds")),
                problem=told(entry.get("problem")),
            )
        )
    return tuple(found)


def _tool_runs(raw: Raw) -> dict[str, ToolRun]:
    """The vendors' tools that are installed: how long each took, or what went wrong."""
    names = [name for vendor in VENDORS for name in vendor.tools]
    outputs = {name: raw.tools[name] for name in names if name in raw.tools}
    ran = {n: o for n, o in outputs.items() if o.problem not in ("not installed", "not run")}
    return {name: ToolRun(output.seconds, None if output.ok else _said(output)) for name, output in ran.items()}


def _said(output: ToolOutput) -> str:
    return output.problem or printable(output.stderr.strip() or f"exit code {output.exit_code}", limit=120)


def _kernel_log(raw: Raw) -> tuple[str, ...] | None:
    """Lines of the last quarter of an hour, by the seconds since boot that dmesg writes; None when refused."""
    if not raw.tool("dmesg").ok:
        return None
    now = number((raw.text("/proc/uptime") or "").split(" ")[0])
    kept = []
    for line in raw.tool("dmesg").stdout.splitlines():
        stamp = re.match(r"\[\s*(\d{1,12}\.\d+)\]", line)
        if now is None or stamp is None or float(stamp.group(1)) > now - _RECENT_S:
            kept.append(printable(line))
    return tuple(kept[-_MOST_LINES:])


def _own_addresses(raw: Raw, notes: Notes) -> tuple[str, ...] | None:
    found = [a for a in items(raw.values.get("own_addresses")) if isinstance(a, str)]
    why = raw.failed.get("own name", "")
    return notes.pick("addresses", (tuple(found) or None, "getaddrinfo of the host's own name"), why=why)
