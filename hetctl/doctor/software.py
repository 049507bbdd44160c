"""Python, torch and drivers: there, fit for the device, and alike where they must be."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from hetctl.comm.contract.facts import HostFacts, Interpreter
from hetctl.comm.contract.natives import NATIVES
from hetctl.comm.contract.units import listed
from hetctl.doctor.check import Check, CheckedCluster, HostCase, worker_python
from hetctl.doctor.ssh import ENTERED
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, usual, warn

ENVIRONMENT = "~/hetctl-env"  # as `hetctl setup` calls it where no path is told
WHEELS = "https://download.pytorch.org/whl"
LEAST_TORCH, LEAST_PYTHON = (2, 11), (3, 11)


@dataclass(frozen=True)
class Drift:
    """One thing in which hosts of a vendor group may differ: value -> hosts."""

    group: str
    what: str
    values: Mapping[str, tuple[str, ...]]


def interpreter(case: HostCase) -> Verdict:
    report = case.report
    name_it = f"hosts: {{{report.name}: {{python: /path/to/python3}}}}  # in inventory.yaml"
    if report.status in ENTERED:
        return fail(f"{report.status}: {report.reason}", name_it)
    if not report.ok:
        return unknown("the host was not reached")
    python = worker_python(case.facts)
    if python is None:
        return unknown("no Python described itself")
    if python.problem:
        return fail(f"{python.path}: {python.problem}", name_it)
    version = numbers(python.version)
    if version is None:
        return unknown(f"{python.path} tells no version")
    if version < LEAST_PYTHON:
        return fail(f"Python {python.version}, 3.11 is needed", name_it)
    return ok(f"{python.version}")


def build(case: HostCase) -> Verdict:
    """Is torch there, built for the devices that are there, and new enough? Of several vendors each has its own."""
    verdicts = {vendor: build_for(vendor, worker_python(case.facts, vendor)) for vendor in case.vendors}
    if len(verdicts) == 1:
        return next(iter(verdicts.values()))
    each = "; ".join(f"{vendor}: {verdict.reason}" for vendor, verdict in verdicts.items())
    lacking = [vendor for vendor, verdict in verdicts.items() if verdict.state != "ok"]
    return fail(f"{each} (no torch serves both)", _environments(case, lacking)) if lacking else ok(each)


def build_for(vendor: str, python: Interpreter | None) -> Verdict:
    """Is this Python's torch one for a vendor's devices?"""
    if python is None or python.problem:
        return unknown(f"there is no usable Python{f' ({python.path}: {python.problem})' if python else ''}")
    where = python.executable or python.path
    install = f"{torch_line(vendor, where)}  # on {{host}}"
    if python.torch is None:
        return fail(f"torch is not installed in {where}", install)
    version = numbers(python.torch)
    if version is not None and version < LEAST_TORCH:
        return fail(f"torch {python.torch} is older than 2.11", install)
    built = {"nccl": python.cuda, "rccl": python.hip}
    if built.get(NATIVES[vendor].library, "") is None:
        return fail(f"torch {python.torch} in {where} is not built for its GPUs", install)
    return ok(f"torch {python.torch} in {where}")


def _environments(case: HostCase, lacking: Collection[str]) -> str:
    """What makes an environment for each vendor of a host that lacks its own, and the inventory's line for all."""
    lines, named = [], []
    for vendor in case.vendors:
        path, makes = _environment(vendor, worker_python(case.facts, vendor), lacking=vendor in lacking)
        lines += makes
        named.append(f"{vendor}: {path}")
    why = f"on {{host}}, as `hetctl setup {{host}}` does; then in inventory.yaml {case.name}: "
    return f"{' && '.join(lines)}  # {why}{{python: {{{', '.join(named)}}}}}"


def _environment(vendor: str, python: Interpreter | None, *, lacking: bool) -> tuple[str, list[str]]:
    """The path of a vendor's own Python, and what makes whatever of it is lacking."""
    if python is not None and not lacking:
        return python.path, []
    named = python if python is not None and vendor in python.vendors else None
    path = named.path if named else f"{ENVIRONMENT}-{vendor}/bin/python"
    folder = path.rpartition("/bin/")[0]
    makes = [f"python3 -m venv {folder}"] if folder and (named is None or named.problem) else []
    return path, [*makes, torch_line(vendor, path), f"{path} -m pip install numpy"]


