"""The samples of a recipe, in an order that depends on its seed alone: windows of text, conversations, mixtures."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.units import count_of
from hetctl.trainer.data.tokens import BEARS_LOSS, Ends, TokenArray, Tokens, open_tokens
from hetctl.trainer.model.head_loss import IGNORED
from hetctl.trainer.recipe import DataSection

BLOCK = 1000  # samples of a mixture in which every source has its share

Samples = npt.NDArray[np.int64]


class Dataset(Protocol):
    """Where a step's samples come from."""

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, ...]:
        """Inputs, targets and, where a row has several, documents [past_last - first, seq_len] of those samples of a
        step's global batch."""
        ...


class Shuffled(ABC):
    """Rows without end, in an order shuffled once per epoch; those of a step are `global_batch` of them."""

    def __init__(self, rows: int, *, seq_len: int, global_batch: int, seed: int) -> None:
        self.rows, self.seq_len, self.global_batch, self.seed = rows, seq_len, global_batch, seed
        self._epoch: tuple[int, Samples] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, ...]:
        """As Dataset."""
        start = step * self.global_batch
        return self._read([self._row(position) for position in range(start + first, start + past_last)])

    @abstractmethod
    def _read(self, rows: Sequence[int]) -> tuple[Samples, ...]: ...

    def _row(self, position: int) -> int:
        epoch, index = divmod(position, self.rows)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self.rows))
        return int(self._epoch[1][index])


class PackedTokens(Shuffled):
    """Windows of a flat token array; targets are the next tokens."""

    def __init__(
        self, tokens: TokenArray, *, seq_len: int, global_batch: int, seed: int, documents: bool = False
    ) -> None:
        """With `documents` each window is said to be one, for the company of packed conversations."""
        super().__init__((len(tokens) - 1) // seq_len, seq_len=seq_len, global_batch=global_batch, seed=seed)
        self.tokens, self.documents = tokens, documents

    def _read(self, rows: Sequence[int]) -> tuple[Samples, ...]:
        starts = np.asarray(rows, dtype=np.int64)[:, None] * self.seq_len
        found = self.tokens[starts + np.arange(self.seq_len + 1)].astype(np.int64)
        inputs, targets = found[:, :-1], found[:, 1:]
        return (inputs, targets, np.zeros_like(inputs)) if self.documents else (inputs, targets)


class Conversations(Shuffled):
    """Conversations, one a row or (`packing`) several, the rest of a row filled up behind them.

    A row has the tokens of a conversation but its last as inputs, and as targets the next ones where those bear loss.
    Both of a preference pair are in one row, documents 2k - 1 (chosen) and 2k; of those cut each has half of a row, or
    what the other one leaves.
    """

    def __init__(
        self,
        tokens: TokenArray,
        ends: Ends,
        source: str,
        *,
        seq_len: int,
        global_batch: int,
        seed: int,
        long: str,
        packing: bool,
        together: int = 1,
    ) -> None:
        """Raises ConfigError where no conversation is left, or one is too long and `long` says error."""
        self.tokens, self.several = tokens, packing or together > 1
        self._what = "conversation" if together == 1 else "pair"
        self._starts = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1])).reshape(-1, together)
        whole = ends.reshape(-1, together) - self._starts - 1  # positions that each takes
        self._lengths = fitted(whole, seq_len)
        too_long = np.flatnonzero(whole.sum(1) > seq_len)
        if len(too_long) and long == "error":
            raise ConfigError(
                f"{count_of(len(too_long), self._what)} of '{source}' are of more than {seq_len} tokens",
                hint="data.long=cut keeps their beginning, drop none of them; or raise model.seq_len",
            )
        self.dropped = [k for k in too_long.tolist() if long == "drop" or self._bears_none(k)]
        self.cut = len(too_long) - len(self.dropped)
        kept = np.delete(np.arange(len(whole)), self.dropped)
        if not len(kept):
            raise ConfigError(
                f"no {self._what} of '{source}' bears loss within {seq_len} tokens", hint="raise model.seq_len"
            )
        self._members = packed(self._lengths.sum(1), kept, seq_len) if packing else [(k,) for k in kept.tolist()]
        super().__init__(len(self._members), seq_len=seq_len, global_batch=global_batch, seed=seed)

    @property
    def said(self) -> str:
        """How many there are, and what became of the long ones."""
        kept = count_of(len(self._starts) - len(self.dropped), self._what)
        told = f"{kept} in {count_of(self.rows, 'sample')}"
        if self.cut or self.dropped:
            told += f" (of more than {self.seq_len} tokens: {self.cut} cut, {len(self.dropped)} dropped)"
        return told

    def counts(self) -> dict[str, int]:
        """What there is of what. Looks at all tokens."""
        members = [k for row in self._members for k in row]
        kept = [targets for k in members for targets in self._targets(k)]
        return {
            f"{self._what}s": len(members),
            "samples": self.rows,
            "cut": self.cut,
            "dropped": len(self.dropped),
            "tokens": sum(map(len, kept)),
            "tokens_with_loss": sum(int(np.count_nonzero(targets & BEARS_LOSS)) for targets in kept),
        }

    def _targets(self, number: int) -> list[TokenArray]:
        """The tokens that those of a conversation (of both of a pair) which are kept are followed by."""
        places = zip(self._starts[number] + 1, self._lengths[number], strict=True)
        return [self.tokens[first : first + length] for first, length in places]

    def _bears_none(self, number: int) -> bool:
        """Whether a conversation (either of a pair) has no loss as it is cut."""
        return not all((targets & BEARS_LOSS).any() for targets in self._targets(number))

    def _read(self, rows: Sequence[int]) -> tuple[Samples, ...]:
        inputs = np.zeros((len(rows), self.seq_len), dtype=np.int64)
        targets, documents = np.full_like(inputs, IGNORED), np.zeros_like(inputs)
        for r, row in enumerate(rows):
            at, members = 0, list(self._members[row])
            places = zip(self._starts[members].flat, self._lengths[members].flat, strict=True)
            for number, (start, size) in enumerate(places, start=1):
                length = int(size)
                said = self.tokens[start : start + length + 1]
                plain, place = (said & ~BEARS_LOSS).astype(np.int64), np.s_[r, at : at + length]
                inputs[place] = plain[:-1]
                targets[place] = np.where(said[1:] & BEARS_LOSS, plain[1:], IGNORED)
                documents[place] = number
                at += length
        return (inputs, targets, documents) if self.several else (inputs, targets)


