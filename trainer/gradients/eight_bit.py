"""AdamW whose moments are kept in 8 bits (arXiv 2110.02861), made whole for the update of one part after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hetctl.trainer.model.block_formats import MOMENT_BLOCK
from hetctl.trainer.model.quantised import nearest_level

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
AT_ONCE = 1 << 24  # values of a part: a multiple of MOMENT_BLOCK


class EightBit:
    """Flat values: a code for each, and for every MOMENT_BLOCK of them the one of largest magnitude.

    That one is kept as it is, with its sign, so that values which were read come back as the same codes.
    """

    def __init__(self, values: Tensor, *, signed: bool) -> None:
        self.size, self.dtype, self.signed = len(values), values.dtype, signed
        blocks = -(-self.size // MOMENT_BLOCK)
        self.codes = torch.zeros(blocks, MOMENT_BLOCK, dtype=torch.uint8, device=values.device)
        self.extremes = torch.zeros(blocks, 1, device=values.device)
        for first in range(0, self.size, AT_ONCE):
            self.put(first, values[first : first + AT_ONCE])

    def __getitem__(self, part: slice) -> Tensor:
        """These values, made anew."""
        first, past, _ = part.indices(self.size)
        blocks = slice(first // MOMENT_BLOCK, -(-past // MOMENT_BLOCK))
        codes = self.codes[blocks]
        levels = _levels(self.signed, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)
        begin = first - blocks.start * MOMENT_BLOCK
        return levels.mul_(self.extremes[blocks]).flatten()[begin : begin + past - first].to(self.dtype)

    def put(self, first: int, values: Tensor) -> None:
        """Keep values from `first` on, which begins a block; the last block is theirs to its end."""
        whole = torch.nn.functional.pad(values.float(), (0, -len(values) % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
        extremes = whole.gather(1, whole.abs().argmax(1, keepdim=True))
        ratios = whole / extremes.where(extremes != 0, 1)
        blocks = slice(first // MOMENT_BLOCK, first // MOMENT_BLOCK + len(whole))
        self.codes[blocks] = nearest_level(ratios, _levels(self.signed, values.device))
        self.extremes[blocks] = extremes


class AdamW8bit(torch.optim.AdamW):
    """On flat parameters; those of a group that `is_small` keep their moments as AdamW does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update, as AdamW makes it of the moments that the last one left."""
        assert closure is None, "gradients are there before an update"
        for group in self.param_groups:
            for master in group["params"]:
                self._update(master, group)

    def pack(self, master: Tensor) -> None:
        """Keep in 8 bits what `state` holds whole: nothing yet, or what was read from a checkpoint."""
        small = any(master is p for group in self.param_groups if group["is_small"] for p in group["params"])
        for kind in () if small else MOMENTS:
            self.state[master][kind] = EightBit(self.state[master][kind], signed=kind == MOMENTS[0])

    def _update(self, master: Tensor, group: dict[str, Any]) -> None:
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), device=master.device if group["fused"] else "cpu")
            state.update((kind, torch.zeros_like(master)) for kind in MOMENTS)
            self.pack(master)
        assert master.grad is not None
        step = state["step"]
        for first in range(0, len(master), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            mean, square = (state[kind][part] for kind in MOMENTS)
            step = state["step"].clone()
            adamw(
                [master[part]],
                [master.grad[part]],
                [mean],
                [square],
                [],
                [step],
                foreach=False,
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for kind, values in zip(MOMENTS, (mean, square), strict=True):
                if isinstance(state[kind], EightBit):
                    state[kind].put(first, values)
        state["step"] = step


@cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    """[256] or less, ascending, at most 1: in each decade of seven twice as many as in the one below it.

    The paper's dynamic tree; squares have no zero, since one beside a mean that is none would make a huge update.
    """
    levels = [torch.ones(1), *([torch.zeros(1)] if signed else [])]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        fractions = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)
        levels += [fractions, -fractions] if signed else [fractions]
    return torch.cat(levels).sort().values.to(device)
