"""Direct preference optimisation (DPO, arXiv 2305.18290, equation 7): the loss of pairs, and what their tokens weigh.

A pair's loss is -log sigmoid(beta * m) where m is by how much more than the reference the model prefers the chosen
answer. Its gradient is a weighted sum of those of the token losses, beta * sigmoid(-beta * m) times 1 (chosen) or -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Preferences:
    """The pairs of a micro-batch, from its `documents` [samples, seq]: 2k - 1 is the chosen one of pair k, 2k the
    rejected one, 0 is none."""

    beta: float
    documents: Tensor

    def ratios(self, losses: Tensor) -> Tensor:
        """log p(chosen) - log p(rejected) of each pair, from token losses [samples, seq]: [samples, seq], fp64."""
        found = torch.zeros_like(losses, dtype=torch.float64)  # at most half as many pairs; none is at place 0
        return found.scatter_add_(1, self._pairs, (losses * -self._signs).double())

    def weights(self, losses: Tensor, reference: Tensor) -> Tensor:
        """The derivative of all pairs' losses by each token's loss, [samples, seq], in the precision of the losses."""
        pull = self.beta * torch.sigmoid(-self._margins(losses, reference))
        return pull.gather(1, self._pairs).to(losses.dtype) * self._signs

    def figures(self, losses: Tensor, reference: Tensor) -> Tensor:
        """Sums over all pairs, fp64: their losses, how many there are and are preferred rightly, and their margins."""
        margins = self._margins(losses, reference)
        there = torch.arange(margins.shape[1], device=margins.device)
        there = (there > 0) & (there <= self._pairs.amax(1, keepdim=True))
        return torch.stack([(x * there).sum() for x in (-F.logsigmoid(margins), there, margins > 0, margins)])

    def _margins(self, losses: Tensor, reference: Tensor) -> Tensor:
        """How much more is chosen than by the `reference`, as both were given by `ratios`, times beta."""
        return self.beta * (self.ratios(losses) - reference)

    @property
    def _pairs(self) -> Tensor:
        return (self.documents + 1) // 2

    @property
    def _signs(self) -> Tensor:
        """1 in chosen documents, -1 in rejected ones, 0 in none."""
        return (self.documents > 0) * (2 * (self.documents % 2) - 1)
