"""Ray: which nodes a cluster has, a placement group that holds their GPUs, actors on them as a way to run commands.

Nodes need nothing of hetctl: the actor's code travels by value. `ray` itself is imported where a cluster is entered.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetctl.comm.contract.errors import ConfigError, HetctlError, Unreachable
from hetctl.comm.contract.units import count_of
from hetctl.launcher.engines.engine import Engine, Place
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.local import LocalSession, LocalShell
from hetctl.launcher.hosts.shell import OutputPiece, ShellError, Stream, timed_out

GIVEN_S = 120.0  # how long nodes are waited for that others hold
KNOCK_S = 10.0
_WINDOW = 32  # writes on their way
_WAIT_S = 2.0  # that an actor waits for output before it says that there is none
_AT_ONCE = 1 << 20  # bytes of output that travel together, about
_PARTING_S = 2.0
_THREADS = ("in", "out", "end")  # of an actor: one for each direction, which keeps the order, and one to end it
_NO_DEVICES = ("memory", "object_store_memory", "node:", "accelerator_type:")
_connecting = threading.Lock()

Said = tuple[list[tuple[Stream, bytes]], bool, int | None]  # output, whether it is over, its exit code


@dataclass(frozen=True)
class Node:
    """A live node: under which name, where, and what of it a run holds."""

    name: str
    identity: str
    address: str
    bundle: Mapping[str, float] = field(default_factory=dict)  # empty: it has nothing to compute on


def nodes() -> dict[str, Node]:
    """The live nodes by name: the one given to `ray start`, else the host's; its address where two share one.

    Raises ConfigError without ray, Unreachable without a cluster.
    """
    live = [node for node in _connected().nodes() if node["Alive"]]
    names = [_name(node) for node in live]
    count = Counter(names)
    found = [
        Node(name if count[name] == 1 else n["NodeManagerAddress"], n["NodeID"], n["NodeManagerAddress"], _bundle(n))
        for name, n in zip(names, live, strict=True)
    ]
    return {node.name: node for node in sorted(found, key=lambda node: node.name)}


def _name(node: Mapping[str, Any]) -> str:
    given, address = node.get("NodeName"), node["NodeManagerAddress"]
    return str(given if given and given != address else str(node["NodeManagerHostname"]).split(".")[0])


def _bundle(node: Mapping[str, Any]) -> dict[str, float]:
    """What computes is held whole: GPUs and custom resources with a core for the agent, or all cores where it has none.

    Its own resource pins the bundle to the node.
    """
    has = {name: count for name, count in node["Resources"].items() if not name.startswith(_NO_DEVICES)}
    cores = has.pop("CPU", 0.0)
    held = {**has, "CPU": min(cores, 1.0) if has else cores}
    held = {name: count for name, count in held.items() if count}
    return {**held, f"node:{node['NodeManagerAddress']}": 0.001} if held else {}


def _connected() -> Any:
    """The module `ray`, in a cluster. Raises HetctlError."""
    with _connecting:
        try:
            import ray
        except ImportError:
            hint = "pip install 'hetctl[ray]', or ray in the cluster's version"
            raise ConfigError("Ray's clusters are entered by the package ray, which is not here", hint=hint) from None
        if not ray.is_initialized():
            _connect(ray)
        return ray


def _connect(ray: Any) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _knock(os.environ.get("RAY_ADDRESS", ""))
        ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError, and what its versions add
        hint = "run it on a node of the cluster (`ray status` answers there), as a Ray job, or set RAY_ADDRESS"
        raise Unreachable(f"no Ray cluster was entered: {' '.join(str(error).split())[:300]}", hint=hint) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    import hetctl

    ray.cloudpickle.register_pickle_by_value(hetctl)


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: `ray.init` would go on trying for many minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


class Ray(Engine):
    """The cluster that this process can enter. What `check` takes is held until `close`."""

    def __init__(self) -> None:
        self._ray = _connected()
        self._group: Any = None
        self._bundles: dict[str, int] = {}

    def check(self, places: Sequence[Place], run: str | None, say: Callable[[str], None]) -> None:
        """Hold the nodes' devices for a run. Raises Unreachable that says which cannot be had, and why."""
        if run is None:
            return  # who only looks takes nothing
        held, hosts = nodes(), [place.name for place in places]
        _refuse({h: "Ray has no live node of that name" for h in hosts if h not in held}, list(held))
        _refuse({h: "it has nothing to compute on (no CPU, no GPU)" for h in hosts if not held[h].bundle}, [])
        bundles = {h: dict(held[h].bundle) for h in hosts}
        self._group = self._ray.util.placement_group(
            list(bundles.values()), strategy="STRICT_SPREAD", name=f"hetctl {run}"
        )
        try:
            if not self._group.wait(3):
                say(f"waiting for Ray to give {count_of(len(hosts), 'node')}, for at most {GIVEN_S:g} s")
                self._await(held, bundles)
        except BaseException:
            self.close()
            raise
        self._bundles = {host: number for number, host in enumerate(hosts)}

    def _await(self, held: Mapping[str, Node], bundles: Mapping[str, Mapping[str, float]]) -> None:
        until = time.monotonic() + GIVEN_S
        while not self._group.wait(1):  # a second at a time, so that Ctrl-C is heard
            if time.monotonic() > until:
                from ray._private.state import available_resources_per_node  # of one node nothing public tells

                free = available_resources_per_node()
                lacks = {h: _lacking(b, free.get(held[h].identity, {})) for h, b in bundles.items()}
                _refuse({h: why for h, why in lacks.items() if why}, [])
                raise Unreachable(f"Ray gave no placement group within {GIVEN_S:g} s", hint="see `ray status`")

    def open(self, place: Place, deadline: Deadline) -> RayShell:
        """Commands on a node, each in an actor of its own. Raises ShellError when it is gone."""
        deadline.phase = f"starting an actor on {place.name}"
        try:
            node = nodes().get(place.name)
        except HetctlError as error:
            raise ShellError("connection-lost", error.message, hint=error.hint) from None
        if node is None:
            raise ShellError("no-route", f"Ray has no live node {place.name}", hint="`ray list nodes` shows its nodes")
        from ray.util import scheduling_strategies as ways

        if place.name in self._bundles:
            number = self._bundles[place.name]
            where = ways.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            return RayShell(self._ray, where)
        return RayShell(self._ray, ways.NodeAffinitySchedulingStrategy(node.identity, soft=False))

    def close(self) -> None:
        """Give back what was held."""
        if self._group is not None:
            with contextlib.suppress(Exception):  # a cluster that is gone holds nothing
                self._ray.util.remove_placement_group(self._group)


