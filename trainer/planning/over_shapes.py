"""What layers of a shape that was not measured take, from those that were: non-negative sums of what grows with shapes.

A layer's seconds are a launch, its matrix products and attention by their FLOPs, and bytes by the values that go
through memory: so many seconds each, found by least squares over all measured points, relative to what was measured.
No coefficient is below zero, so nothing larger is faster, within the measured range or beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, groupby
from statistics import mean, median

import numpy as np

from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.tensor_cuts import cannot_cut
from hetctl.trainer.planning.partition import Floats
from hetctl.trainer.planning.profile import ClassProfile, LayerKind, LayerSizes, Point, Profile
from hetctl.trainer.planning.space import TENSOR_DEGREES

LEAST = 3  # measured shapes, of a model and a length each: with fewer one cannot be left out
KINDS: tuple[LayerKind, ...] = ("block", "embedding", "head")  # in the order of a profile
TICK_S = 1e-9  # no clock told less
SLACK = 1.05  # sizes that are beyond the measured ones by less are not called so

Coefficients = dict[LayerKind, tuple[Floats, Floats]]  # seconds of each feature, forward and backward


@dataclass(frozen=True)
class Estimated(ClassProfile):
    """What was not measured itself: from how many shapes, and how far off each of them is, if the others tell of it.

    Both errors are relative, of blocks and heads there and back: the mean, and that of the worst shape.
    """

    shapes: int = 0
    error: float = 0.0
    worst: float = 0.0
    beyond: tuple[str, ...] = ()  # its sizes that are outside those measured

    @property
    def how(self) -> str:
        """In words for people."""
        off = f"{self.error:.0%} off them leave-one-out (at worst {self.worst:.0%})".replace("%", " %")
        if self.beyond:
            return f"extrapolated in {' and '.join(self.beyond)} from {self.shapes} measured shapes, {off}"
        return f"interpolated from {self.shapes} measured shapes, {off}"


def serving(profile: Profile, shape: ModelShape, seq_len: int) -> tuple[ClassProfile, ...]:
    """What a profile says of a model and length: what was measured of exactly them; else, class by class, estimates."""
    exact = profile.matching(shape, seq_len)
    known = {entry.device_class for entry in exact}
    others = (e for e in profile.classes if e.device_class not in known and e.of is not None)
    return (*exact, *(e for entries in _alike(others) for e in _estimates(entries, shape, seq_len)))


def leave_one_out(entries: Sequence[ClassProfile]) -> dict[tuple[LayerSizes, int], float]:
    """By measured shape how far off it is, as the others tell of it: relative, the mean of its blocks and heads."""
    found = {}
    for left_out in dict.fromkeys(map(_shape, entries)):
        fitted = _fit(tuple(e for e in entries if _shape(e) != left_out))
        mine = [e for e in entries if _shape(e) == left_out]
        found[left_out] = mean(
            abs(miss) for e in mine for kind in ("block", "head") for miss in _misses(e, kind, fitted)
        )
    return found


def _alike(entries: Iterator[ClassProfile]) -> Iterator[tuple[ClassProfile, ...]]:
    """Measurements of one class at one speed, where there are enough."""
    key = lambda e: (e.device_class, e.speed)  # noqa: E731
    for _, group in groupby(sorted(entries, key=key), key=key):
        alike = tuple(group)
        if len(set(map(_shape, alike))) >= LEAST:
            yield alike


def _shape(entry: ClassProfile) -> tuple[LayerSizes, int]:
    assert entry.of is not None
    return entry.of, entry.seq_len


def _estimates(entries: tuple[ClassProfile, ...], shape: ModelShape, seq_len: int) -> Iterator[Estimated]:
    """One for each tensor group that the model can be cut for."""
    sizes, fitted, misses = LayerSizes.of(shape), _fit(entries), list(_left_out(entries).values())
    updates = [e.update_s for e in entries if e.update_s is not None]
    for tensor in (t for t in TENSOR_DEGREES if not cannot_cut(shape, t)):
        block, embedding, head = (_points(kind, fitted, sizes, seq_len, tensor) for kind in KINDS)
        yield Estimated(
            entries[0].device_class,
            shape.name,
            seq_len,
            block=block,
            embedding=embedding,
            head=head,
            update_s=median(updates) if updates else None,
            offloaded=next((e.offloaded for e in entries if e.offloaded), None),
            launches=next((e.launches for e in entries if e.launches), None),
            speed=entries[0].speed,
            tensor=tensor,
            sizes=sizes,
            shapes=len(misses),
            error=mean(misses),
            worst=max(misses),
            beyond=_beyond(entries, sizes, seq_len),
        )


_left_out = cache(leave_one_out)


def _points(kind: LayerKind, fitted: Coefficients, sizes: LayerSizes, seq_len: int, tensor: int) -> tuple[Point, ...]:
    """Two suffice: every feature is linear in samples."""
    forward, backward = fitted[kind]
    rows = ((samples, features(kind, sizes, seq_len, samples, tensor)) for samples in (1, 2))
    return tuple(Point(samples, float(row @ forward), float(row @ backward)) for samples, row in rows)


def _misses(entry: ClassProfile, kind: LayerKind, fitted: Coefficients) -> Iterator[float]:
    """Of each measured point, there and back: how much more the coefficients say, relative."""
    sizes, seq_len = _shape(entry)
    for point in getattr(entry, kind):
        row = features(kind, sizes, seq_len, point.samples, entry.tensor)
        yield float(sum(row @ c for c in fitted[kind])) / max(point.forward_s + point.backward_s, TICK_S) - 1


def _beyond(entries: Sequence[ClassProfile], sizes: LayerSizes, seq_len: int) -> tuple[str, ...]:
    """Which sizes are smaller or larger than any that was measured."""
    asked = {"length": seq_len, "hidden": sizes.hidden, "intermediate": sizes.intermediate, "vocab": sizes.vocab}
    said = []
    for name, size in asked.items():
        measured = [e.seq_len if name == "length" else getattr(e.of, name) for e in entries]
        if not min(measured) / SLACK <= size <= max(measured) * SLACK:
            said.append(f"{name} ({size}, measured {min(measured)} to {max(measured)})")
    return tuple(said)


def features(kind: LayerKind, sizes: LayerSizes, seq_len: int, samples: int, tensor: int) -> Floats:
    """What the seconds of a layer are the sum of, on one rank of a tensor group; the first is its launch."""
    s, tokens = sizes, samples * seq_len
    if kind == "embedding":  # rows; a gradient of the whole table, which every rank has
        return np.array([1, tokens * s.hidden, s.vocab * s.hidden], dtype=np.float64)
    if kind == "head":
        words = s.vocab / tensor
        return np.array([1, tokens * words * s.hidden, tokens * words, words * s.hidden, tokens * s.hidden])
    q, kv = s.heads * s.head_dim / tensor, max(s.kv_heads / tensor, 1) * s.head_dim
    inner, gates = s.intermediate / tensor, 3 if s.gated else 2
    weights = s.hidden * (2 * q + 2 * kv + gates * inner)
    values = 4 * s.hidden + 2 * q + 2 * kv + 2 * (gates - 1) * inner  # as `LayerCosts` counts what a block keeps
    scores = tokens * seq_len * s.heads / tensor  # attention makes and weighs them, whatever the heads' size
    return np.array([1, tokens * weights, scores * s.head_dim, scores, tokens * values, weights])


@cache
def _fit(entries: tuple[ClassProfile, ...]) -> Coefficients:
    """Seconds of each feature, from all points of these measurements."""
    return {
        kind: (_coefficients(entries, kind, "forward_s"), _coefficients(entries, kind, "backward_s")) for kind in KINDS
    }


def _coefficients(entries: Sequence[ClassProfile], kind: LayerKind, direction: str) -> Floats:
    points = [(e, point) for e in entries for point in getattr(e, kind)]
    rows = np.array([features(kind, *_shape(e), point.samples, e.tensor) for e, point in points])
    seconds = np.array([max(getattr(point, direction), TICK_S) for _, point in points])
    return non_negative(rows / seconds[:, None], np.ones(len(points)))


def non_negative(rows: Floats, wanted: Floats) -> Floats:
    """The x of no negative element that comes nearest to rows @ x = wanted: of all choices of columns, the best.

    For a handful of columns only.
    """
    scale = rows.max(axis=0)
    best, found = np.inf, np.zeros(rows.shape[1])
    for count in range(1, min(rows.shape) + 1):
        for columns in map(list, combinations(range(rows.shape[1]), count)):
            x = np.linalg.lstsq(rows[:, columns] / scale[columns], wanted, rcond=None)[0]
            miss = float(np.sum((rows[:, columns] / scale[columns] @ x - wanted) ** 2))
            if x.min() >= 0 and miss < best:
                best, found = miss, np.zeros(rows.shape[1])
                found[columns] = x / scale[columns]
    return found
