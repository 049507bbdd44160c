"""fp16's loss scale: what the loss is multiplied with, so that small gradients are not lost below 6e-8.

As in Micikevicius et al. (arXiv 1710.03740): halved, and the step skipped, when a gradient leaves fp16; doubled after
many steps without. Always a power of two, so that nothing else is rounded. All ranks have the same: it follows from
the step's agreed figures alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetctl.comm.contract.errors import WorkFailed
from hetctl.trainer.recipe import TrainSection

START = 2.0**16  # of a sample's mean loss, whatever the batch is
STEPS_TO_DOUBLE = 2000


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step, and how many finite steps were made with it."""

    value: float = START
    finite_steps: int = 0

    def after(self, step: int, *, finite: bool) -> LossScale:
        """The scale after a step. Raises WorkFailed where the gradient is not finite however small the scale is."""
        if finite:
            done = self.finite_steps + 1
            return LossScale(2 * self.value) if done >= STEPS_TO_DOUBLE else LossScale(self.value, done)
        if self.value < 2:
            raise WorkFailed(
                f"the gradient is not finite at step {step + 1}, though fp16's loss scale is down to {self.value:g}",
                hint="lower optimizer.lr, or train.precision=fp32",
            )
        return LossScale(self.value / 2)


def first_scale(train: TrainSection) -> LossScale | None:
    """What a run begins with; None in precisions that need no scale."""
    if train.precision != "fp16":
        return None
    return LossScale() if train.loss_scale == "auto" else LossScale(train.loss_scale)
