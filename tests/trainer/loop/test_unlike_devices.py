"""Islands of unlike device types train as one process does: a toy device, whose memory is no host's, beside CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm.spawn import TOYS, Native, on_islands
from tests.layouts import Layout
from tests.trainer.checkpoint.test_writer import ONE, REPLICAS, STAGES, asked, part_of_run
from tests.trainer.loop.test_parity import LAYOUTS
from tests.trainer.parity import difference, part_of, recipe, reference, train_layout

OTHERS = ("1+2", "2 to 3", "2 shards beside 3", "tensor 2, replicas", "interleaved")


@pytest.mark.parametrize(
    ("name", "toys"),
    [("2+2", 0), ("2+2", 1), ("replicas 5:3", 1), ("zero bubble", 0)]
    + [pytest.param(name, island, marks=pytest.mark.slow) for name in OTHERS for island in (0, 1)],
)
def test_toys_beside_hosts_train_as_one_process_does(name: str, toys: int) -> None:
    layout, asked = LAYOUTS[name], recipe("adamw", clip_norm=0.5, global_batch=8)
    sizes = tuple(len(island) for island in layout.islands)
    found = on_islands(sizes, train_layout, layout, asked, devices={toys: TOYS}, seconds=180)
    assert difference(found, reference(asked)) < 1e-10


CHAIN: list[tuple[Layout, int | None]] = [(STAGES, 0), (ONE, None), (REPLICAS, 1), (STAGES, None), (ONE, 0)]


def off_along_the_chain(folder: Path, native: Native) -> float:
    """Two steps under each layout from the last one's checkpoint; one island of one rank, or none, is of the device."""
    wanted, worst = reference(asked()), 0.0
    for number, (layout, on_devices) in enumerate(CHAIN):
        sizes, part = tuple(len(island) for island in layout.islands), slice(2 * number, 2 * number + 2)
        devices = {} if on_devices is None else {on_devices: native}
        found = on_islands(sizes, part_of_run, layout, str(folder), part.start, part.stop, devices=devices, seconds=120)
        worst = max(worst, difference(found, part_of(wanted, part)))
    return worst


def test_a_checkpoint_of_toys_goes_on_with_hosts_and_back(tmp_path: Path) -> None:
    assert off_along_the_chain(tmp_path, TOYS) < 1e-10
