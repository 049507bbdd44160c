"""What ranks and agents tell whoever started them: one frozen type per kind of event, one JSON object a line.

On the line an event is {"event": its kind, its fields, "rank": who said it, "n": the agent's number for it}. Fields
that have their default are left out. A rank writes to the file descriptor that it was given, its agent passes it on.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import finite
from hetctl.comm.contract.units import count_of
from hetctl.comm.contract.values import decode, encode


@dataclass(frozen=True)
class Line:
    """What stands on a line: {its key: its kind, its fields}."""

    key: ClassVar[str]
    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Any]]]  # of the key

    def __init_subclass__(cls, *, key: str = "", kind: str = "") -> None:
        if key:
            cls.key, cls.kinds = key, {}
        else:
            cls.kind = kind
            cls.kinds[kind] = cls


@dataclass(frozen=True)
class Event(Line, key="event"):
    """Anything told. A further kind is one more class: `class Name(Event, kind="word")`."""


@dataclass(frozen=True)
class Begin(Event, kind="begin"):
    """A rank's work begins behind step `step` of `steps`, on the text of that digest, with each host's versions."""

    step: int
    steps: int
    text: str = ""
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step(Event, kind="step"):
    """A training step's figures; None is a number that is not finite."""

    step: int
    loss: float | None
    tokens: int
    grad_norm: float | None
    lr: float
    step_time_s: float
    tokens_per_s: float
    loss_scale: float | None = None  # of fp16
    pairs: int | None = None  # of preferences
    accuracy: float | None = None  # the share of pairs whose chosen answer is preferred
    margin: float | None = None  # by how much, times beta
    islands: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # where their time went, now and then


@dataclass(frozen=True)
class Remembered(Step, kind="remembered"):
    """A step that the checkpoint knows which a run goes on from; whoever should have heard of it may have ended."""


@dataclass(frozen=True)
class Validated(Event, kind="validated"):
    """The loss over held-out samples after a step."""

    step: int
    validation_loss: float | None
    validation_accuracy: float | None = None  # of preference pairs
    validation_margin: float | None = None


@dataclass(frozen=True)
class Sampled(Event, kind="sampled"):
    """What the model goes on with from a held-out prompt, after a step."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Saved(Event, kind="saved"):
    """The checkpoint of a step is whole."""

    step: int


@dataclass(frozen=True)
class Note(Event, kind="note"):
    """Something a person should know."""

    sentence: str
    of_pace: bool = False  # it compares ranks' speeds, which says nothing of ranks that share cores


@dataclass(frozen=True)
class TrainingEnded(Event, kind="summary"):
    """What the ranks know of a training run at its end; without a step, only what the run as a whole says."""

    steps: int
    interrupted: bool
    validation_loss: float | None
    validations: tuple[Mapping[str, Any], ...]
    skipped_steps: int
    train_s: float
    best_step: int | None = None
    best_validation_loss: float | None = None
    stalled: int | None = None  # validations without a better one that ended it (train.patience); None: none did
    stragglers: tuple[Mapping[str, Any], ...] = ()
    adapted: tuple[Mapping[str, Any], ...] = ()
    recut: tuple[Mapping[str, Any], ...] = ()
    validation_accuracy: float | None = None  # of preference pairs
    validation_margin: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    bridge_bytes: int | None = None
    memory_bytes: tuple[int, ...] | None = None  # per rank
    shares: Mapping[str, float] = field(default_factory=dict)
    island_shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    replica_spread: float | None = None
    timeline: tuple[tuple[Mapping[str, Any], ...], ...] = ()  # of the last step, per rank


def no_better(count: int, step: int) -> str:
    """Why training ended early: that so many validations came to no lower loss than the one after `step` steps."""
    return f"{count_of(count, 'validation')} in a row had no lower loss than the one after step {step} (train.patience)"


@dataclass(frozen=True)
class EngineAccount(Event, kind="bridge"):
    """What the engine of a direct bridge did in one rank's process: the evidence of how bytes went."""

    engine: str
    ways: tuple[str, ...]
    sent_bytes: int
    staged_bytes: int
    buffered_by_engine: bool | None
    transports: tuple[Any, ...]
    rails: Mapping[str, Any]
    lost: Mapping[str, str]
    port_counters: Mapping[str, Any]
    registered: int
    written_bytes: int
    read_bytes: int


@dataclass(frozen=True)
class Figures(Event, kind="figures"):
    """What a measuring program found, under the name that who started it expects."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Ready(Event, kind="ready"):
    """A host's agent has written the run's files; the store's port, if it is here, and where other hosts knock."""

    pid: int
    store_port: int | None
    probe_port: int | None


