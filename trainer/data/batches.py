"""The global batch of any step, in an order that does not depend on the plan, and each rank's part on its device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hetctl.comm.contract.plan import Plan
from hetctl.comm.operation.device import has_streams, module_of
from hetctl.trainer.data.datasets import Dataset
from hetctl.trainer.model.dropout import draws_of
from hetctl.trainer.model.sample_shares import share
from hetctl.trainer.ranks.groups import Place

T = TypeVar("T")


@dataclass
class MicroBatch:
    """One micro-batch's share of this rank: [samples, seq] each."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None  # which of its row's documents each token is in; None: each row is one
    draws: Tensor | None = None  # what the dropout of each sample follows from; None: nothing is dropped
    reference: Tensor | None = None  # of the last stage's pairs: `ratios` of the model without adapters, once known


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
        dropout_seed: int | None = None,
    ) -> None:
        """With a `dropout_seed` samples of training, and those alone, say what dropout leaves out."""
        self.training, self.validation = training, validation
        self._plan, self._place, self._device = plan, place, device
        self._ahead = Prefetch(
            lambda step: self._cut(training, step, dropout_seed), steps=steps, begin=self._choose_device
        )

    def of_training(self, step: int) -> list[MicroBatch]:
        return [self._to_device(m) for m in self._ahead.get(step)]

    def of_validation(self, step: int) -> list[MicroBatch]:
        assert self.validation is not None
        return [self._to_device(m) for m in self._cut(self.validation, step, None)]

    def follow(self, plan: Plan) -> None:
        """Take the accumulation counts of another plan from the next step on."""
        self._plan = plan
        self._ahead.forget()

    def close(self) -> None:
        """End the thread that makes them."""
        self._ahead.close()

    def _cut(self, dataset: Dataset, step: int, dropout_seed: int | None) -> list[MicroBatch]:
        plan, place = self._plan, self._place
        if place.idle:
            return []
        stage = plan.replicas[place.replica].stages[place.stage]
        offset = sum(r.samples for r in plan.replicas[: place.replica])
        low, high = share(stage.micro_batch_size, stage.width, place.part)
        batch = []
        for k in range(stage.micro_batches):
            start = offset + k * stage.micro_batch_size
            batch.append(MicroBatch(*map(self._pinned, dataset.batch(step, start + low, start + high))))
            if dropout_seed is not None:
                numbers = step * plan.global_batch + torch.arange(start + low, start + high)
                batch[-1].draws = self._pinned(draws_of(numbers, dropout_seed))
        return batch

    def _pinned(self, array: Any) -> Tensor:
        tensor = torch.as_tensor(array)
        return tensor.pin_memory() if has_streams(self._device) else tensor

    def _to_device(self, host: MicroBatch) -> MicroBatch:
        if not has_streams(self._device):
            return host
        parts = (host.inputs, host.targets, host.documents, host.draws)
        return MicroBatch(*(t if t is None else t.to(self._device, non_blocking=True) for t in parts))  # type: ignore[arg-type]

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
