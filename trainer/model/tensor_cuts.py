"""Which part of each parameter a rank of a tensor-parallel group holds. No torch: the planner asks too.

Megatron's way (arXiv 1909.08053): projections into heads and into the MLP are cut by rows, those out of them by
columns, embedding and LM head by words; everything else is held whole by every rank of the group. Of an adapter, one
factor is cut as its projection is, and each rank has a share of the other one's gradient; magnitudes are cut as biases.
Quantised matrices are cut as their bytes lie, between blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hetctl.trainer.model.adapters import DOWN, MAGNITUDE, UP
from hetctl.trainer.model.block_formats import BLOCK, Quantised, row_bytes
from hetctl.trainer.model.sample_shares import share
from hetctl.trainer.model.shapes import ModelShape

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
QK_NORMS = ("q_norm", "k_norm")
BY_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Cut:
    """Elements [low, high) of dimension `dim` of a parameter whose whole shape is `whole`."""

    whole: tuple[int, ...]
    dim: int
    low: int
    high: int
    most: int  # the largest part's extent on any rank of the group: all lay their buffers out for that
    counts: bool = True  # of the ranks that hold this part, the first: norms and checkpoints count it there
    partial: bool = False  # several ranks hold this part, and each has a share of its gradient

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """What this rank holds."""
        return (*self.whole[: self.dim], self.high - self.low, *self.whole[self.dim + 1 :])

    @cached_property
    def room(self) -> int:
        """Elements of the largest part."""
        return math.prod(self.whole) // max(1, self.whole[self.dim]) * self.most

    @property
    def is_whole(self) -> bool:
        return self.high - self.low == self.whole[self.dim]

    @property
    def contributes(self) -> bool:
        """Whether this rank's gradient belongs into the sum over the group (equal copies are counted once)."""
        return self.counts or self.partial


def cannot_cut(shape: ModelShape, degree: int) -> str:
    """Why a model cannot be cut into so many parts; empty when it can."""
    for what, count in (
        ("heads", shape.heads),
        ("intermediate values", shape.intermediate),
        ("hidden values", shape.hidden),
    ):
        if count % degree:
            return f"{count} {what} of '{shape.name}' do not divide by {degree}"
    if shape.kv_heads % degree and degree % shape.kv_heads:
        return f"{shape.kv_heads} key-value heads of '{shape.name}' can be neither shared out nor copied over {degree}"
    columns = [shape.projections[name][1] for name in BY_COLUMNS]
    if degree > 1 and shape.quantised and (odd := [n for n in columns if n % (degree * BLOCK)]):
        return f"rows of {odd[0]} values of '{shape.name}' do not divide by {degree} between blocks of {BLOCK}"
    return ""


def whole_shape(name: str, shape: ModelShape) -> tuple[int, ...]:
    """The whole shape of the parameter with this Hugging Face name."""
    tables = {"embed_tokens": shape.vocab, "lm_head": shape.vocab, "embed_positions": shape.positions}
    module, what = _place(name)
    if module in QK_NORMS:
        return (shape.qk_norm_sizes[QK_NORMS.index(module)],)
    if module in tables:
        return (tables[module], shape.hidden)
    if module not in shape.projections:
        return (shape.hidden,)  # norms
    out, into = shape.projections[module]
    rank = shape.adapters.rank if shape.adapters else 0
    return {"bias": (out,), MAGNITUDE: (out,), DOWN: (rank, into), UP: (out, rank)}.get(what, (out, into))


def quantised_as(name: str, shape: ModelShape) -> Quantised | None:
    """What bytes the parameter with this name is kept as; None: it is kept as numbers."""
    module, what = _place(name)
    return shape.quantised if module in shape.projections and what == "weight" else None


def adapter_parameters(shape: ModelShape, *, degree: int = 1) -> int:
    """Of the adapters of one block, on one rank of a tensor group."""
    parts = [part for name in shape.adapted for part in shape.adapters.parts_of(name)] if shape.adapters else []
    return sum(math.prod(cut_of(name, shape, degree=degree).shape) for name in parts)


def _place(name: str) -> tuple[str, str]:
    """The module that a parameter is in, and what it is there: weight, bias, or a factor of its adapter."""
    *outer, module, what = name.split(".")
    return (outer[-1], module) if module in (DOWN, UP) else (module, what)


def cut_of(name: str, shape: ModelShape, *, degree: int = 1, index: int = 0) -> Cut:
    """What rank `index` of a tensor group of `degree` ranks holds of a parameter, of its bytes if it is quantised."""
    whole = whole_shape(name, shape)
    if kind := quantised_as(name, shape):
        whole = (whole[0], row_bytes(kind, whole[1]))
    module, what = _place(name)
    if module in QK_NORMS and shape.heads_normed_together:
        module = BY_ROWS[QK_NORMS.index(module)]  # cut as what it norms
    if degree == 1:
        return Cut(whole, 0, 0, whole[0], whole[0])
    if (what == DOWN and module in BY_ROWS) or (what == UP and module in BY_COLUMNS):
        return Cut(whole, 0, 0, whole[0], whole[0], counts=index == 0, partial=True)
    if module in BY_COLUMNS and len(whole) == 2:
        low, high = share(whole[1], degree, index)
        return Cut(whole, 1, low, high, high - low)
    if module in ("k_proj", "v_proj") and shape.kv_heads < degree:
        copies = degree // shape.kv_heads
        head = index // copies * shape.head_dim
        return Cut(whole, 0, head, head + shape.head_dim, shape.head_dim, index % copies == 0, partial=True)
    if module in BY_ROWS or module in ("embed_tokens", "lm_head"):
        low, high = share(whole[0], degree, index)
        return Cut(whole, 0, low, high, -(-whole[0] // degree))
    return Cut(whole, 0, 0, whole[0], whole[0], counts=index == 0)