def _lacking(bundle: Mapping[str, float], free: Mapping[str, float]) -> str:
    short = {name: free.get(name, 0.0) for name, count in bundle.items() if free.get(name, 0.0) < count}
    return ", ".join(f"{short[name]:g} of its {bundle[name]:g} {name} are free" for name in short)


def _refuse(problems: Mapping[str, str], held: Sequence[str]) -> None:
    """Raises Unreachable for all hosts that have a problem."""
    if not problems:
        return
    lines = "".join(f"\n  {name}: {why}" for name, why in problems.items())
    hint = f"its nodes: {', '.join(held[:8])}" if held else "`ray status` shows who holds what"
    error = Unreachable(f"{count_of(len(problems), 'node')} of the Ray cluster cannot be had:{lines}", hint=hint)
    error.hosts = {name: Unreachable(why) for name, why in problems.items()}  # for --allow-missing
    raise error


class _Command:
    """In an actor on a node: a command there, as its child. Raises nothing: what it met is what it returns."""

    def __init__(self) -> None:
        self._session: LocalSession | None = None

    def start(self, argv: Sequence[str]) -> tuple[str, str] | None:
        """None, or the problem and its words. `python3` is the one of the node's Ray."""
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray gives its workers the lowest; children have that of the thread
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        try:
            self._session = LocalShell().start(argv, deadline=Deadline(0.0))
        except ShellError as error:
            return error.problem, error.message
        return None

    def write(self, data: bytes) -> None:
        assert self._session is not None
        while data and self._session.exit_code is None:
            taken = self._session.write(data)
            data = data[taken:]
            if data:
                time.sleep(0.002)

    def finish(self) -> None:
        assert self._session is not None
        self._session.finish()

    def read(self) -> Said:
        """Its output within a moment."""
        assert self._session is not None
        pieces: list[tuple[Stream, bytes]] = []
        while piece := self._session.read(0.0 if pieces else _WAIT_S):
            pieces.append((piece.stream, piece.data))
            if sum(len(data) for _, data in pieces) > _AT_ONCE:
                break
        return pieces, self._session.ended, self._session.exit_code

    def abort(self) -> None:
        if self._session is not None:
            self._session.abort()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


