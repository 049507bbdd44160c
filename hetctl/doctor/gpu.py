"""GPUs: are they all there, healthy, alone, and do they compute?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from hetctl.comm.contract.facts import GpuFacts
from hetctl.comm.contract.units import listed, show_bytes
from hetctl.discovery.devices import foreign_words, large
from hetctl.doctor.check import Check, CheckedCluster, HostCase, of_gpus
from hetctl.doctor.perf import pythons_of
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, warn, worst

_NO_GPU = "no GPU here"
_FATAL_XIDS = {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
_XID = re.compile(r"Xid \([^()]*\): (\d+)")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def count(case: HostCase) -> Verdict:
    facts = case.facts
    broken = {v: s for v, s in facts.vendors.items() if s not in ("present", "absent")}
    if broken:
        return fail("; ".join(f"{vendor}: {said}" for vendor, said in broken.items()))
    if facts.foreign:
        return warn("; ".join(foreign_words(facts)), "leave {host} out, or write its back end: docs/adding-a-vendor.md")
    if not facts.gpus:
        return ok(_NO_GPU) if facts.vendors else unknown("the PCI bus was not readable")
    hidden = [w for w in facts.warnings if "GPU(s)" in w]
    narrowed = [f"{name}={facts.system.environment[name]}" for name in _VISIBLE if name in facts.system.environment]
    if hidden:
        return warn("; ".join(hidden))
    if narrowed:
        return warn(f"{narrowed[0]}: torch sees those only", "unset " + " ".join(_VISIBLE[:3]))
    tried = case.checked.performance.get(case.name, {})
    seen = tried.get("devices")
    if (
        "chosen" not in tried
        and isinstance(seen, list)
        and len(seen) < len(facts.gpus)
        and not any(g.partition.instances for g in facts.gpus)
    ):
        return warn(f"torch sees {len(seen)} of {len(facts.gpus)} GPUs", "unset " + " ".join(_VISIBLE[:3]))
    return ok(f"{len(facts.gpus)}")


@of_gpus
def liveness(case: HostCase) -> Verdict:
    """A small product on every GPU in a process of its own, with a deadline."""
    if not pythons_of(case):
        return unknown("torch is not installed there")
    found = case.checked.performance.get(case.name)
    if found is None:
        return unknown("it was not tried")
    if "problem" in found:
        return unknown(str(found["problem"]))
    verdicts = []
    for device in found.get("devices", []):
        which = f"GPU {device.get('index')}"
        if device.get("problem"):
            verdicts.append(fail(f"{which}: {device['problem']}"))
        elif not device.get("finite", True):
            verdicts.append(fail(f"{which} computed NaN"))
        elif float(device.get("alive_s", 0.0)) > 10:
            verdicts.append(warn(f"{which} took {device['alive_s']:.0f} s to answer"))
    return worst(verdicts, otherwise=f"{len(found.get('devices', []))} compute")


@of_gpus
def smi_latency(case: HostCase) -> Verdict:
    tools = case.facts.system.tools
    if not tools:
        return unknown("no tool of the GPUs' vendor was found")
    stuck = [f"{name}: {run.problem}" for name, run in tools.items() if "timed out" in (run.problem or "")]
    if stuck:
        return fail(f"{listed(stuck)}: a driver that hangs comes before a GPU that is lost")
    took = [run.seconds for run in tools.values() if run.problem is None and run.seconds is not None]
    if not took:
        return unknown(f"no tool answered: {listed([f'{n}: {r.problem}' for n, r in tools.items()])}")
    return ok(f"{min(took):.1f} s") if min(took) < 1 else warn(f"the quickest answer took {min(took):.1f} s")


def _each(judge: Callable[[GpuFacts], Verdict], otherwise: str) -> Callable[[HostCase], Verdict]:
    """A rule that asks about every GPU and keeps the worst."""
    return of_gpus(lambda case: worst(map(judge, case.gpus), otherwise=otherwise))


def usable(gpu: GpuFacts) -> Verdict:
    """What the driver's tool says of a GPU that it lists and cannot use."""
    if gpu.problem is None:
        return ok("usable")
    mend = next((line for word, line in _MENDS.items() if word in gpu.problem.lower()), "")
    return fail(f"{gpu.id}: {gpu.problem}", mend, pci=gpu.pci)


_MENDS = {
    "version mismatch": "sudo reboot  # {host}: its driver was updated while the old one is loaded",
    "permission": "sudo usermod -aG video,render $USER  # on {host}, and log in again; or chmod /dev/nvidia*",
    "couldn't communicate": "sudo modprobe nvidia; dkms status  # on {host}: was the driver built for its kernel?",
    "requires reset": "sudo nvidia-smi --gpu-reset -i {pci} || sudo reboot  # on {host}",
}