def torch_line(vendor: str, python: str, *, wheels: str = WHEELS, quiet: bool = False) -> str:
    """What installs torch for a vendor, from its index there if it has one."""
    if not NATIVES[vendor].wheels:
        return f"{python} -m pip install WHEEL"  # as the vendor builds it
    index = f"{wheels.rstrip('/')}/{NATIVES[vendor].wheels}"
    return f"{python} -m pip install {'-q ' * quiet}'torch>=2.11' --index-url {index}"


def match(checked: CheckedCluster) -> Iterator[Verdict]:
    """Inside a vendor group torch must agree; across the bridge another minor works and is worth a word."""
    minors: dict[str, str] = {}
    for group, hosts in checked.groups.items():
        found = _by_value(hosts, lambda facts: _torch(facts, minor=True))
        label = group or "hosts without GPUs"
        if len(found) > 1:
            each = [(value, host) for value, names in found.items() for host in names]
            most = usual(value for value, _ in each)
            for value, host in (one for one in each if one[0] != most):
                says = f"torch {value} where its group ({label}) has {most}: one native group needs one version"
                yield (fail if group else warn)(says, about=host, version=most)
        elif not found:
            yield unknown("no version of torch is known", about=label)
        else:
            minors[label] = next(iter(found))
            drifting = [d.what for d in drift(checked) if d.group == label and len(d.values) > 1]
            if drifting:
                says = f"differs inside the group: {listed(drifting)}"
                yield warn(says, "hetctl doctor -v  # shows who has what", about=label)
            else:
                yield ok(f"torch {minors[label]} everywhere", about=label)
    if len(set(minors.values())) > 1:
        known = ", ".join(f"{label}: {minor}" for label, minor in minors.items())
        yield warn(f"torch differs across the bridge ({known}): works, but pin one", about=" - ".join(minors))


def drift(checked: CheckedCluster) -> list[Drift]:
    """What hosts of each vendor group have, feature by feature; unknown values are left out."""
    return [
        Drift(group or "hosts without GPUs", what, values)
        for group, hosts in checked.groups.items()
        for what, feature in _FEATURES.items()
        if (values := _by_value(hosts, feature))
    ]


def _by_value(hosts: Mapping[str, HostFacts], feature: Callable[[HostFacts], str | None]) -> dict[str, tuple[str, ...]]:
    values: dict[str, list[str]] = defaultdict(list)
    for host, facts in hosts.items():
        if value := feature(facts):
            values[value].append(host)
    return {value: tuple(names) for value, names in values.items()}


def _torch(facts: HostFacts, *, minor: bool = False) -> str | None:
    python = worker_python(facts)
    version = numbers(python.torch) if python else None
    if python is None or version is None:
        return None
    return ".".join(map(str, version)) if minor else python.torch


def _of_python(name: str) -> Callable[[HostFacts], str | None]:
    def value(facts: HostFacts) -> str | None:
        python = worker_python(facts)
        found = getattr(python, name) if python else None
        return str(found) if found else None

    return value


def _set(values: Iterator[str | None]) -> str | None:
    return ", ".join(sorted({v for v in values if v})) or None


_FEATURES: dict[str, Callable[[HostFacts], str | None]] = {
    "torch": _torch,
    "CUDA of torch": _of_python("cuda"),
    "HIP of torch": _of_python("hip"),
    "NCCL": _of_python("nccl"),
    "RCCL": _of_python("rccl"),
    "Python": _of_python("version"),
    "hetctl": lambda f: f.interpreters[0].packages.get("hetctl") if f.interpreters else None,
    "GPU driver": lambda f: _set(g.driver for g in f.gpus),
    "GPU firmware": lambda f: _set(g.firmware for g in f.gpus),
    "NIC firmware": lambda f: _set(f"{n.pci_id} {n.firmware}" for n in f.nics if n.rdma_device and n.firmware),
    "kernel": lambda f: f.system.kernel,
}


def numbers(version: str | None) -> tuple[int, int] | None:
    """(2, 11) of 2.11.0+cu128."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})", version or "")
    return (int(found[1]), int(found[2])) if found else None


CHECKS = (
    Check(
        "sw.interpreter",
        "the configured Python of each host",
        "hetctl needs nothing else on a host",
        rule=interpreter,
        of_silent=True,
        essential=True,
    ),
    Check("sw.build", "torch/version.py, nothing imported", "DeepSpeed#1481; rccl#2189", rule=build, essential=True),
    Check(
        "sw.match",
        "package metadata of every host, inside vendor groups",
        "Primus drift; rccl#1220",
        "python -m pip install torch=={version}.*  # on {host}, from its vendor's index",
        survey=match,
    ),
)