@dataclass(frozen=True)
class Refused(Event, kind="refused"):
    """An agent cannot start its ranks."""

    reason: str


@dataclass(frozen=True)
class StoreLost(Event, kind="store lost"):
    """The process that served the run's store is gone: no rank meets another any more."""

    how: str


@dataclass(frozen=True)
class Started(Event, kind="started"):
    """A rank's process is there."""

    pid: int


@dataclass(frozen=True)
class Failing(Event, kind="failing"):
    """A rank wrote down an error: it is about to end."""

    at: float
    error: Any


@dataclass(frozen=True)
class Exited(Event, kind="exit"):
    """A rank's process has ended; `asked` by its agent, which knows `reason` better than the code says."""

    code: int
    at: float
    asked: bool
    error: Any = None  # what it wrote into its error file
    said: str | None = None  # the last line of its log, where it wrote none
    pending: tuple[Mapping[str, Any], ...] | None = None  # what it waited for
    reason: str | None = None
    oom: bool | None = None  # the kernel killed it for lack of memory; None: unknown


@dataclass(frozen=True)
class LogText(Event, kind="log"):
    """A piece of a rank's log, where the launcher does not see the file."""

    text: str
    skipped: int


@dataclass(frozen=True)
class PortChanged(Event, kind="link"):
    """A network port became worse; `problem` is None once it is well again."""

    nic: str
    problem: str | None


@dataclass(frozen=True)
class PeerUnreachable(Event, kind="unreachable"):
    """A host cannot reach another one at its data address."""

    peer: str
    address: str


@dataclass(frozen=True)
class Lost(Event, kind="lost"):
    """An agent was killed, or failed by itself; its guardian says how many processes are left."""

    left: int
    failed: bool = False


@dataclass(frozen=True)
class Done(Event, kind="done"):
    """An agent's last word: how many processes it could not end."""

    left: int


@dataclass(frozen=True)
class Gone(Event, kind="gone"):
    """Said for an agent that is not heard any more; `finished` had its last word come."""

    finished: bool
    reason: str


@dataclass(frozen=True)
class RankFailed(Event, kind="failed"):
    """Said by the supervisor of the first failure, as soon as it is known."""

    reason: str


@dataclass(frozen=True)
class Told:
    """An event, and who told it: a host, and of its ranks which (None: the host's agent)."""

    event: Event
    host: str
    rank: int | None = None
    late: bool = False  # of an earlier attempt, whose launcher was lost

    @property
    def source(self) -> int:
        """The rank, of an event that only ranks can tell."""
        assert self.rank is not None, self.event.kind
        return self.rank


def document(line: Line) -> dict[str, Any]:
    """An event or an order as it goes on the line."""
    return {line.key: line.kind, **present(line)}


def present(value: Any) -> dict[str, Any]:
    """The plain data of a frozen value's fields, without those that have their default."""
    found = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {f.name: encode(found[f.name]) for f in dataclasses.fields(value) if found[f.name] != _default(f)}


def told(line: Mapping[str, Any], host: str) -> Told | None:
    """A line's event; None for kinds that are not ours. One of ours that does not fit is passed on as a Note."""
    kind = Event.kinds.get(str(line.get(Event.key)))
    if kind is None:
        return None
    rank = line.get("rank") if isinstance(line.get("rank"), int) else None
    values = {k: v for k, v in line.items() if k not in (Event.key, "rank", "n", "late")}
    try:
        event = decode(kind, values, where=kind.kind)
    except ConfigError as error:
        event = Note(f"{host}{'' if rank is None else f', rank {rank}'}: passed over what cannot be read: {error}")
    return Told(event, host, rank, late=line.get("late") is True)


def _default(which: dataclasses.Field[Any]) -> object:
    if which.default_factory is not dataclasses.MISSING:
        return which.default_factory()
    return which.default


class Reporter:
    """Writes a rank's events; silent where no launcher listens. Only rank 0 reports figures."""

    def __init__(self, *, active: bool) -> None:
        descriptor = os.environ.get(variables.EVENTS)
        self._fd = int(descriptor) if descriptor and active else None

    def emit(self, event: Event) -> None:
        """One event. A launcher that went away is not this rank's concern: the agent ends ranks."""
        if self._fd is None:
            return
        line = json.dumps(finite(document(event)), allow_nan=False) + "\n"
        try:
            os.write(self._fd, line.encode())
        except BrokenPipeError:
            self._fd = None

    def figures(self, name: str, **values: Any) -> None:
        """What a measuring program found."""
        self.emit(Figures(name, values))