def fitted(lengths: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    """How many positions of each are kept, [samples, 1 or 2]: all together at most `room` of a sample."""
    if lengths.shape[1] == 1:
        return np.minimum(lengths, room)
    first = np.minimum(lengths[:, 0], np.maximum(room // 2, room - lengths[:, 1]))
    return np.stack((first, np.minimum(lengths[:, 1], room - first)), axis=1)


def packed(lengths: npt.NDArray[np.int64], kept: npt.NDArray[np.int64], room: int) -> list[tuple[int, ...]]:
    """Which conversations share a row of so many positions: the longest first, each where it leaves the least room."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # positions left -> rows
    rooms: list[int] = []  # those that some row has left, ascending
    for number in kept[np.argsort(-lengths[kept], kind="stable")].tolist():
        length = int(lengths[number])
        fitting = bisect_left(rooms, length)
        if fitting == len(rooms):
            left, row = room, len(rows)
            rows.append([])
        else:
            left = rooms[fitting]
            row = by_room[left].pop()
            if not by_room[left]:
                del rooms[fitting]
        rows[row].append(number)
        left -= length
        if left and not by_room.setdefault(left, []):
            insort(rooms, left)
        if left:
            by_room[left].append(row)
    return [tuple(row) for row in rows]


class Mixed:
    """Samples of several sources, each with its share of every BLOCK of them, in an order of its own in each block."""

    def __init__(self, parts: Sequence[Dataset], weights: Sequence[float], *, global_batch: int, seed: int) -> None:
        """A step of each of the `parts` is one sample."""
        self.parts, self.global_batch, self.seed = parts, global_batch, seed
        bounds = np.rint(np.cumsum((0.0, *weights)) / sum(weights) * BLOCK).astype(np.int64)
        self._counts = np.diff(bounds)
        if not self._counts.all():
            raise ConfigError(f"data.sources: a weight of less than 1/{BLOCK} of all is of no sample")
        self._block: tuple[int, Samples] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, ...]:
        """As Dataset."""
        start = step * self.global_batch
        found = [self._at(position) for position in range(start + first, start + past_last)]
        return tuple(np.concatenate(arrays) for arrays in zip(*found, strict=True))

    def _at(self, position: int) -> tuple[Samples, ...]:
        block, index = divmod(position, BLOCK)
        if self._block[0] != block:
            order = np.repeat(np.arange(len(self.parts)), self._counts)
            self._block = (block, np.random.default_rng((self.seed, len(self.parts), block)).permutation(order))
        part = int(self._block[1][index])
        before = int(np.count_nonzero(self._block[1][:index] == part))
        return self.parts[part].batch(block * int(self._counts[part]) + before, 0, 1)


@dataclass(frozen=True)
class Sides:
    """What a run trains and validates on."""

    training: Dataset
    validation: Dataset
    digest: str  # equal on hosts that hold the same
    talks: tuple[tuple[str, Conversations, Conversations], ...] = ()  # of each source of conversations both sides

    @property
    def said(self) -> list[str]:
        """Sentences on what became of conversations."""
        return [f"{source}: to train on {a.said}; to validate on {b.said}" for source, a, b in self.talks]


def open_sides(
    data: DataSection, *, seq_len: int, global_batch: int, vocabulary: int, cache: Path | None = None
) -> Sides:
    """Both sides of all sources, for a model that knows so many tokens.

    Raises ConfigError for data that cannot be read, give no sample, or have other tokens.
    """
    every = 1 if data.sources else global_batch
    made = [_sides_of(one, _open(one, vocabulary, cache), seq_len, every) for one in data.each]
    if not data.sources:
        return made[0]
    weights = [source.weight for source in data.sources]
    return Sides(
        Mixed([one.training for one in made], weights, global_batch=global_batch, seed=data.seed),
        Mixed([one.validation for one in made], weights, global_batch=global_batch, seed=data.seed),
        digest=hashlib.sha256(" ".join(one.digest for one in made).encode()).hexdigest()[:24],
        talks=tuple(talk for one in made for talk in one.talks),
    )


def _open(data: DataSection, vocabulary: int, cache: Path | None) -> Tokens:
    tokens = open_tokens(data, cache)
    if tokens.vocabulary > vocabulary:
        raise ConfigError(
            f"the data's tokens go up to {tokens.vocabulary - 1}, the model's vocabulary only to {vocabulary - 1}",
            hint="take the model's own tokenizer, or a model with a larger vocabulary",
        )
    return tokens


def _sides_of(data: DataSection, tokens: Tokens, seq_len: int, global_batch: int) -> Sides:
    """Of one source."""
    about: dict[str, Any] = {"seq_len": seq_len, "global_batch": global_batch, "seed": data.seed}
    train, validation = tokens.train, tokens.validation
    if tokens.ends is not None:
        about |= {"long": data.long, "packing": data.packing, "together": tokens.together}
        talks = Conversations(train, tokens.ends[0], data.source, **about)
        held_out = Conversations(validation, tokens.ends[1], data.source, **about)
        return Sides(talks, held_out, tokens.digest, ((data.source, talks, held_out),))
    if min(len(train), len(validation)) <= seq_len:
        raise ConfigError(
            f"'{data.source}' gives {len(train)} tokens to train and {len(validation)} to validate on, too few for "
            f"samples of {seq_len}",
            hint="use more text, a larger data.validation_share, or a smaller model.seq_len",
        )
    about["documents"] = data.packing
    return Sides(PackedTokens(train, **about), PackedTokens(validation, **about), tokens.digest)
