"""The machine itself: its name, clock, disks, shared memory, kernel settings and PCIe isolation."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from hetctl.comm.contract.facts import Folder
from hetctl.comm.contract.units import GiB, MiB, listed, show_bytes, show_seconds
from hetctl.doctor.check import Check, CheckedCluster, HostCase, of_gpus
from hetctl.doctor.verdict import State, Verdict, fail, ok, unknown, warn, worst
from hetctl.launcher.supervisor.environment import interface_of

_GUESTS = re.compile(r"QEMU|KVM|VMware|Xen|Microsoft Corporation|Google|innotek|OpenStack|Parallels|Amazon EC2", re.I)


def name(case: HostCase) -> Verdict:
    """What the host's own name resolves to is what gloo binds to when nobody tells it otherwise."""
    if not case.checked.several:
        return ok("one host: loopback reaches everybody")
    addresses = case.facts.system.addresses
    told = interface_of(case.host) if case.host else None  # then ranks never ask for the name
    state: State = "warn" if told else "fail"
    instead = f"hetctl's ranks take {told}, other programs" if told else "ranks"
    if addresses is None:
        why = case.facts.why_unknown("system.addresses")
        return _named(state, case, f"its own name does not resolve: {why}: {instead} may not start")
    outside = [a for a in addresses if not a.startswith(("127.", "::1"))]
    if not outside:
        return _named(state, case, f"its own name resolves to {listed(list(addresses))}: {instead} wait on loopback")
    own = {a.ip for n in case.facts.nics for a in n.addresses}
    if own and not set(outside) & own:
        return _named("warn", case, f"its own name resolves to {listed(outside)}, which none of its interfaces has")
    if len(outside) < len(addresses) or len({":" in a for a in outside}) < len(outside):
        return _named("warn", case, f"its own name resolves to several addresses: {listed(list(addresses))}")
    return ok(listed(outside))


def _named(state: State, case: HostCase, reason: str) -> Verdict:
    address = case.host.data_address if case.host else None
    values = {"address": address or "ADDRESS", "hostname": case.facts.system.hostname or case.name}
    return Verdict(state, reason, values=values)


def shm(case: HostCase) -> Verdict:
    if not case.gpus:
        return ok("no GPU here: gloo does not use it")
    free = case.facts.system.shm_total_bytes
    if free is None:
        return unknown("/dev/shm is not readable")
    if free >= 8 * GiB:
        return ok(show_bytes(free))
    size = f"{show_bytes(free)} of /dev/shm"
    return warn(size) if free >= 512 * MiB else fail(f"only {size}")


@of_gpus
def numa_balancing(case: HostCase) -> Verdict:
    value = case.facts.system.settings.get("numa_balancing")
    if value is None:
        return unknown("/proc/sys/kernel/numa_balancing is not there")
    return ok("off") if value == "0" else warn("the kernel moves pages between NUMA nodes while GPUs read them")


@of_gpus
def iommu(case: HostCase) -> Verdict:
    settings = case.facts.system.settings
    cmdline, types = settings.get("cmdline"), settings.get("iommu_types")
    if types and "DMA" in types:
        says = f"device memory accesses are translated (IOMMU domains: {types})"
        return fail(says) if case.rdma_ports and not _guest(case) else warn(says)
    if types or settings.get("iommu") == "none" or (cmdline and re.search(r"iommu=(pt|off)", cmdline)):
        return ok("off or passed through")
    return unknown("neither the kernel's command line nor the IOMMU groups tell")


@of_gpus
def acs(case: HostCase) -> Verdict:
    found = case.facts.system.settings.get("acs")
    if found is None:
        return unknown("only root can read PCIe access control", "sudo lspci -vv | grep ACSCtl  # on {host}")
    if found == "off":
        return ok("off")
    says = f"PCIe access control is {found}: traffic between devices goes through the CPU"
    if _guest(case):
        return warn(f"{says} (in a virtual machine it must stay on; use ATS)", "ask the provider for ATS")
    return fail(says)


def _guest(case: HostCase) -> bool:
    return bool(_GUESTS.search(case.facts.system.settings.get("sys_vendor", "")))


def pci_realloc(case: HostCase) -> Verdict:
    cmdline = case.facts.system.settings.get("cmdline")
    if cmdline is None:
        return unknown("/proc/cmdline is not readable")
    set_ = [w for w in cmdline.split() if w.startswith(("pci=", "pcie_"))]
    return ok(listed(set_) or "nothing special")


def governor(case: HostCase) -> Verdict:
    value = case.facts.system.settings.get("scaling_governor")
    if value is None:
        return unknown("the kernel does not show a frequency governor")
    return ok(value) if value == "performance" else warn(f"CPUs are governed by '{value}'")


def thp(case: HostCase) -> Verdict:
    value = case.facts.system.settings.get("transparent_hugepage")
    chosen = re.search(r"\[(\w+)\]", value or "")
    return ok(chosen[1]) if chosen else unknown("transparent_hugepage is not readable")


def swap(case: HostCase) -> Verdict:
    value = case.facts.system.settings.get("swaps")
    if value is None:
        return unknown("/proc/swaps is not readable")
    return ok("none") if value == "none" else warn(f"swap is on: {value}")


