"""The global batch of any step, in an order that does not depend on the plan, and each rank's part on its device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan
from hetctl.comm.operation.device import has_streams, module_of
from hetctl.trainer.data.tokens import TokenArray
from hetctl.trainer.model.sample_shares import share
from hetctl.trainer.ranks.groups import Place

Samples = npt.NDArray[np.int64]
T = TypeVar("T")


class Dataset(Protocol):
    """Where a step's samples come from."""

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, Samples]:
        """Inputs and targets [past_last - first, seq_len] of those samples of a step's global batch."""
        ...


class PackedTokens:
    """Windows of a flat token array in an order shuffled once per epoch; targets are the next tokens."""

    def __init__(self, tokens: TokenArray, *, seq_len: int, global_batch: int, seed: int) -> None:
        self.tokens, self.seq_len, self.global_batch, self.seed = tokens, seq_len, global_batch, seed
        self.windows = (len(tokens) - 1) // seq_len
        if self.windows < 1:
            raise ConfigError(
                f"the text is {len(tokens)} tokens, too short for one sample of {seq_len}",
                hint="use more text or a smaller model.seq_len",
            )
        self._epoch: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int, first: int, past_last: int) -> tuple[Samples, Samples]:
        numbers = [self._window(step * self.global_batch + i) for i in range(first, past_last)]
        starts = np.asarray(numbers, dtype=np.int64)[:, None] * self.seq_len
        rows = self.tokens[starts + np.arange(self.seq_len + 1)].astype(np.int64)
        return rows[:, :-1], rows[:, 1:]

    def _window(self, position: int) -> int:
        epoch, index = divmod(position, self.windows)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self.windows))
        return int(self._epoch[1][index])


@dataclass
class MicroBatch:
    """One micro-batch's share of this rank: inputs [samples, seq] and targets [samples, seq]."""

    inputs: Tensor
    targets: Tensor


class Batches:
    """This rank's micro-batches of any step: its replica's share of the samples, cut by size, then by width."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        device: torch.device,
        *,
        training: Dataset,
        validation: Dataset | None,
        steps: int,
    ) -> None:
        self.training, self.validation = training, validation
        self._plan, self._place, self._device = plan, place, device
        self._ahead = Prefetch(lambda step: self._cut(training, step), steps=steps, begin=self._choose_device)

    def of_training(self, step: int) -> list[MicroBatch]:
        return [self._to_device(m) for m in self._ahead.get(step)]

    def of_validation(self, step: int) -> list[MicroBatch]:
        assert self.validation is not None
        return [self._to_device(m) for m in self._cut(self.validation, step)]

    def follow(self, plan: Plan) -> None:
        """Take the accumulation counts of another plan from the next step on."""
        self._plan = plan
        self._ahead.forget()

    def close(self) -> None:
        """End the thread that makes them."""
        self._ahead.close()

    def _cut(self, dataset: Dataset, step: int) -> list[MicroBatch]:
        plan, place = self._plan, self._place
        if place.idle:
            return []
        stage = plan.replicas[place.replica].stages[place.stage]
        offset = sum(r.samples for r in plan.replicas[: place.replica])
        low, high = share(stage.micro_batch_size, stage.width, place.part)
        batch = []
        for k in range(stage.micro_batches):
            start = offset + k * stage.micro_batch_size
            inputs, targets = dataset.batch(step, start + low, start + high)
            batch.append(MicroBatch(self._pinned(inputs), self._pinned(targets)))
        return batch

    def _pinned(self, array: Any) -> Tensor:
        tensor = torch.as_tensor(array)
        return tensor.pin_memory() if has_streams(self._device) else tensor

    def _to_device(self, host: MicroBatch) -> MicroBatch:
        if not has_streams(self._device):
            return host
        inputs, targets = (t.to(self._device, non_blocking=True) for t in (host.inputs, host.targets))
        return MicroBatch(inputs, targets)

    def _choose_device(self) -> None:
        """Pinning in a thread that has chosen none would make a context on the first device."""
        module_of(self._device).set_device(self._device)


class Prefetch(Generic[T]):
    """Calls `make(step)` one step ahead in a thread of its own; any step may be asked for."""

    def __init__(self, make: Callable[[int], T], *, steps: int, begin: Callable[[], None] | None = None) -> None:
        """`begin` is called first in the thread (to choose its device)."""
        self._make, self._steps = make, steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data", initializer=begin)
        self._ahead: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """The batch of `step`; what went wrong in making it is raised here."""
        held, self._ahead = self._ahead, None
        batch = held[1].result() if held and held[0] == step else self._make(step)
        if step + 1 < self._steps:
            self._ahead = (step + 1, self._thread.submit(self._make, step + 1))
        return batch

    def forget(self) -> None:
        """What is being made is for another share of the work: throw it away."""
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

    def close(self) -> None:
        """End the thread; what it is making is thrown away."""
        self._thread.shutdown(wait=True, cancel_futures=True)
