"""What devices compute: how fast, against their model's row or their group, and how right (the numerics gate)."""

from __future__ import annotations

import inspect
import os
import statistics
from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal

from hetctl.comm.contract.cluster import Device
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.facts import GpuFacts, Interpreter
from hetctl.comm.contract.units import show_rate
from hetctl.discovery.devices import device_class
from hetctl.discovery.inventory import InventoryHost
from hetctl.doctor import perf_program
from hetctl.doctor.check import Check, CheckedCluster, HostCase, worker_python
from hetctl.doctor.software import build_for
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, warn, worst
from hetctl.launcher.engines.entrance import Entrance
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.dialogue import converse
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.supervisor.environment import visible_devices
from hetctl.probe.raw import printable
from hetctl.trainer.planning.hardware import CLASSES

Program = Literal["alive", "perf"]
GOOD, BEARABLE = 0.90, 0.75  # of what is expected
_PEERS = 3  # devices of a class from which their median is a better guide than a table
_SECONDS: Mapping[Program, float] = {"alive": 60.0, "perf": 300.0}

# in units of the dtype's epsilon, over the reference's root mean square: a kernel of another order of summation stays
# far below these, one scaled by 1 + 1e-2 (1.3 eps of bf16) or one that drops to TF32 lies far above at least one
LIMITS: Mapping[str, Mapping[str, float]] = {
    "bfloat16": {"max_eps": 64.0, "mean_eps": 0.75, "scale_eps": 0.7},
    "float32": {"max_eps": 1024.0, "mean_eps": 32.0, "scale_eps": 16.0},
}
LEAST_COSINE = {"bfloat16": 0.999, "float32": 0.999999}


def program_for(ids: set[str]) -> Program | None:
    """Which program the chosen checks need, None when they need none."""
    if any(i.startswith("perf.") and i != "perf.pair" for i in ids):
        return "perf"
    return "alive" if "gpu.liveness" in ids else None


def worth_asking(case: HostCase, program: Program) -> bool:
    """Whether a host can answer: torch is there, and for liveness a GPU."""
    return bool(pythons_of(case)) and (program == "perf" or bool(case.gpus))


def pythons_of(case: HostCase) -> dict[str, Interpreter]:
    """Vendor -> the Python with torch that computes on its devices; where there are several vendors, with its torch."""
    found = {vendor: worker_python(case.facts, vendor) for vendor in case.vendors}
    return {
        vendor: python
        for vendor, python in found.items()
        if python is not None and python.torch and (len(found) == 1 or build_for(vendor, python).state == "ok")
    }


def measure(
    entries: Sequence[InventoryHost], checked: CheckedCluster, program: Program, *, timeout_s: float
) -> dict[str, Mapping[str, Any]]:
    """Host -> what its devices did, or the problem that kept it from telling."""
    found: dict[str, Mapping[str, Any]] = {}
    seconds = max(timeout_s, _SECONDS[program])
    cases = checked.cases
    text = inspect.getsource(perf_program)
    with Entrance() as entrance:

        def ask(entry: InventoryHost, deadline: Deadline) -> dict[str, Any]:
            case, answers = cases[entry.name], []
            with closing(entrance.open(entry, deadline)) as shell:
                for vendor, python in pythons_of(case).items():
                    path, shown = python.executable or entry.access.python, _shown(entry, case, vendor)
                    visible = {setting.name: setting.value for setting in visible_devices(shown)}
                    request = {"program": program, "deadline_s": seconds, "environment": _inventorys(entry) | visible}
                    with closing(converse(shell, path, text, request, deadline=deadline)) as dialogue:
                        answers.append(_numbered(dialogue.receive(deadline=deadline), shown))
            devices = [device for answer in answers for device in answer.get("devices", [])]
            return {**ChainMap(*answers), **({"devices": devices} if devices else {})}

        for outcome in fan_out(entries, ask, deadline_s=seconds):
            problem = {"problem": printable(outcome.error.message)} if outcome.error else {}
            found[outcome.item.name] = outcome.value or problem
    return found


def _inventorys(entry: InventoryHost) -> dict[str, str]:
    """The host's `env`, as its ranks get it: a name alone stands for this process's value, if it has one."""
    known = {name: os.environ.get(name) if value is None else value for name, value in entry.access.env.items()}
    return {name: value for name, value in known.items() if value is not None}


def _shown(entry: InventoryHost, case: HostCase, vendor: str) -> tuple[Device, ...]:
    """The devices of a host that its Python for a vendor may see; none named: all that there are."""
    if not case.gpus or case.host is None or (entry.access.gpus is None and len(case.vendors) == 1):
        return ()
    return tuple(device for device in case.host.devices if device.vendor == vendor)


