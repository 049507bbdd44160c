"""What a run's files say, as types: whoever reads a run folder decodes it here, since disks fill up and people edit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.values import decode, encode

Shares: TypeAlias = Mapping[str, float | None]


class Record:
    """Of these an unknown key is another version's, and passed over."""

    OPEN: ClassVar[bool] = True


@dataclass(frozen=True)
class StepRecord(Record):
    """A line of metrics.jsonl."""

    step: int
    loss: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    step_time_s: float = 0.0
    mfu: float | None = None
    efficiency: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class IslandRecord(Record):
    """An island of a summary: what it held, and where its time went."""

    name: str
    vendor: str
    ranks: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    shares: Shares | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class ValidationRecord(Record):
    step: int
    validation_loss: float | None


@dataclass(frozen=True)
class StragglerRecord(Record):
    rank: int
    host: str
    ratio: float
    device_class: str = ""
    against: str | None = None


@dataclass(frozen=True)
class ChangeRecord(Record):
    """What a run changed of its plan after a step."""

    step: int
    before: Any
    after: Any


@dataclass(frozen=True)
class Parity(Record):
    """How far the first losses of a run are from those of one process, and how far rounding can take them."""

    steps: int
    worst_deviation: float | None  # None: a loss is missing or not finite
    allowed: float
    precision: str
    equal: bool


@dataclass(frozen=True)
class SummaryRecord(Record):
    """summary.json, as far as anybody reads it. What an attempt did not come to has no key."""

    status: str = ""
    model: str = ""
    parameters: int | None = None
    steps: int = 0
    steps_planned: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    tokens: int = 0
    islands: tuple[IslandRecord, ...] = ()
    emulated: bool | None = None
    wall_s: float | None = None
    run_dir: str = ""
    run: str = ""
    shares_cores: bool = False
    mfu: float | None = None
    efficiency: float | None = None
    efficiency_basis: Literal["table", "measured", "interpolated"] | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    validations: tuple[ValidationRecord, ...] | None = None
    best_step: int | None = None
    best_validation_loss: float | None = None
    stalled: int | None = None
    skipped_steps: int | None = None
    tokens_per_s: float | None = None
    bridge_bytes: int | None = None
    memory_bytes: tuple[int, ...] | None = None
    shares: Shares | None = None
    bubble_share: float | None = None
    bridge_share: float | None = None
    replica_spread: float | None = None
    stragglers: tuple[StragglerRecord, ...] | None = None
    adapted: tuple[ChangeRecord, ...] | None = None
    recut: tuple[ChangeRecord, ...] | None = None
    parity: Parity | None = None
    checkpoint_step: int | None = None
    resume: str | None = None
    failure: str | None = None
    error_type: str | None = None
    failure_hint: str | None = None


@dataclass(frozen=True)
class Operation(Record):
    """One operation of a rank's flight recorder."""

    state: str = ""
    started: float = 0.0
    number: int = 0
    group: str = ""
    operation: str = "?"
    peer: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class FailureRecord(Record):
    """failure.json."""

    rank: int
    host: str
    reason: str
    victims: tuple[int, ...] = ()
    log: str | None = None
    traceback: str | None = None
    hint: str | None = None
    exit_code: int | None = None
    error_type: str | None = None
    waiting: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredSpan(Record):
    """What a rank did when, in seconds."""

    kind: str
    start: float
    end: float
    micro_batch: int = -1


@dataclass(frozen=True)
class TimelineRecord(Record):
    ranks: tuple[tuple[MeasuredSpan, ...], ...]


@dataclass(frozen=True)
class VersionsRecord(Record):
    hosts: Mapping[str, Mapping[str, str]]


def fit(kind: type[Any], data: Any, *, where: str) -> dict[str, Any]:
    """The plain data of a record, of the types that `kind` says; keys of other versions stay. Raises ConfigError."""
    value = decode(kind, data, where=where)
    known = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(kind) if f.name in data}
    return {**data, **known}


def fitting(kind: type[Any], data: Any) -> dict[str, Any]:
    """The same, empty for what does not fit."""
    try:
        return fit(kind, data, where=kind.__name__)
    except ConfigError:
        return {}
