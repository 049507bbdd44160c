"""The best of a run's validations so far, which checkpoints carry: whoever goes on knows what went before."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BestSoFar:
    """The lowest validation loss, the step after which it was, and how many validations since were no better."""

    step: int = 0
    loss: float | None = None  # None: no validation yet, or none with a finite loss
    since: int = 0
    seen: int = 0  # the step of the latest validation: none counts twice

    def after(self, step: int, loss: float | None) -> BestSoFar:
        """With the validation after `step` steps. Equal is no better; a loss that is not finite never is."""
        if step == self.seen:
            return self
        if loss is not None and math.isfinite(loss) and (self.loss is None or loss < self.loss):
            return BestSoFar(step, loss, 0, step)
        return replace(self, since=self.since + 1, seen=step)


NONE_YET = BestSoFar()
