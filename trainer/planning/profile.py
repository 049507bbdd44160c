"""profile.yaml: what layers and bridges really cost, as `hetctl bench ops` and `bench bridge` measured it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from hetctl.comm.contract.cluster import SCHEMA_VERSION, TransportKind, plausible, read_versioned
from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import write_yaml
from hetctl.trainer.model.shapes import SHAPES, ModelShape

SHORTEST_S, LONGEST_S = 1e-12, 1e6  # that a layer or a sum can take

LayerKind = Literal["embedding", "block", "head"]


@dataclass(frozen=True)
class Point:
    """Seconds of one layer at so many samples per rank and micro-batch."""

    samples: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class LayerSizes:
    """What the seconds of a model's layers depend on."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool

    @classmethod
    def of(cls, shape: ModelShape) -> LayerSizes:
        return cls(**{field.name: getattr(shape, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class OffloadedUpdate:
    """Seconds of an update in the host's memory, per parameter whose state a rank keeps there."""

    copies_s: float  # its gradient to the host and its weights back, over the device's own link
    alone_s: float  # the update on all of the host's cores; its ranks have a share each of them, and of its memory


@dataclass(frozen=True)
class Launches:
    """What a host takes at least to launch the passes of a block of one sample that computes so much again.

    Blocks that compute nothing again were timed with their launches.
    """

    selective: Point  # torch asks at each operation whether it is kept
    full: Point

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(s for p in (self.selective, self.full) for s in (p.forward_s, p.backward_s))


@dataclass(frozen=True)
class ClassProfile:
    """One device class at one model and sequence length; points in ascending order of samples."""

    device_class: str
    model: str
    seq_len: int
    block: tuple[Point, ...]
    embedding: tuple[Point, ...]
    head: tuple[Point, ...]
    update_s: float | None = None  # of the optimiser, per parameter whose state a rank keeps
    speed: float = 1.0  # share of the device's own speed that it was held to (`@SPEED`) while it was measured
    tensor: int = 1  # it is one rank's part in a tensor group of so many, whose sums were over that rank alone
    precision: Precision | None = None  # it computed in; None: bf16 on a GPU, fp32 on a CPU
    sizes: LayerSizes | None = None  # of the model; None: a model that hetctl knows by its name, in an older file
    sums: bool = False  # no, they were over the whole group: its sums are in these times
    offloaded: OffloadedUpdate | None = None
    launches: Launches | None = None  # of its host, at any speed of the device

    @property
    def of(self) -> LayerSizes | None:
        """The sizes of the model; None where nobody knows them."""
        known = SHAPES.get(self.model)
        return self.sizes or (LayerSizes.of(known) if known else None)

    def scaled(self, speed: float, tensor: int) -> ClassProfile:
        """At another speed, and as part of another tensor group, if every layer became slower or faster alike."""
        slower = self.speed / speed

        def points(kind: LayerKind) -> tuple[Point, ...]:
            factor = slower if kind == "embedding" else slower * self.tensor / tensor  # all ranks look all tokens up
            return tuple(Point(p.samples, p.forward_s * factor, p.backward_s * factor) for p in getattr(self, kind))

        return replace(
            self,
            block=points("block"),
            embedding=points("embedding"),
            head=points("head"),
            update_s=None if self.update_s is None else self.update_s * slower,
            speed=speed,
            tensor=tensor,
        )

    def at(self, kind: LayerKind, samples: float) -> tuple[float, float]:
        """(forward, backward) seconds, linear between points and, by the last slope, beyond them: but of fewer samples
        than were measured no less than their share."""
        points = _never_slower_with_fewer(getattr(self, kind))
        share = min(samples / points[0].samples, 1.0) if len(points) > 1 else samples / points[0].samples
        least = points[0].forward_s * share, points[0].backward_s * share
        if len(points) == 1:
            return least
        index = next((i for i, p in enumerate(points) if p.samples >= samples), len(points) - 1)
        a, b = points[max(index, 1) - 1], points[max(index, 1)]
        part = (samples - a.samples) / (b.samples - a.samples)
        forward = a.forward_s + part * (b.forward_s - a.forward_s)
        backward = a.backward_s + part * (b.backward_s - a.backward_s)
        return max(forward, least[0]), max(backward, least[1])


def _never_slower_with_fewer(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The points with no time above that of more samples: where one is, something else was timed (a first launch, a
    clock that had not risen), as in Sailor's public profiles of one sample."""
    found: list[Point] = []
    for p in reversed(points):
        after = found[-1] if found else p
        found.append(Point(p.samples, min(p.forward_s, after.forward_s), min(p.backward_s, after.backward_s)))
    return tuple(reversed(found))


@dataclass(frozen=True)
class SumPoint:
    """Seconds of the native library's all-reduce of so many bytes between two devices of a host."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class BridgeProfile:
    """One transport between two islands, as `hetctl bench bridge` measured it: bytes per second of one rank's link."""

    transport: TransportKind
    message_bytes_per_s: float
    all_reduce_bytes_per_s: float  # bytes of the sum per second, two islands
    latency_s: float


@dataclass(frozen=True)
class Profile:
    """All measurements of one cluster: its device classes, and the transports of its bridges."""

    classes: tuple[ClassProfile, ...]
    bridges: tuple[BridgeProfile, ...] = ()
    native_sums: tuple[SumPoint, ...] = ()  # in ascending order of bytes; taken for every class of the profile
    schema_version: int = SCHEMA_VERSION

    def matching(self, shape: ModelShape, seq_len: int) -> tuple[ClassProfile, ...]:
        """The measurements of exactly this model, by its sizes, else its name, and sequence length."""
        mine = LayerSizes.of(shape)
        here = (c for c in self.classes if c.seq_len == seq_len)
        return tuple(c for c in here if (c.model == shape.name if c.sizes is None else c.sizes == mine))

    def with_class(self, entry: ClassProfile) -> Profile:
        """This profile with one more measurement, in the place of an older one of the same."""
        others = [c for c in self.classes if _what(c) != _what(entry)]
        return replace(self, classes=(*others, entry))

    def with_bridge(self, entry: BridgeProfile) -> Profile:
        """This profile with one transport's measurement, in the place of an older one."""
        others = [b for b in self.bridges if b.transport != entry.transport]
        return replace(self, bridges=(*others, entry))

    def validate(self, *, where: str) -> None:
        """Raise ConfigError unless every layer kind has points in ascending order."""
        for entry in self.classes:
            if not plausible(entry.speed):
                raise ConfigError(f"{where}: '{entry.device_class}' needs a speed above zero, and of a real thing")
            if entry.tensor < 1:
                raise ConfigError(f"{where}: '{entry.device_class}' needs a tensor degree of at least one")
            for kind in ("block", "embedding", "head"):
                samples = [p.samples for p in getattr(entry, kind)]
                if not samples or samples != sorted(set(samples)) or samples[0] < 1:
                    raise ConfigError(f"{where}: '{entry.device_class}' needs ascending points of {kind}")
                each = [s for p in getattr(entry, kind) for s in (p.forward_s, p.backward_s)]
                if not all(0 <= s <= LONGEST_S for s in each) or (kind == "block" and min(each) < SHORTEST_S):
                    raise ConfigError(f"{where}: '{entry.device_class}' needs finite seconds of {kind}, as layers take")
            others = [entry.update_s or 0.0, *(astuple(entry.offloaded) if entry.offloaded else ())]
            others += entry.launches.seconds if entry.launches else ()
            if not all(0 <= s <= LONGEST_S for s in others):
                raise ConfigError(f"{where}: '{entry.device_class}' needs finite seconds of an update and launches")
            if entry.sizes is not None and min(astuple(entry.sizes)[:-1]) < 1:
                raise ConfigError(f"{where}: '{entry.device_class}' needs sizes of at least one")
        if any(b.nbytes <= a.nbytes for a, b in pairwise(self.native_sums)):
            raise ConfigError(f"{where}: native_sums need ascending bytes")
        if any(point.nbytes <= 0 or not SHORTEST_S <= point.seconds <= LONGEST_S for point in self.native_sums):
            raise ConfigError(f"{where}: native_sums need bytes and seconds above zero, and such as can be")
        for bridge in self.bridges:
            if not (plausible(bridge.message_bytes_per_s) and plausible(bridge.all_reduce_bytes_per_s)):
                raise ConfigError(f"{where}: the bridge over {bridge.transport} needs rates above zero that can be")


def _what(entry: ClassProfile) -> tuple[object, ...]:
    return (entry.device_class, entry.of or entry.model, entry.seq_len, entry.speed, entry.tensor, entry.precision)


def load_profile(path: Path) -> Profile:
    """A profile.yaml, validated. Raises ConfigError."""
    profile = read_versioned(path, Profile, what="profile")
    profile.validate(where=path.name)
    return profile


def save_profile(path: Path, profile: Profile) -> None:
    """Write profile.yaml atomically."""
    write_yaml(path, profile, header="Measured by `hetctl bench ops` (seconds per layer) and `hetctl bench bridge`.")
