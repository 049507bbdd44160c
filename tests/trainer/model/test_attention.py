"""Attention within documents: none sees another, by whichever way it is computed."""

from __future__ import annotations

import pytest
import torch

from hetctl.trainer.model.attention import _by_mask, _flexible, causal_attention, positions_in


def test_positions_begin_with_each_document() -> None:
    documents = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3]])
    assert positions_in(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (3, 0.0), (3, 0.5)])
def test_each_document_attends_as_if_it_stood_alone(window: int, cap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 11, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    lengths, how = (5, 1, 4, 1), {"window": window, "cap": cap}
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    found = causal_attention(q, k, v, documents=documents, **how)  # type: ignore[arg-type]
    pieces = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    alone = torch.cat([causal_attention(*piece, **how) for piece in pieces], dim=2)  # type: ignore[arg-type]
    assert (found - alone).abs().max() < 1e-14


@pytest.mark.slow  # compiles kernels
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (7, 2.0)])
def test_what_devices_take_is_the_same_and_compiled_once(window: int, cap: float) -> None:
    from torch._dynamo.utils import counters

    graphs = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, heads, 256, 16, generator=generator) for heads in (4, 2, 2))
        documents = torch.randint(0, 2, (2, 256), generator=generator).cumsum(1) // 9
        how = {"scale": None, "window": window, "cap": cap, "documents": documents}
        with torch.no_grad():  # on CPUs it has no backward
            assert (_flexible(q, k, v, **how) - _by_mask(q, k, v, **how)).abs().max() < 1e-5  # type: ignore[arg-type]
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1], "other documents compile nothing anew"