def clock(case: HostCase) -> Verdict:
    """How far it is at least from what most hosts believe; the way there and back blurs the rest."""
    bounds = case.report.clock_ahead_s
    if bounds is None:
        return unknown("the host did not tell its time")
    others = [sum(r.clock_ahead_s) / 2 for r in case.checked.reports if r.clock_ahead_s is not None]
    usual = statistics.median(others) if len(others) > 2 else 0.0
    least = max(0.0, bounds[0] - usual, usual - bounds[1])
    way = "ahead" if bounds[0] > usual else "behind"
    if least > 30:
        return fail(f"its clock is {show_seconds(least)} {way}")
    kept = case.facts.system.clock_synchronized
    if least > 1:
        return warn(f"its clock is {show_seconds(least)} {way}")
    if kept is None:
        return unknown("the kernel does not say whether anything keeps its clock")
    if kept:
        return ok(f"within {show_seconds(bounds[1] - bounds[0])}")
    several = case.checked.several
    return warn("nothing keeps its clock in time") if several else ok("one host: no other clock to agree with")


def disk(case: HostCase) -> Verdict:
    folders = case.facts.system.folders
    if not folders:
        return unknown("no folder was tried")
    return worst(map(_folder, folders), otherwise=listed([f.path for f in folders]))


def _folder(folder: Folder) -> Verdict:
    if folder.problem:
        return fail(f"nothing can be written in {folder.path}: {folder.problem}", path=folder.path)
    shares = [(folder.free_bytes, folder.total_bytes, "space")]
    shares += [(folder.free_files, folder.total_files, "inodes")] if folder.total_files else []
    verdicts = []
    for free, total, what in shares:
        if free is None or not total:
            verdicts.append(unknown(f"{folder.path} does not tell its {what}"))
        elif free * 20 < total:
            verdicts.append(fail(f"{folder.path} has {free / total:.0%} of its {what} left", path=folder.path))
        elif free * 10 < total:
            verdicts.append(warn(f"{folder.path} has {free / total:.0%} of its {what} left", path=folder.path))
    return worst(verdicts, otherwise=folder.path)


def sharedfs(checked: CheckedCluster) -> Iterator[Verdict]:
    """A file written on one host, looked for on the others."""
    for folder, seen in checked.shared.items():
        for host, problem in seen.items():
            if problem.startswith("absent"):
                yield fail(f"{folder} is not the folder the others see", about=host, path=folder)
            else:
                yield unknown(f"{folder}: {problem}", about=host) if problem else ok(f"{folder} is shared", about=host)


_SYSCTL = "sudo sysctl -w {0}  # on {{host}}"
CHECKS = (
    Check(
        "host.name",
        "getaddrinfo(gethostname()) on the host",
        "pytorch#15592; vllm#7074; aws-do-eks#50",
        "echo '{address} {hostname}' | sudo tee -a /etc/hosts  # on {host}, and remove its 127.x line",
        rule=name,
        essential=True,
    ),
    Check(
        "host.shm",
        "statvfs /dev/shm",
        "DeepSpeed ds_report; Primus",
        "sudo mount -o remount,size=16G /dev/shm  # on {host}; docker: --shm-size=16g",
        rule=shm,
    ),
    Check(
        "host.numa_balancing",
        "/proc/sys/kernel/numa_balancing",
        "ROCm prerequisites",
        _SYSCTL.format("kernel.numa_balancing=0"),
        rule=numa_balancing,
    ),
    Check(
        "host.iommu",
        "/proc/cmdline, /sys/class/iommu, iommu_group/type of GPUs and NICs",
        "NVIDIA NIM; CVS",
        "sudo grubby --update-kernel=ALL --args=iommu=pt && sudo reboot  # on {host}",
        rule=iommu,
    ),
    Check(
        "host.acs",
        "lspci -vv (root)",
        "NCCL troubleshooting; CVS",
        "sudo setpci -s BRIDGE ECAP_ACS+0x6.w=0000  # on {host}, per bridge above a GPU or NIC; never in a VM",
        rule=acs,
        root="PCIe access control",
    ),
    Check("host.pci_realloc", "/proc/cmdline", "CVS", rule=pci_realloc),
    Check(
        "host.governor",
        "cpufreq/scaling_governor",
        "Primus; gcm",
        "sudo cpupower frequency-set -g performance  # on {host}",
        rule=governor,
    ),
    Check("host.thp", "transparent_hugepage/enabled", "CVS", rule=thp),
    Check("host.swap", "/proc/swaps", "imbue", "sudo swapoff -a  # on {host}", rule=swap),
    Check(
        "host.clock",
        "wall clock against ours, bounded by the round trip; adjtimex",
        "Primus clock.py",
        "sudo systemctl enable --now chronyd || sudo timedatectl set-ntp true  # on {host}",
        rule=clock,
    ),
    Check(
        "host.disk",
        "statvfs, and a small file written, synced, renamed and removed",
        "imbue; NVRx storage check",
        "df -hi {path}; mount | grep ' on '  # on {host}",
        rule=disk,
    ),
    Check(
        "host.sharedfs",
        "a token written on the first host, read on the others (with --folder)",
        "DeepSpeed#11",
        "mount | grep {path}  # on {host}; or checkpoint.store: gather:HOST for folders that are not shared",
        level="pairs",
        survey=sharedfs,
    ),
)