def pcie(gpu: GpuFacts) -> Verdict:
    """Width only: speed drops while a GPU idles."""
    width, most = gpu.pcie.width, gpu.pcie.max_width
    if width is None or most is None:
        return unknown(f"{gpu.id} does not tell its PCIe width")
    return ok(f"x{width}") if width >= most else fail(f"{gpu.id} has {width} of its {most} PCIe lanes", pci=gpu.pci)


def ecc_ras(gpu: GpuFacts) -> Verdict:
    health = gpu.health
    if health.ecc_uncorrected:
        return fail(f"{gpu.id} counts {health.ecc_uncorrected} uncorrected memory errors")
    if health.remap_failed:
        return fail(f"{gpu.id} could not remap bad memory rows")
    if health.rows_pending:
        return warn(f"{gpu.id} has memory rows that wait for a reset to be remapped")
    if health.ecc_corrected:
        return warn(f"{gpu.id} corrected {health.ecc_corrected} memory errors")
    known = (health.ecc_uncorrected, health.remap_failed, health.ecc_corrected)
    if all(count is None for count in known):
        return unknown(f"{gpu.id} shows no error counters (a guest?)")
    return ok("no errors")


def recovery_action(gpu: GpuFacts) -> Verdict:
    action = gpu.health.recovery_action
    if action is None:
        return unknown(f"the driver of {gpu.id} has no such field")
    if action.lower() == "none":
        return ok("none")
    says = f"the driver of {gpu.id} asks for: {action}"
    return warn(says) if "p2p" in action.lower() else fail(says)


def _logged(judge: Callable[[str], Verdict | None]) -> Callable[[HostCase], Verdict]:
    """A rule that asks about every line of the kernel's log, of which some are not its affair."""

    @of_gpus
    def rule(case: HostCase) -> Verdict:
        lines = case.facts.system.kernel_log
        if lines is None:
            return unknown(case.facts.why_unknown("system.kernel_log") or "the kernel's log is not readable")
        return worst(filter(None, map(judge, lines)), otherwise="nothing in the last 15 minutes")

    return rule


def xid(line: str) -> Verdict | None:
    if (found := _XID.search(line)) is None:
        return None
    return (fail if int(found[1]) in _FATAL_XIDS else warn)(f"Xid {int(found[1])}: {line}")


def ras(line: str) -> Verdict | None:
    if _XID.search(line):
        return None
    return warn(line) if "page fault" in line else fail(line)


def foreign(gpu: GpuFacts) -> Verdict:
    if gpu.processes is None:
        return unknown(f"who uses {gpu.id} is not visible")
    if heavy := [p for p in gpu.processes if large(p)]:
        each = listed([f"{p.pid} ({p.name or '?'}, {show_bytes(p.memory_bytes)})" for p in heavy])
        return fail(f"{gpu.id} is used by {each}", pid=heavy[0].pid)
    small = [str(p.pid) for p in gpu.processes]
    return warn(f"{gpu.id} is open in {listed(small)}", pid=small[0]) if small else ok("alone")


def throttle(gpu: GpuFacts) -> Verdict:
    reasons = gpu.health.throttle_reasons
    if reasons is None:
        return unknown(f"{gpu.id} does not tell")
    hard = [r for r in reasons if re.search(r"hw|thermal|brake", r, re.I)]
    if hard:
        return fail(f"{gpu.id} is slowed down by {listed(hard)}")
    return warn(f"{gpu.id} is slowed down by {listed(list(reasons))}") if reasons else ok("at full clocks")


@of_gpus
def power(case: HostCase) -> Verdict:
    """A power limit below that of the same product elsewhere."""
    best: dict[str | None, float] = defaultdict(float)
    for facts in case.checked.facts.values():
        for gpu in facts.gpus:
            best[gpu.name] = max(best[gpu.name], gpu.health.power_limit_w or 0.0)
    verdicts = []
    for gpu in case.gpus:
        limit = gpu.health.power_limit_w
        if limit is None:
            verdicts.append(unknown(f"{gpu.id} does not tell its power limit"))
        elif limit < best[gpu.name]:
            verdicts.append(warn(f"{gpu.id} is held at {limit:.0f} W, others of its kind at {best[gpu.name]:.0f} W"))
    return worst(verdicts, otherwise=f"{max(best.values()):.0f} W")


def fabric(gpu: GpuFacts) -> Verdict:
    health = gpu.health
    if health.links_up == 0:
        return warn(f"{gpu.id} has no link to other GPUs up: right for a card without a bridge, for no other")
    if health.links_down:
        return fail(f"{gpu.id} has {health.links_down} of its links to other GPUs down")
    if health.fabric_state and health.fabric_state.lower() not in ("completed", "success", "not supported"):
        return fail(f"the fabric of {gpu.id} is '{health.fabric_state}'")
    known = health.links_up is not None or health.fabric_state is not None
    return ok(f"{health.links_up} links") if known else unknown(f"{gpu.id} does not tell its links")


