"""From hosts to agents that wait for their orders, all at once, or one error that names every bad host."""

from __future__ import annotations

import base64
import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError, HetctlError, Unreachable
from hetctl.comm.contract.files import write_atomically
from hetctl.comm.contract.units import count_of
from hetctl.launcher.agent import bootstrap
from hetctl.launcher.hosts.bundle import CARRIED_FOLDER, ENTRY_POINT, METADATA, NEEDED, Bundle, missing_packages
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.dialogue import Dialogue, converse
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.hosts.open_files import allow_open_files
from hetctl.launcher.hosts.shell import Session, Shell, ShellError
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.agent_link import AgentGone, AgentLink
from hetctl.launcher.supervisor.heartbeat import Heartbeat

STARTING_S = 120.0

OpenShell = Callable[[Deadline], Shell]


@dataclass(frozen=True)
class TargetHost:
    """A host that a run wants: how its shell is opened, and where its ranks talk."""

    name: str
    access: Access
    open: OpenShell
    data_address: str
    interface: str | None = None
    pythons: Mapping[str, str] = field(default_factory=dict)  # vendor -> what its ranks are started with, as configured


@dataclass(frozen=True)
class AgentRequest:
    """What every host is asked before anything starts: is it all there, what has it, what must it take in?"""

    folder: RunFolder  # the launcher's, taken where every host sees the run's identity in it
    lease_s: float
    code: Bundle
    program: Bundle | None
    paths: tuple[str, ...]  # what must be readable there
    moved: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # host -> where data that were sent lie

    @property
    def bundles(self) -> list[Bundle]:
        return [self.code, *([self.program] if self.program else [])]


@dataclass(frozen=True)
class Site:
    """One host as a run finds it: its interpreters, its code, its view of the run folder, where its ranks talk."""

    name: str
    python: str  # the agent's, and that of ranks of which `pythons` has none
    code_path: str  # PYTHONPATH that finds hetctl and its entry point
    folder: RunFolder  # the run's files as this host sees them
    shared: bool  # whether that is the launcher's own folder
    cores: int
    data_address: str
    interface: str | None  # that holds the data address; None: unknown
    program: str | None = None  # where a shipped program folder is
    checkpoints: tuple[str, ...] = ()  # names of the whole checkpoints it holds
    moved: Mapping[str, str] = field(default_factory=dict)  # data: path where the run was started -> path here
    pythons: Mapping[str, str] = field(default_factory=dict)  # vendor -> that of its ranks

    @property
    def bundles(self) -> tuple[str, ...]:
        """The names of the folders that its ranks run from, as they were unpacked there."""
        folders = (self.code_path.partition(os.pathsep)[0], self.program or "")
        return tuple(os.path.basename(folder) for folder in folders if folder)


StartedAgent = tuple[Site, AgentLink]


@dataclass
class Agents:
    """Agents that wait, one per site."""

    sites: tuple[Site, ...]
    links: tuple[AgentLink, ...]
    heartbeat: Heartbeat
    on_close: Callable[[], None] = lambda: None  # what else was opened for it

    @property
    def spread(self) -> bool:
        """Whether the hosts share no run folder, so that each keeps its own files: all of them then, or none."""
        return not all(site.shared for site in self.sites)

    def site(self, host: str) -> Site:
        return next(s for s in self.sites if s.name == host)

    def close(self, *, wait_s: float = 10.0) -> None:
        """Hang up everywhere; agents end their ranks and then themselves."""
        self.heartbeat.end()
        for link in self.links:
            link.close(wait_s=wait_s if link.finished else 1.0)
        self.on_close()


def start_agent_here(name: str, folder: RunFolder, code: Path) -> Agents:
    """This machine's agent, for ranks that talk among themselves: no SSH, no shipping; `code` holds the package."""
    python, cores = sys.executable, len(os.sched_getaffinity(0))
    site = Site(name, python, _code_path(code, folder.launch / "site"), folder, True, cores, "127.0.0.1", "lo")
    shell = LocalShell()
    session = shell.start([python, "-I", "-c", bootstrap.BOOT, str(code)], deadline=Deadline(STARTING_S))
    agents = Agents((site,), (AgentLink(name, session, [shell]),), Heartbeat())
    agents.heartbeat.add(agents.links[0])
    return agents


def _code_path(root: Path, site: Path) -> str:
    """A PYTHONPATH that finds this very hetctl, and makes torch find its back end also where it is not installed.

    Torch loads the entry points of `torch.backends` from package metadata, so `site` holds a few lines of it.
    """
    metadata = site / "hetctl_entry-0.dist-info"
    write_atomically(metadata / "METADATA", METADATA)
    write_atomically(metadata / "entry_points.txt", ENTRY_POINT)
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(root), str(site), *([inherited] if inherited else [])])


