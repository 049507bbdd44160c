"""Virtual environments that ranks run in: what is typed on which host for the GPUs that it has, and what came of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetctl.comm.contract.errors import Unreachable
from hetctl.comm.contract.natives import HOST, NATIVES
from hetctl.discovery.execute import HostOutput, folded
from hetctl.discovery.fabric import Report
from hetctl.doctor.check import worker_python
from hetctl.doctor.software import LEAST_PYTHON, WHEELS, numbers, torch_line

BESIDE = ("numpy", "safetensors", "tokenizers")
_SAY = "import sys, torch; print('torch', torch.__version__, 'in', sys.executable)"
_SAID = re.compile(r"^torch (\S+) in (/.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Setup:
    """What is typed on one host, line after line, for which vendors (none: it was not reached); or why nothing is."""

    name: str
    vendors: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    problem: str = ""

    @property
    def shown(self) -> str:
        """For people; '' where nothing is typed."""
        return "\n  ".join([f"({', '.join(self.vendors)}):", *self.lines]) if self.lines else ""


def setups(reports: Sequence[Report], *, path: str, wheels: str = WHEELS) -> list[Setup]:
    """One for each host, in their order; where they have several vendors' GPUs among them each path names its vendor.

    The Python that was asked makes the environments.
    """
    by_host = {report.name: _vendors(report) for report in reports}
    several = len({vendor for vendors in by_host.values() for vendor in vendors}) > 1
    return [_setup(report, by_host[report.name], path, wheels, several=several) for report in reports]


def exit_code_of_setups(planned: Iterable[Setup]) -> int:
    """4 where a host was not reached, 1 where nothing can be typed on one."""
    return max((Unreachable.exit_code if not one.vendors else int(bool(one.problem)) for one in planned), default=0)


def _vendors(report: Report) -> tuple[str, ...]:
    """Whose GPUs a host has; without any its CPUs compute."""
    if report.facts is None:
        return ()
    return tuple(dict.fromkeys(g.vendor for g in report.facts.gpus if g.vendor in NATIVES)) or (HOST,)


def _setup(report: Report, vendors: tuple[str, ...], path: str, wheels: str, *, several: bool) -> Setup:
    if problem := _why_not(report, vendors):
        return Setup(report.name, vendors, problem=problem)
    folders = [f"{path}-{vendor}" if several else path for vendor in vendors]
    python = report.access.python
    lines = [line for v, f in zip(vendors, folders, strict=True) for line in _lines(v, _quoted(f), python, wheels)]
    return Setup(report.name, vendors, tuple(lines))


def _why_not(report: Report, vendors: tuple[str, ...]) -> str:
    """Why nothing can be typed on a host; '' where something can."""
    if report.facts is None:
        return f"{report.status}: {report.reason}" + (f" ({report.hint})" if report.hint else "")
    python = worker_python(report.facts)
    version = numbers(python.version) if python else None
    if version is not None and version < LEAST_PYTHON:
        return f"its {report.access.python} is {'.'.join(map(str, version))}, 3.11 is needed: --python names another"
    foreign = [vendor for vendor in vendors if not NATIVES[vendor].wheels]
    return f"pytorch.org has no torch for {' and '.join(foreign)}: install what the vendor builds" if foreign else ""


def _lines(vendor: str, folder: str, python: str, wheels: str) -> list[str]:
    own = f"{folder}/bin/python"
    return [
        f"mkdir -p {folder} && exec 9>{folder}/.lock && flock 9",  # hosts that share it take turns
        f"{_quoted(python)} -m venv {folder}",
        torch_line(vendor, own, wheels=wheels, quiet=True),
        f"{own} -m pip install -q {' '.join(BESIDE)}",
        f'{own} -c "{_SAY}"',
    ]


def _quoted(path: str) -> str:
    """For a shell, whose word `~` is."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def inventory_lines(planned: Sequence[Setup], outputs: Sequence[HostOutput]) -> list[str]:
    """What to write into inventory.yaml: the Python of each host where all went well, of several each vendor's."""
    vendors = {one.name: one.vendors for one in planned}
    lines = [
        f"  {names}: {{python: {said}}}" for names, _, said in folded(outputs, lambda o: _named(o, vendors[o.name]))
    ]
    return ["hosts:", *lines] if lines else []


def _named(output: HostOutput, vendors: Sequence[str]) -> str:
    """The interpreters that setup made on a host, as the inventory names them; '' where something failed."""
    paths = [path for _, path in _SAID.findall(output.output)] if output.exit_code == 0 else []
    each = [f"{vendor}: {path}" for vendor, path in zip(vendors, paths, strict=False)]
    return f"{{{', '.join(each)}}}" if len(each) > 1 else "".join(paths)