def partition(checked: CheckedCluster) -> Iterator[Verdict]:
    for vendor, group in checked.groups.items():
        modes: dict[str, list[str]] = defaultdict(list)
        for host, facts in group.items():
            for gpu in facts.gpus:
                if gpu.vendor != vendor:
                    continue
                if gpu.partition.mode == "mig" and not gpu.partition.instances:
                    yield fail(f"{gpu.id} is in MIG mode without an instance", about=host)
                else:
                    modes[f"{gpu.partition.mode or 'unknown'} {gpu.partition.memory_mode or ''}".strip()].append(host)
        if len(modes) > 1:
            each = "; ".join(f"{mode}: {listed(list(dict.fromkeys(hosts)))}" for mode, hosts in modes.items())
            yield warn(f"GPUs are divided differently ({each})", about=vendor)
        elif "unknown" in modes:
            yield unknown("how GPUs are divided is not visible", about=vendor)
        elif vendor and modes:
            yield ok(next(iter(modes)), about=vendor)


_LOG = "sudo dmesg -T | grep -E 'Xid|amdgpu'  # on {host}"
_DRAIN = "nvidia-smi -q -d ECC,ROW_REMAPPER || amd-smi metric --ecc  # on {host}; leave the GPU out with `gpus:`"
CHECKS = (
    Check(
        "gpu.count",
        "the PCI bus, the drivers, *_VISIBLE_DEVICES",
        "pytorch#186516; CVS",
        "lspci -nnk | grep -A3 -E '0300|0302|1200'  # on {host}: is a driver bound?",
        rule=count,
        essential=True,
    ),
    Check(
        "gpu.usable",
        "what nvidia-smi says in place of an answer",
        "gpud; issue threads of NVIDIA's drivers",
        "sudo lspci -s {pci}; sudo dmesg | grep -i xid  # on {host}: off the bus? sudo reboot, reseat it, or `gpus:`",
        rule=_each(usable, "all usable"),
    ),
    Check(
        "gpu.liveness",
        "256 MiB and a 2048x2048 bf16 product per GPU, 15 s",
        "Primus",
        "sudo nvidia-smi -r -i INDEX || sudo amd-smi reset -G -g INDEX  # on {host}, or leave it out with `gpus:`",
        rule=liveness,
    ),
    Check("gpu.smi_latency", "how long the vendor's tools take", "Primus", "sudo reboot  # {host}", rule=smi_latency),
    Check(
        "gpu.pcie",
        "current and maximal link width in sysfs",
        "CVS; imbue PcieLimited",
        "sudo lspci -vv -s {pci} | grep LnkSta  # on {host}; reseat the card or riser",
        rule=_each(pcie, "all lanes"),
    ),
    Check(
        "gpu.ecc_ras", "ECC and RAS counters", "Azure gpu_ecc; gcm; Primus", _DRAIN, rule=_each(ecc_ras, "no errors")
    ),
    Check(
        "gpu.recovery_action",
        "gpu_recovery_action of the driver",
        "nvidia_gpu_exporter",
        "do as it says, or leave the GPU out with `gpus:` in the inventory of {host}",
        rule=_each(recovery_action, "none"),
    ),
    Check(
        "gpu.xid",
        "dmesg, last 15 minutes",
        "imbue; gcm xid_error_codes",
        _LOG,
        rule=_logged(xid),
        root="the kernel's log",
    ),
    Check(
        "gpu.ras_log", "dmesg, last 15 minutes", "CVS err_patterns", _LOG, rule=_logged(ras), root="the kernel's log"
    ),
    Check(
        "gpu.foreign_procs",
        "processes with device memory",
        "Primus gpu_processes; vllm PR#34816",
        "ps -o pid,user,lstart,cmd -p {pid}  # on {host}; `hetctl clean` ends only what hetctl started",
        rule=_each(foreign, "alone"),
    ),
    Check(
        "gpu.throttle",
        "clocks_event_reasons",
        "Azure clock_throttling",
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE || amd-smi metric -t -p  # on {host}; look at its cooling and power",
        rule=_each(throttle, "at full clocks"),
    ),
    Check(
        "gpu.power",
        "power limits",
        "Azure",
        "sudo nvidia-smi -pl WATTS || sudo amd-smi set -o WATTS  # on {host}",
        rule=power,
    ),
    Check(
        "gpu.fabric",
        "NVLink and xGMI links, fabric registration",
        "imbue NvlinkStatus; Azure amd_xgmi",
        "sudo systemctl restart nvidia-fabricmanager || amd-smi xgmi  # on {host}",
        rule=_each(fabric, "all links up"),
    ),
    Check(
        "gpu.partition",
        "MIG mode; compute and memory partitions",
        "node-scraper",
        "nvidia-smi mig -lgi || amd-smi partition  # on {host}; divide all alike, or turn it off",
        survey=partition,
    ),
)