def _numbered(found: dict[str, Any], shown: Sequence[Device]) -> dict[str, Any]:
    """The answer with its devices numbered as the host counts them all."""
    if not shown:
        return found
    devices = [{**d, "index": device.index} for d, device in zip(found.get("devices", []), shown, strict=False)]
    return {**found, "devices": devices, "chosen": True}


# --- speed ---------------------------------------------------------------------------------------------------------


def _speed(
    key: str, expected: Callable[[DeviceClass], float], unit: Callable[[float], str]
) -> Callable[[HostCase], Verdict]:
    """A rule on one figure of every device of a host: against the median of its class, else the class's row."""

    def rule(case: HostCase) -> Verdict:
        mine = _devices(case.checked, case.name)
        if not mine:
            return _why_not(case)
        verdicts = []
        for name, device in mine:
            value = device.get(key)
            if not isinstance(value, (int, float)):
                verdicts.append(unknown(f"device {device.get('index')}: {device.get('problem') or 'no figure'}"))
                continue
            like = [
                d.get(key) for host in case.checked.performance for n, d in _devices(case.checked, host) if n == name
            ]
            row = _row(case.checked, name)
            reference, of = _reference(like, expected(row) if row and row.name != "cpu" else None)
            verdicts.append(_against(float(value), reference, of, f"device {device.get('index')}", unit))
        figures = [float(d[key]) for _, d in mine if isinstance(d.get(key), (int, float))]
        return worst(verdicts, otherwise=unit(statistics.median(figures)) if figures else "")

    return rule


def _against(value: float, reference: float | None, of: str, who: str, unit: Callable[[float], str]) -> Verdict:
    if reference is None:
        return ok(unit(value))
    says = f"{who}: {unit(value)}, {value / reference:.0%} of {of} ({unit(reference)})"
    return ok(says) if value >= GOOD * reference else warn(says) if value >= BEARABLE * reference else fail(says)


def _reference(known: Sequence[object], expected: float | None) -> tuple[float | None, str]:
    """What a device of a class should reach, and what says so: its peers where there are enough, else its row."""
    peers = [float(v) for v in known if isinstance(v, (int, float))]
    if len(peers) >= _PEERS:
        return statistics.median(peers), "the median of its kind"
    return expected, "what its model reaches" if expected is not None else ""


