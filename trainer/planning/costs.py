"""Costs: seconds and bytes of each kind of layer (embedding, block, norm + head + loss) on a device.

From the hardware table seconds are FLOPs over sustained FLOPS; a measured profile replaces them per class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.plan import savings
from hetctl.trainer.families.family import NORMS
from hetctl.trainer.families.registry import family_of
from hetctl.trainer.model.block_formats import MOMENT_BYTES, Quantised, row_bytes
from hetctl.trainer.model.memory_limits import CHUNK_BYTES, NARROW
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.model.tensor_cuts import BY_COLUMNS, adapter_parameters
from hetctl.trainer.planning.partition import Floats
from hetctl.trainer.planning.pools import PRECISION_BYTES, Rates
from hetctl.trainer.planning.profile import ClassProfile, SumPoint
from hetctl.trainer.planning.roofline import block_bytes, block_flops, head_bytes
from hetctl.trainer.recipe import Rule

Recompute = Literal["none", "selective", "full"]
USABLE_SHARE = 0.96  # of a device's memory: allocators fragment


@dataclass(frozen=True)
class Mode:
    """What a stage does about memory: activations computed again or kept on the host, optimiser state on the host."""

    recompute: Recompute = "none"
    offload: bool = False
    activations: bool = False  # on the host

    @property
    def savings(self) -> tuple[str, ...]:
        """The same in words."""
        return savings(self.recompute, activations=self.activations, optimizer=self.offload)


MODES = tuple(
    mode
    for offload in (False, True)
    for mode in (*(Mode(r, offload) for r in ("none", "selective", "full")), Mode("none", offload, activations=True))
)
PLAIN = Mode()
# of the shorter one's time, what computation and a collective beside it take from each other: a collective's kernels
# hold multiprocessors and memory bandwidth. Fitted to the fitted half of tests/published/llm-foundry-*.yaml
OVERLAP_COST = 0.3
# moved to make the mask of one value (`dropout.py`), in passes over words of four: 13 read and written, then compared
MASK_BYTES = 13 * 16 // 4 + 3
# an H100 moves so many in the time in which it makes one value of its bytes (docs/benchmarks.md)
MADE_WHOLE_BYTES: dict[Quantised, float] = {"int8": 38.0, "nf4": 36.0}
# no block takes less, half of it each way, where no profile says: torch asks Python at each operation (record 313)
SELECTIVE_S = 0.011
UPDATE_8BIT_BYTES = 320.0  # of a parameter: what an H200 took for Llama-1B, 86 ms where AdamW takes 9 (120 by counting)
READ_TOGETHER = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # which reads the same
UNDER_WAY = 4  # blocks whose activations are on a device while they are kept on the host: computed, leaving, coming


@dataclass(frozen=True)
class ValueBytes:
    """Bytes of one value in computation, and of one parameter's whole state (weights, gradients, optimiser)."""

    compute: int = 2
    weights: int = 4
    gradients: int = 4
    optimizer: float = 8
    over_replicas: bool = False  # replicas share out the update: gradients go one way between them, weights come back
    written: int = 12  # of weights and optimiser in a checkpoint, where moments are whole
    updating: float | None = None  # read and written by an update, where it is not each value of the state once

    @classmethod
    def of(cls, precision: Precision, optimizer: Rule = "adamw", *, over_replicas: bool = False) -> ValueBytes:
        """Of a precision of computation, beside masters of 4 bytes at least and the optimiser's two moments, if any."""
        width = 8 if precision == "fp64" else 4
        moments = 0 if optimizer == "sgd" else 2
        made = cls(PRECISION_BYTES[precision], width, width, moments * width, over_replicas, width + moments * width)
        if optimizer == "adamw_8bit":
            return replace(made, optimizer=moments * MOMENT_BYTES, updating=UPDATE_8BIT_BYTES)
        return made

    @property
    def exchanged(self) -> int:
        """What replicas exchange in a step, there and back."""
        return self.gradients + (self.compute if self.over_replicas else self.gradients)

    @property
    def copy(self) -> int:
        """A second copy of the weights in the precision of computation, where the two differ."""
        return 0 if self.compute == self.weights else self.compute