def start_agents(
    targets: Sequence[TargetHost], orders: AgentRequest, *, on_refusal: Callable[[str, HetctlError], None]
) -> Agents:
    """Agents on all hosts. Raises one Unreachable or ConfigError naming every host that cannot take part.

    `on_refusal` hears of each one at once; the error waits until all have answered.
    """
    allow_open_files(len(targets))
    found: dict[str, StartedAgent] = {}
    errors: dict[str, HetctlError] = {}
    heartbeat = Heartbeat()

    start = lambda target, deadline: _start_one(target, orders, deadline)  # noqa: E731
    try:
        for outcome in fan_out(targets, start, deadline_s=STARTING_S):
            if outcome.value is not None:
                found[outcome.item.name] = outcome.value
                heartbeat.add(outcome.value[1])
            elif outcome.error is not None:
                errors[outcome.item.name] = outcome.error
                on_refusal(outcome.item.name, outcome.error)
    except BaseException:
        _agents(targets, found, heartbeat).close(wait_s=0.0)
        raise
    agents = _agents(targets, found, heartbeat)
    if errors:
        agents.close(wait_s=0.0)
        raise refusal(errors, len(targets))
    if all(site.shared and site.moved == agents.sites[0].moved for site in agents.sites):  # one job file serves all
        agents.sites = tuple(replace(site, folder=orders.folder) for site in agents.sites)
    else:  # one of them needs files of its own: so do all, because nobody commits a checkpoint for others then
        agents.sites = tuple(replace(site, shared=False) for site in agents.sites)
    return agents


def refusal(errors: Mapping[str, HetctlError], count: int) -> HetctlError:
    """One error for all hosts that cannot take part: unreachable ones decide the exit code."""
    lines = [
        f"\n  {name}: {error.message}" + (f" ({error.hint})" if error.hint else "") for name, error in errors.items()
    ]
    kind = Unreachable if any(isinstance(e, Unreachable) for e in errors.values()) else ConfigError
    error = kind(
        f"{len(errors)} of {count_of(count, 'host')} cannot take part, so nothing was started:{''.join(lines)}"
    )
    error.hosts = dict(errors)  # for --allow-missing
    return error


def _agents(targets: Iterable[TargetHost], found: Mapping[str, StartedAgent], heartbeat: Heartbeat) -> Agents:
    rows = [found[b.name] for b in targets if b.name in found]
    return Agents(tuple(site for site, _ in rows), tuple(link for _, link in rows), heartbeat)


def _start_one(target: TargetHost, orders: AgentRequest, deadline: Deadline) -> StartedAgent:
    shell = target.open(deadline)
    try:
        others = {vendor: _told(target, orders, shell, path, deadline) for vendor, path in target.pythons.items()}
        dialogue = begin_dialogue(target, shell, {"do": "enter", **_request(orders, target.name)}, deadline)
        about = expect(dialogue, "host", deadline)
        site, needs = _judge(target, orders, about, others)
        for bundle in needs:
            deadline.phase = "shipping hetctl's code"
            packed = base64.b64encode(bundle.packed).decode()
            dialogue.send({"do": "bundle", "digest": bundle.digest, "zip": packed}, deadline=deadline)
            expect(dialogue, "unpacked", deadline)
        deadline.phase = "starting the agent"
        dialogue.send({"do": "become", "digest": orders.code.digest}, deadline=deadline)
        hello = expect(dialogue, "hello", deadline)
    except BaseException:
        shell.close()
        raise
    session, first = dialogue.release()
    shells = [shell]

    def reopen(deadline: Deadline) -> tuple[Session, bytes]:
        return _reopen(target, str(hello["socket"]), shells, deadline)

    return site, AgentLink(target.name, session, shells, first=first, reopen=reopen, lease_s=orders.lease_s)


def _reopen(target: TargetHost, socket: str, shells: list[Shell], deadline: Deadline) -> tuple[Session, bytes]:
    """A new connection to a host, joined with the agent's socket there."""
    shell = target.open(deadline)
    shells.append(shell)
    dialogue = begin_dialogue(target, shell, {"do": "attach", "socket": socket}, deadline)
    answer = dialogue.receive(deadline=deadline)
    if answer.get("event") != "attached":
        raise AgentGone(f"its agent is gone: {str(answer.get('reason'))[:200]}")
    return dialogue.release()


def begin_dialogue(
    target: TargetHost, shell: Shell, request: Mapping[str, Any], deadline: Deadline, *, python: str | None = None
) -> Dialogue:
    """The travelling program on a host, by its own Python if no other is meant."""
    source = inspect.getsource(bootstrap)
    python = python or interpreter(target.access)
    return converse(shell, python, source, request, deadline=deadline, prefix=target.access.prefix)