def _devices(checked: CheckedCluster, host: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(device class, what was measured) of a host's devices."""
    found = checked.performance.get(host, {}).get("devices")
    gpus = checked.facts[host].gpus if host in checked.facts else ()
    named = {i: _class(checked, gpu) for i, gpu in enumerate(gpus)} or {0: "cpu"}
    listed = found if isinstance(found, list) else []
    return [(named.get(d.get("index", i), "?"), d) for i, d in enumerate(listed) if isinstance(d, Mapping)]


def _class(checked: CheckedCluster, gpu: GpuFacts) -> str:
    return device_class(gpu, CLASSES.with_own(checked.cluster.classes)).name


def _row(checked: CheckedCluster, name: str) -> DeviceClass | None:
    """What is known of a class, or of a part of one; an estimate is no knowledge."""
    try:
        row = CLASSES.with_own(checked.cluster.classes)[name]
    except ConfigError:
        return None
    return None if row.estimate else row


def _why_not(case: HostCase) -> Verdict:
    if not pythons_of(case):
        return unknown("torch is not installed there")
    return unknown(str(case.checked.performance.get(case.name, {}).get("problem", "it was not tried")))


def allreduce(case: HostCase) -> Verdict:
    found = case.checked.performance.get(case.name, {})
    if max(Counter(gpu.vendor for gpu in case.gpus).values(), default=0) < 2:
        return ok("fewer than two GPUs of a vendor here")
    value = found.get("allreduce_bytes_per_s")
    if not isinstance(value, (int, float)):
        return unknown(str(found.get("problem", "it was not measured")))
    kinds = [_class(case.checked, g) for g in case.gpus]
    like = [
        measured.get("allreduce_bytes_per_s")
        for host, measured in case.checked.performance.items()
        if host in case.checked.facts and [_class(case.checked, g) for g in case.checked.facts[host].gpus] == kinds
    ]
    row = _row(case.checked, kinds[0])
    reference, of = _reference(like, row.native_bytes_per_s * 0.5 if row else None)
    return _against(float(value), reference, of, "64 MiB", show_rate)


# --- numerics ------------------------------------------------------------------------------------------------------


def numerics(checked: CheckedCluster) -> Iterator[Verdict]:
    """Every device against fp64, then every two kinds of device against each other."""
    samples: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(dict)
    for host in checked.performance:
        verdicts = []
        for name, device in _devices(checked, host):
            rows = device.get("numerics")
            if not isinstance(rows, list):
                verdicts.append(unknown(f"device {device.get('index')}: {device.get('problem') or 'not measured'}"))
                continue
            verdicts += [judge_row(row, f"device {device.get('index')}") for row in rows]
            for row in rows:
                samples[row["operation"], row["dtype"]].setdefault(name, row.get("sample", []))
        if not verdicts:
            verdicts = [unknown(str(checked.performance[host].get("problem", "it was not measured")))]
        yield replace(worst(verdicts, otherwise="every operation within its dtype's rounding"), about=host)
    yield from _between(samples)


def judge_row(row: Mapping[str, Any], who: str) -> Verdict:
    """One operation in one dtype: no figure above its limit, forward and backward."""
    limits, what = LIMITS[str(row["dtype"])], f"{who}: {row['operation']} in {row['dtype']}"
    for way in ("forward", "backward"):
        found = row[way]
        if any(found[key] is None for key in limits):
            return fail(f"{what}, {way}: not finite")
        over = [key for key, most in limits.items() if abs(found[key]) > most]
        if over:
            key = "scale_eps" if "scale_eps" in over else over[0]
            word = {"scale_eps": "a common factor is off by", "max_eps": "an element is off by"}.get(key, "off by")
            return fail(f"{what}, {way}: {word} {abs(found[key]):.2g} eps (at most {limits[key]:g})")
        if found["cosine"] < LEAST_COSINE[str(row["dtype"])]:
            return fail(f"{what}, {way}: cosine {found['cosine']:.6f}")
    return ok("within rounding")


_EPSILON = {"bfloat16": 2.0**-7, "float32": 2.0**-23}


def _between(samples: Mapping[tuple[str, str], Mapping[str, Sequence[float]]]) -> Iterator[Verdict]:
    """Kinds of device against each other: no further apart than each may be from the truth."""
    apart: dict[tuple[str, str], list[str]] = defaultdict(list)
    pairs: set[tuple[str, str]] = set()
    for (name, dtype), by_kind in samples.items():
        for a, b in combinations(sorted(by_kind), 2):
            pairs.add((a, b))
            x, y = by_kind[a], by_kind[b]
            size = (sum(v * v for v in y) / max(len(y), 1)) ** 0.5 or 1.0
            off = max((abs(p - q) for p, q in zip(x, y, strict=False)), default=0.0) / size / _EPSILON[dtype]
            if off > 2 * LIMITS[dtype]["max_eps"]:
                apart[a, b].append(f"{name} in {dtype} by {off:.2g} eps")
    for a, b in sorted(pairs):
        differ, about = "; ".join(apart[a, b]), f"{a} - {b}"
        yield fail(f"differ: {differ}", about=about) if differ else ok("agree within rounding", about=about)


_SLOW = (
    "nvidia-smi -q -d CLOCK,PERFORMANCE || amd-smi metric -c -p -t  # on {host}: clocks, power cap, heat, neighbours"
)
CHECKS = (
    Check(
        "perf.gemm",
        "an 8192x8192 bf16 product",
        "Primus",
        _SLOW,
        level="perf",
        rule=_speed("gemm_flops", lambda row: row.sustained_tflops * 1e12, lambda v: f"{v / 1e12:.3g} TFLOP/s"),
    ),
    Check(
        "perf.hbm",
        "a copy of 512 MiB within the device",
        "Primus",
        _SLOW,
        level="perf",
        rule=_speed("memory_bytes_per_s", lambda row: row.memory_bytes_per_s * 0.75, show_rate),
    ),
    Check(
        "perf.allreduce",
        "a native all-reduce of 64 MiB inside each host",
        "Primus; nccl-tests",
        "nvidia-smi topo -m || amd-smi topology  # on {host}; NCCL_DEBUG=INFO shows which links it took",
        level="perf",
        rule=allreduce,
    ),
    Check(
        "perf.numerics",
        "six operations forward and backward in bf16 and fp32 against fp64, then device classes with each other",
        "hetctl: nobody else gates a mixed cluster on it",
        "python -m torch.utils.collect_env  # on {host}: another torch build or driver, then try again",
        level="perf",
        survey=numerics,
    ),
)
