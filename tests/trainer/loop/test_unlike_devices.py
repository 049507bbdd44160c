"""Islands of unlike device types train as one process does: a toy device, whose memory is no host's, beside CPUs."""

from __future__ import annotations

import pytest

from tests.comm.spawn import on_islands
from tests.trainer.loop.test_parity import LAYOUTS
from tests.trainer.parity import difference, recipe, reference, train_layout

OTHERS = ("1+2", "2 to 3", "2 shards beside 3", "tensor 2, replicas", "interleaved")


@pytest.mark.parametrize(
    ("name", "toys"),
    [("2+2", 0), ("2+2", 1), ("replicas 5:3", 1), ("zero bubble", 0)]
    + [pytest.param(name, island, marks=pytest.mark.slow) for name in OTHERS for island in (0, 1)],
)
def test_toys_beside_hosts_train_as_one_process_does(name: str, toys: int) -> None:
    layout, asked = LAYOUTS[name], recipe("adamw", clip_norm=0.5, global_batch=8)
    sizes = tuple(len(island) for island in layout.islands)
    found = on_islands(sizes, train_layout, layout, asked, toys=(toys,), seconds=180)
    assert difference(found, reference(asked)) < 1e-10