def _told(target: TargetHost, orders: AgentRequest, shell: Shell, python: str, deadline: Deadline) -> dict[str, Any]:
    """What a host has, as another of its Pythons finds it. Raises HetctlError."""
    deadline.phase = f"starting {python}"
    request = {"do": "tell", **_request(orders, target.name)}
    try:
        with contextlib.closing(begin_dialogue(target, shell, request, deadline, python=python)) as dialogue:
            return expect(dialogue, "host", deadline)
    except ShellError as error:
        raise ShellError(error.problem, f"{python}: {error.message}", hint=error.hint) from None


def interpreter(access: Access) -> str:
    """The Python of a host; on this machine, unless another is named, the one that runs hetctl."""
    return sys.executable if access.local and access.python == Access().python else access.python


def ask(target: TargetHost, request: Mapping[str, Any], answer: str, deadline: Deadline) -> dict[str, Any]:
    """One question to a host by the travelling program. Raises HetctlError."""
    shell = target.open(deadline)
    try:
        return expect(begin_dialogue(target, shell, request, deadline), answer, deadline)
    finally:
        with contextlib.suppress(OSError):
            shell.close()


def stream(target: TargetHost, request: Mapping[str, Any], deadline: Deadline) -> Iterator[bytes]:
    """What the travelling program prints on a host, as it comes. Raises HetctlError unless it ends well."""
    shell = target.open(deadline)
    try:
        session, first = begin_dialogue(target, shell, request, deadline).release()
        yield first
        while not session.ended:
            piece = session.read(1.0)
            if piece is not None and piece.stream == "out":
                yield piece.data
        if session.exit_code != 0:
            raise Unreachable(f"{target.name} broke off before all of it was here")
    finally:
        with contextlib.suppress(OSError):
            shell.close()


def of_run(folder: RunFolder, host: str) -> dict[str, Any]:
    """What tells a host which run is meant, and as whom it takes part."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "_"
    return {"run": folder.identity, "host": name}


def _request(orders: AgentRequest, host: str) -> dict[str, Any]:
    token = orders.folder.launch / "identity"
    return {
        **of_run(orders.folder, host),
        "packages": NEEDED,
        "digests": [b.digest for b in orders.bundles],
        "token": {"path": str(token), "text": token.read_text(encoding="utf-8")},
        "paths": orders.paths,
    }


def expect(dialogue: Dialogue, event: str, deadline: Deadline) -> dict[str, Any]:
    """Its next answer, of the kind that is due. Raises HetctlError with what it says instead."""
    answer = dialogue.receive(deadline=deadline)
    if answer.get("event") == "failed":
        raise Unreachable(str(answer.get("reason"))[:300])
    if answer.get("event") != event:
        raise Unreachable(f"it answered {str(answer)[:100]} where '{event}' was due")
    return answer


def _judge(
    target: TargetHost, orders: AgentRequest, about: dict[str, Any], others: Mapping[str, dict[str, Any]]
) -> tuple[Site, list[Bundle]]:
    """The site that a host's answers describe (`others`: of its vendors' own Pythons) and the bundles it lacks.

    Raises ConfigError for what is missing.
    """
    answers = {str(one["executable"]): one for one in (about, *others.values())}
    for one in answers.values():
        if not one["supported"]:
            raise ConfigError(
                f"its Python is {one['python']}; ranks need 3.11 or newer", hint="set `python` in the inventory"
            )
    found = {p: missing_packages(a["packages"], orders.code, str(a["machine"])) for p, a in answers.items()}
    lacking = [path for path, there in about["paths"].items() if not there]
    problems = [f"its Python ({p}) has no {', '.join(missing)}" for p, (missing, _) in found.items() if missing]
    problems += [f"it cannot read {', '.join(lacking)}"] if lacking else []
    if problems:
        here = any(map(os.path.exists, lacking))
        hint = "--set data.ship=true sends data and tokenizers that are here" if here else ""
        raise ConfigError("; ".join(problems), hint=hint)
    code, carried = about["code"] + orders.code.digest, any(carried for _, carried in found.values())
    site = Site(
        name=target.name,
        python=str(about["executable"]),
        code_path=os.pathsep.join([code, *([os.path.join(code, CARRIED_FOLDER)] if carried else [])]),
        folder=RunFolder(Path(about["folder"])),
        shared=bool(about["shared"]),
        cores=int(about["cores"]),
        data_address=target.data_address,
        interface=target.interface,
        program=about["code"] + orders.program.digest if orders.program else None,
        checkpoints=tuple(about["checkpoints"]),
        moved=orders.moved.get(target.name, {}),
        pythons={vendor: str(one["executable"]) for vendor, one in others.items()},
    )
    return site, [b for b in orders.bundles if b.digest not in about["have"]]