@dataclass(frozen=True)
class Seconds:
    """Forward and backward time of one micro-batch."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def with_forwards(self, count: int) -> Seconds:
        return Seconds(count * self.forward, self.backward)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward)


NOTHING = Seconds(0.0, 0.0)


class ModeCosts(NamedTuple):
    """One block on one rank under each of some modes: arrays [kinds, 1, modes, 1]."""

    forward: Floats  # seconds of a micro-batch
    backward: Floats
    update: Floats  # seconds per parameter and step; shards divide it
    state: Floats  # bytes per parameter: weights, gradients, optimiser; shards divide it
    held: Floats  # bytes of a micro-batch until its backward
    working: Floats  # bytes that exist for a moment: blocks computed again or on their way
    host_state: Floats  # bytes per parameter on the host; shards divide it
    host_held: Floats  # bytes of a micro-batch on the host until its backward


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """What the layers of one model cost at one sequence length. All `samples` are per rank and micro-batch."""

    shape: ModelShape
    seq_len: int
    value_bytes: ValueBytes = ValueBytes()
    profiles: tuple[ClassProfile, ...] = ()  # measured, of this model and length
    native_sums: tuple[SumPoint, ...] = ()  # measured
    referred: bool = False  # preferences: each forward is made once more, by the model without its adapters
    selective_s: float = 0.0  # SELECTIVE_S where blocks are not compiled
    recomputes_all: bool = False  # full recomputation makes what backward does not ask for, too: Megatron-LM's does
    overlap_cost: float = 0.0  # OVERLAP_COST where weights are cut for certain: the search's may still stay whole
    whole: bool = False  # holders of a layer share out optimiser state only: weights and gradients stay whole

    def measured(self, rates: Rates, tensor: int = 1) -> ClassProfile | None:
        """What was measured of such a device as one of a tensor group: exactly that, otherwise scaled from the largest
        group up to it, since small parts are slower than their share, at the nearest speed."""
        if not self.profiles:
            return None
        key = (rates.base, rates.speed, tensor)
        if key not in self._measured:
            same = [e for e in self.profiles if e.device_class == rates.base and e.tensor <= tensor]
            near = min(same, key=lambda e: (-e.tensor, abs(math.log(e.speed / rates.speed))), default=None)
            self._measured[key] = near.scaled(rates.speed, tensor) if near else None
        return self._measured[key]

    @cached_property
    def _measured(self) -> dict[tuple[str, float, int], ClassProfile | None]:
        return {}

    def block(self, rates: Rates, samples: float, *, tensor: int = 1, mode: Mode = PLAIN) -> Seconds:
        """One block. Backward is twice forward, plus what the mode computes again."""
        plain, before = self._block(rates, samples, tensor), self._reference(rates, samples, tensor)
        if mode.activations:  # copied beside the computation, out and back
            copies = self.activation_bytes(samples, tensor=tensor) / rates.host_bytes_per_s
            return Seconds(max(plain.forward, copies) + before, max(plain.backward, copies))
        if mode.recompute == "none":
            return Seconds(plain.forward + before, plain.backward)
        if mode.recompute == "full":
            again = plain.forward - self._not_again * self._without_adapters(rates, samples, tensor).forward
        else:
            again = samples * self.seq_len * self._made_again_bytes(tensor) / rates.memory_bytes_per_s
            again += self._row_norms(rates, tensor) + self._dropout(rates, samples, tensor).forward
            again += self._of_adapters(rates, samples, tensor).forward
        least = self._launches(rates, tensor, mode.recompute)
        return Seconds(max(plain.forward, least.forward) + before, max(plain.backward + again, least.backward))

    def _launches(self, rates: Rates, tensor: int, recompute: Recompute) -> Seconds:
        """What a host takes at least to launch an eager block's passes that compute something again: as measured beside
        its layers; else what one host took where torch asks at each operation, and nothing where it does not."""
        known = self.measured(rates, tensor) if self.selective_s else None
        if known is None or known.launches is None:
            half = self.selective_s / 2 if recompute == "selective" else 0.0
            return Seconds(half, half)
        point = known.launches.full if recompute == "full" else known.launches.selective
        return Seconds(point.forward_s, point.backward_s)

    def weight_gradients(self, rates: Rates, samples: float, *, tensor: int = 1) -> float:
        """Of a block's backward, the half of its matrix products that makes weight gradients: attention has none."""
        plain = self._block(rates, samples, tensor).backward - 2 * self._sum_over_tensor(rates, samples, tensor)
        return self._of_adapters(rates, samples, tensor).forward if self.frozen else plain / 2 * self._matrix_share

    @cached_property
    def _not_again(self) -> float:
        """Of a block's forward what full recomputation leaves out: the MLP's last product, which backward does not ask
        for unless a norm or an adapter follows (torch.utils.checkpoint stops at the last tensor that was kept)."""
        s, family = self.shape, family_of(self.shape.family)
        if self.recomputes_all or NORMS[family.norms][-1] or family.block is not None or "down_proj" in s.adapted:
            return 0.0
        return 2 * s.hidden * s.intermediate / s.block_flops(self.seq_len)

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights stay as they are."""
        return self.shape.adapters is not None

    @property
    def tied_bytes(self) -> int:
        """Of the gradient that stages sum which hold one matrix as embedding and as head; 0 where none is trained."""
        tied = self.shape.tied_embeddings and not self.frozen
        return self.shape.vocab * self.shape.hidden * self.value_bytes.gradients if tied else 0

    @cached_property
    def _matrix_share(self) -> float:
        """Of a block's FLOPs those of its matrix products."""
        s = self.shape
        return 2 * (s.attention_parameters + s.mlp_parameters) / s.block_flops(self.seq_len)

    def _of_adapters(self, rates: Rates, samples: float, tensor: int) -> Seconds:
        """What a block's adapters take: bytes moved, since their products are narrow. Forward reads the input, writes
        the product and adds it; backward does so with two gradients. Magnitudes read the sum and write it again."""
        outs = 6 if self._has_magnitudes else 4
        moved = sum(into + outs * out for out, into in (self.shape.projections[name] for name in self.shape.adapted))
        once = samples * self.seq_len * moved * self.value_bytes.compute / tensor / rates.memory_bytes_per_s
        return Seconds(once, 2 * once)

    @property
    def _has_magnitudes(self) -> bool:
        return self.shape.adapters is not None and self.shape.adapters.dora

    def _row_norms(self, rates: Rates, tensor: int) -> float:
        """Seconds of a block's forward for norms of rows: each adapted weight is read, and written and read again with
        its adapter's product. The sums over a tensor group are a launch each."""
        if not self._has_magnitudes:
            return 0.0
        moved = 3 * sum(math.prod(self.shape.projections[name]) for name in self.shape.adapted)
        sums = sum(name in BY_COLUMNS for name in self.shape.adapted) if tensor > 1 else 0
        seconds = moved * self.value_bytes.compute / tensor / rates.memory_bytes_per_s + sums * rates.launch_s
        return seconds + self._made_whole(rates, tensor, self.shape.adapted)

    def _made_whole(self, rates: Rates, tensor: int, names: Iterable[str]) -> float:
        """Seconds to make numbers of the bytes of these projections' weights, if they are quantised."""
        if self.shape.quantised is None:
            return 0.0
        values = sum(math.prod(self.shape.projections[name]) for name in names)
        return values / tensor * MADE_WHOLE_BYTES[self.shape.quantised] / rates.memory_bytes_per_s

    @property
    def _drops(self) -> bool:
        return self.shape.adapters is not None and self.shape.adapters.dropout > 0

    def _reference(self, rates: Rates, samples: float, tensor: int) -> float:
        """Seconds of a block's forward without adapters, where there is one more of it."""
        if not self.referred:
            return 0.0
        own = self._without_adapters(rates, samples, tensor).forward
        own += self._made_whole(rates, tensor, self.shape.projections)
        return own + 2 * self._sum_over_tensor(rates, samples, tensor)

    def _dropout(self, rates: Rates, samples: float, tensor: int) -> Seconds:
        """What leaving out takes in a block: its masks are made, and multiply inputs and their gradients."""
        if not self._drops:
            return NOTHING
        values = samples * self.seq_len * self._values_in(self.shape.adapted, tensor) / rates.memory_bytes_per_s
        multiplied = 3 * self.value_bytes.compute
        return Seconds(values * (MASK_BYTES + multiplied), values * multiplied)

    def embedding(self, rates: Rates, samples: float, *, tensor: int = 1) -> Seconds:
        """Looking rows up and adding gradients to them: bytes moved, no FLOPs."""
        shared = Seconds(self._sum_over_tensor(rates, samples, tensor), 0.0)
        whole, kept = self.measured(rates, tensor), 0.0 if self.frozen else 1.0
        if measured := whole if whole and whole.sums else self.measured(rates):  # every rank looks all tokens up
            forward, backward = measured.at("embedding", samples)
            return (Seconds(forward, kept * backward) + shared).with_forwards(1 + self.referred)
        row = samples * self.seq_len * self.shape.hidden
        once = row * 2 * self.value_bytes.compute / rates.memory_bytes_per_s
        back = row * 2 * self.value_bytes.gradients / rates.memory_bytes_per_s
        made = Seconds(once + rates.launch_s, kept * (back + rates.launch_s)) + shared
        return made.with_forwards(1 + self.referred)

    def head(self, rates: Rates, samples: float, *, tensor: int = 1) -> Seconds:
        """Final norm, LM head and loss: 1.8-2.5 blocks of common models. Half of backward is of the weights."""
        shared = Seconds(0.0, self._sum_over_tensor(rates, samples, tensor))
        kept = 0.5 if self.frozen else 1.0
        if measured := self.measured(rates, tensor):
            forward, backward = measured.at("head", samples)
            return (Seconds(forward, kept * backward) + shared).with_forwards(1 + self.referred)
        forward = samples * self.seq_len * self._head_seconds_per_token(rates, tensor)
        made = Seconds(forward + rates.launch_s, kept * (2 * forward + 2 * rates.launch_s)) + shared
        return made.with_forwards(1 + self.referred)

    def update(self, rates: Rates, parameters: float, *, offload: bool = False) -> float:
        """Seconds of the optimiser step over so many parameters: measured, or bytes of state read and written."""
        measured = self.measured(rates)
        n = self.value_bytes
        if measured is not None and n.updating is None:
            if offload and (host := measured.offloaded):
                return parameters * (host.copies_s + rates.host_devices * host.alone_s)
            if measured.update_s is not None and not offload:
                return parameters * measured.update_s
        moved = 2 * (n.weights + n.gradients + n.optimizer) if n.updating is None else n.updating
        return parameters * moved / (rates.host_bytes_per_s if offload else rates.memory_bytes_per_s)

    def boundary_bytes(self, samples: float) -> float:
        """Bytes of hidden states (or of their gradients) that cross a stage boundary, for so many samples."""
        return samples * self.seq_len * self.shape.hidden * self.value_bytes.compute

    def hop_bytes(self, samples: float) -> float:
        """The same of one direction in a step's mean: a reference's states cross once more, its gradients never do."""
        return self.boundary_bytes(samples) * (1.5 if self.referred else 1.0)

    @cached_property
    def _block(self) -> Callable[[Rates, float, int], Seconds]:
        """One block that keeps everything, each worked out once."""
        return cache(self._new_block)

    def _without_adapters(self, rates: Rates, samples: float, tensor: int) -> Seconds:
        """One block whose weights are trained, without sums over a tensor group."""
        if measured := self.measured(rates, tensor):
            return Seconds(*measured.at("block", samples))
        forward = samples * self.seq_len * self._block_seconds_per_token(rates, tensor)
        return Seconds(forward + rates.launch_s, 2 * forward + 2 * rates.launch_s)

    def _new_block(self, rates: Rates, samples: float, tensor: int) -> Seconds:
        plain = self._without_adapters(rates, samples, tensor)
        if self.frozen:
            plain = Seconds(plain.forward, plain.backward * (1 - self._matrix_share / 2))
            if self._drops and self._has_magnitudes:  # the weight's product of what is dropped, and of what is not
                product = plain.forward * self._matrix_share
                plain += Seconds(product + 2 * self._sum_over_tensor(rates, samples, tensor), product)
            plain += self._of_adapters(rates, samples, tensor) + self._dropout(rates, samples, tensor)
            made_whole = self._made_whole(rates, tensor, self.shape.projections)
            plain += Seconds(made_whole + self._row_norms(rates, tensor), made_whole)
        sums = 2 * self._sum_over_tensor(rates, samples, tensor)  # after attention and MLP; backward the same
        return plain + Seconds(sums, sums)

    def _block_seconds_per_token(self, rates: Rates, tensor: int) -> float:
        """One block's forward, by the rates of the hardware table; a speed given by hand is of this very model."""
        if not rates.matmul_flops_per_s:
            return self.shape.block_flops(self.seq_len) / tensor / rates.flops_per_s
        moved = block_bytes(self.shape, self.value_bytes.compute, tensor) / (rates.speed * rates.memory_bytes_per_s)
        return block_flops(self.shape, self.seq_len) / tensor / rates.matmul_flops_per_s + moved

    def _head_seconds_per_token(self, rates: Rates, tensor: int) -> float:
        """The head's forward, likewise."""
        if not rates.matmul_flops_per_s:
            return self.shape.head_flops() / tensor / rates.flops_per_s
        moved = head_bytes(self.shape, self.value_bytes.compute, tensor) / (rates.speed * rates.memory_bytes_per_s)
        return self.shape.head_flops() / tensor / rates.matmul_flops_per_s + moved

    def _sum_over_tensor(self, rates: Rates, samples: float, tensor: int) -> float:
        """Seconds to sum hidden states over a tensor group: measured between two, and for more of them as the bytes on
        a ring, 2(n-1)/n, grow; otherwise those bytes at the table's rate, and a launch."""
        measured = self.measured(rates, tensor)
        if tensor == 1 or (measured is not None and measured.sums):
            return 0.0
        if self.native_sums:
            return 2 * (tensor - 1) / tensor * seconds_of(self.native_sums, self.boundary_bytes(samples))
        return 2 * (tensor - 1) / tensor * self.boundary_bytes(samples) / rates.native_bytes_per_s + rates.launch_s

    # bytes

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        return self.shape.block_parameters

    def stage_parameters(self, layers: int, *, first: bool, last: bool) -> int:
        """Parameters that a stage of so many blocks holds; a tied head on another stage is held twice."""
        count = layers * self.block_parameters
        count += self.shape.embedding_parameters if first else 0
        if last:
            tied = self.shape.tied_embeddings and first
            count += self.shape.norm_parameters if tied else self.shape.head_parameters
        return count

    def trained_on(self, tensor: int) -> float:
        """Of the parameters of one block on a rank of a tensor group those that are trained."""
        return adapter_parameters(self.shape, degree=tensor) if self.frozen else self.block_parameters_on(tensor)

    def frozen_bytes_on(self, tensor: int) -> float:
        """Bytes of the others: weights to compute with, or what these are made of."""
        if not self.frozen:
            return 0.0
        whole = self.block_parameters_on(tensor) * self.value_bytes.compute
        if kind := self.shape.quantised:
            for name, (out, into) in self.shape.projections.items():
                parts = min(tensor, self.shape.kv_heads) if name in ("k_proj", "v_proj") else tensor
                whole -= out * (into * self.value_bytes.compute - row_bytes(kind, into)) / parts
        return whole

    @cached_property
    def block_parameters_on(self) -> Callable[[int], float]:
        """(tensor) -> a block's own parameters on each rank of a tensor group, worked out once."""
        return cache(self._block_parameters_on)

    def _block_parameters_on(self, tensor: int) -> float:
        """Norms are whole, too few key-value heads copied."""
        s = self.shape
        kept = s.block_norms * s.norm_parameters + s.hidden * (s.out_bias + s.mlp_bias)
        kept += 0 if s.heads_normed_together else sum(s.qk_norm_sizes)
        copied = s.kv_heads * s.head_dim * (2 * (s.hidden + s.qkv_bias) + s.heads_normed_together)
        return kept + (self.block_parameters - kept - copied) / tensor + copied / min(tensor, s.kv_heads)

    def state_bytes_per_parameter(self, *, offload: bool = False) -> float:
        """Weights, gradients and optimiser state of one parameter; shards divide all three."""
        n = self.value_bytes
        resident = n.gradients + (0 if offload else n.weights + n.optimizer)
        copy = n.compute if offload else n.copy
        return resident + copy

    def activation_bytes(self, samples: float, *, tensor: int = 1, mode: Mode = PLAIN) -> float:
        """What one block keeps of one micro-batch until its backward."""
        s, c = self.shape, self.value_bytes.compute
        tokens = samples * self.seq_len
        if mode.activations:
            return 0.0
        if mode.recompute == "full":
            return tokens * c * s.hidden
        cut = c * (self._kept_values - 4 * s.hidden)  # norms' inputs and outputs are whole on every rank
        made_again = 2 if s.gated else 1  # vectors of the intermediate size: activation and product, if gated
        spared = c * (2 * s.hidden + made_again * s.intermediate if mode.recompute == "selective" else self._unread)
        # the gradients of magnitudes ask for the sums that they multiply, and wide factors' products are not made again
        wide = mode.recompute == "selective" and self.shape.adapters and self.shape.adapters.rank > NARROW
        summed = c * self._values_out(tensor) if self._has_magnitudes or wide else 0.0
        keeps_masks = self._drops and mode.recompute == "none"
        dropped = 2 * c * self._values_in(self.shape.adapted, tensor) if keeps_masks else 0.0
        return tokens * (4 * c * s.hidden + cut / tensor - spared / tensor + summed + dropped)

    def backward_bytes(self, samples: float, *, tensor: int = 1) -> float:
        """Gradients that exist for a moment in one block's backward, most where the MLP's inner vectors have theirs.

        Ranks of pipelines held so much more than without them, within 0.2 GiB (docs/benchmarks/311).
        """
        inner = (3 if self.shape.gated else 2) * self.shape.intermediate / tensor
        return samples * self.seq_len * self.value_bytes.compute * (inner + 3 * self.shape.hidden)

    def put_off_bytes(self, samples: float, *, tensor: int = 1) -> float:
        """What one block keeps of one micro-batch from a split backward to its weight gradients: what the trained
        projections read, and the gradients of what they put out."""
        s, ranks = self.shape, self.shape.adapters.rank * len(self.shape.adapted) if self.shape.adapters else 0
        trained = s.adapted or tuple(s.projections)
        once = {READ_TOGETHER.get(name, name): name for name in trained}.values()
        values = self._values_in(trained if self._drops else once, tensor) + 2 * ranks + self._values_out(tensor)
        return samples * self.seq_len * self.value_bytes.compute * values

    def _values_in(self, projections: Iterable[str], tensor: int) -> float:
        """Per token what these projections of a block read on a rank of a tensor group."""
        s = self.shape
        return sum(s.projections[n][1] / (tensor if n in BY_COLUMNS else 1) for n in projections)

    def _values_out(self, tensor: int) -> float:
        """The same of what a block's trained projections put out."""
        s = self.shape
        return sum(s.projections[n][0] / (1 if n in BY_COLUMNS else tensor) for n in s.adapted or s.projections)

    def logits_bytes(self, samples: float, *, tensor: int = 1) -> float:
        """Logits and their gradients, which exist only for a moment, of as many tokens as the loss takes at a time.

        Where these are not all, the gradient of a head that is trained grows beside them in fp32.
        """
        values, most = samples * self.seq_len * self.shape.vocab / tensor, CHUNK_BYTES / 4
        beside = 4 * self.shape.vocab * self.shape.hidden / tensor if values > most and not self.shape.adapters else 0.0
        return min(values, most) * (2 * 4 + self.value_bytes.compute) + beside

    def gathered_bytes(self, *, tensor: int = 1, last: bool) -> float:
        """Whole weights and gradients of a sharded stage: the unit that computes, and the next or the last one."""
        head = self.shape.head_parameters / tensor if last else 0.0
        frozen, trained, n = self.frozen_bytes_on(tensor), self.trained_on(tensor), self.value_bytes
        if self.frozen:
            return max(frozen, head * n.compute) + frozen + 2 * trained * (n.compute + n.gradients)
        return (max(trained, head) + trained) * (n.compute + n.gradients)

    def under(self, modes: tuple[Mode, ...], rates: Rates, kinds: Iterable[tuple[float, int]]) -> ModeCosts:
        """One block under each of some modes, for each kind: so many samples in a tensor group of so many."""
        one = self._under(modes)
        return ModeCosts(*np.stack([one(rates, *kind) for kind in kinds], axis=1)[:, :, None, :, None])

    @cached_property
    def _under(self) -> Callable[[tuple[Mode, ...]], Callable[[Rates, float, int], Floats]]:
        """(modes) -> (rates, samples, tensor) -> [fields of ModeCosts, modes], each worked out once."""
        return cache(lambda modes: cache(partial(self._new_under, modes)))

    def _new_under(self, modes: tuple[Mode, ...], rates: Rates, samples: float, tensor: int) -> Floats:
        blocks = [self.block(rates, samples, tensor=tensor, mode=mode) for mode in modes]
        kept, n = self.activation_bytes(samples, tensor=tensor), self.value_bytes
        under_way = [UNDER_WAY if m.activations else int(m.recompute != "none") for m in modes]
        passing = self.backward_bytes(samples, tensor=tensor)
        columns = (
            [b.forward for b in blocks],
            [b.backward for b in blocks],
            [self.update(rates, 1.0, offload=m.offload) for m in modes],
            [self.state_bytes_per_parameter(offload=m.offload) for m in modes],
            [self.activation_bytes(samples, tensor=tensor, mode=m) for m in modes],
            [count * kept + self._passing_bytes / tensor + passing for count in under_way],
            [float(n.weights + n.optimizer) if m.offload else 0.0 for m in modes],
            [kept if m.activations else 0.0 for m in modes],
        )
        return np.array(columns, dtype=np.float64)

    @cached_property
    def _kept_values(self) -> int:
        """Values per token that a block's backward needs, attention without its square (flash).

        A gated block keeps gate, its activation, up and their product: so two H200s held 1.22 times what three gave.
        """
        s = self.shape
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        gates = 4 if s.gated else 2
        normed = (q + kv if s.qk_norm_sizes else 0) + (2 if s.block_norms > 2 else 0) * s.hidden
        between = s.adapters.rank * len(s.adapted) if s.adapters else 0
        return 4 * s.hidden + 2 * q + 2 * kv + gates * s.intermediate + normed + between

    @cached_property
    def _passing_bytes(self) -> int:
        """Matrices that exist for a moment: a quantised one made whole, and an adapted one with its adapter's product
        while its rows' norms are taken."""
        s, c = self.shape, self.value_bytes.compute
        of = {name: c * math.prod(size) for name, size in s.projections.items()}
        whole = max(of.values()) if s.quantised else 0
        return whole + max((of[name] for name in s.adapted if self._has_magnitudes), default=0)

    @cached_property
    def _unread(self) -> int:
        """Values per token that no weight gradient asks for: inputs of projections that are frozen and not adapted."""
        s, lacks = self.shape, self.frozen
        attention, mlp = (
            lacks and not any(f"{name}_proj" in s.adapted for name in names) for names in ("qkv", ("gate", "up"))
        )
        return (attention + mlp) * s.hidden + (lacks and "down_proj" not in s.adapted) * s.intermediate

    def _made_again_bytes(self, tensor: int) -> float:
        """Bytes per token that move as selective recomputation makes again what it does not keep.

        One operation after the other: the residual stream's sum (two read, one written), norms, queries and keys turned
        (half of them negated, joined, two products, a sum), the activation and its product. Compiled blocks read norms'
        and the gated product's inputs once, and write once.
        """
        s, c = self.shape, self.value_bytes.compute
        if not self.selective_s:
            return 2 * c * (2 * s.hidden + s.intermediate / tensor)
        turned = 0.0 if s.positions else 10 * s.rotated
        normed = 2 if s.qk_norm_sizes else 0
        cut = (turned + normed) * (s.heads + s.kv_heads) * s.head_dim + (5 if s.gated else 2) * s.intermediate
        return c * ((3 + 2 * s.block_norms) * s.hidden + cut / tensor)


def usable_bytes(rates: Rates) -> float:
    """Bytes of a device that a plan may count on."""
    return rates.memory_bytes * USABLE_SHARE - rates.runtime_bytes


def seconds_of(points: Sequence[SumPoint], nbytes: float) -> float:
    """Linear between points; the least of them below, the last one's rate above."""
    for a, b in pairwise(points):
        if nbytes < b.nbytes:
            part = max(nbytes - a.nbytes, 0) / (b.nbytes - a.nbytes)
            return a.seconds + part * (b.seconds - a.seconds)
    return points[-1].seconds * max(nbytes / points[-1].nbytes, 1.0)