class RayShell:
    """Commands on one node."""

    def __init__(self, ray: Any, where: Any) -> None:
        self._ray, self._where = ray, where

    def start(self, argv: Sequence[str], *, deadline: Deadline) -> RaySession:
        """Start `argv` in a new actor. Raises ShellError."""
        ray = self._ray
        # it asks for no device, so Ray masks none
        kind = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0, concurrency_groups=dict.fromkeys(_THREADS, 1))(
            _Command
        )
        actor = kind.options(scheduling_strategy=self._where).remote()
        session = RaySession(ray, actor)
        try:
            problem = ray.get(actor.start.remote(list(argv)), timeout=deadline.left())
        except ray.exceptions.GetTimeoutError:
            session.close()
            raise timed_out(deadline) from None
        except ray.exceptions.RayError as error:
            session.close()
            raise ShellError(
                "connection-lost", f"its actor did not start: {' '.join(str(error).split())[:200]}"
            ) from None
        if problem is not None:
            session.close()
            raise ShellError(*problem)
        session.listen()
        return session

    def close(self) -> None:
        """Nothing to leave."""


class RaySession:
    """A command in an actor. What is asked of the actor never blocks: answers are looked for."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._asked: Any = None  # for output, always one question
        self._sent: list[Any] = []
        self._pieces: deque[OutputPiece] = deque()
        self._over = self._closed = False
        self._code: int | None = None

    def listen(self) -> None:
        """Ask for the next output."""
        self._asked = self._actor.read.options(concurrency_group="out").remote()

    def write(self, data: bytes) -> int:
        if self._over or not data:
            return len(data)
        if self._sent:
            _, self._sent = self._ray.wait(self._sent, num_returns=len(self._sent), timeout=0)
        if len(self._sent) >= _WINDOW:
            return 0
        self._sent.append(self._actor.write.options(concurrency_group="in").remote(data))
        return len(data)

    def finish(self) -> None:
        if not self._over:
            self._actor.finish.options(concurrency_group="in").remote()

    def read(self, timeout_s: float) -> OutputPiece | None:
        if not self._pieces and not self._over:
            ready, _ = self._ray.wait([self._asked], timeout=timeout_s)
            if ready:
                self._take()
        return self._pieces.popleft() if self._pieces else None

    def _take(self) -> None:
        try:
            pieces, self._over, self._code = self._ray.get(self._asked)
        except self._ray.exceptions.RayError:  # the actor, or its node, died
            self._over = True
            return
        self._pieces.extend(OutputPiece(stream, data) for stream, data in pieces)
        if not self._over:
            self.listen()

    @property
    def ended(self) -> bool:
        return self._over and not self._pieces

    @property
    def exit_code(self) -> int | None:
        return self._code

    def abort(self) -> None:
        if not self._closed:
            self._actor.abort.options(concurrency_group="end").remote()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):  # what is gone needs no closing
            self._ray.wait([self._actor.close.options(concurrency_group="end").remote()], timeout=_PARTING_S)
            self._ray.kill(self._actor)
