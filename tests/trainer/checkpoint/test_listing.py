"""Which folders are checkpoints, and which a person's copies beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.checkpoint import listing, writer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("step-00000200", "step-00000400", "step-00000600", "step-00000600-good", "step-best", "step-²"):
        (tmp_path / name).mkdir()
        (tmp_path / name / listing.MANIFEST).write_text("{}")
    return tmp_path


def test_copies_are_neither_the_newest_nor_in_the_way(folder: Path) -> None:
    assert [p.name for p in listing.whole_ones(folder)] == ["step-00000200", "step-00000400", "step-00000600"]
    assert listing.newest(folder) == folder / "step-00000600"
    with pytest.raises(ConfigError, match="no checkpoint of step 5") as caught:
        listing.of_step(folder, "5")
    assert caught.value.hint == "there are: 200, 400, 600"


def test_pruning_leaves_the_newest_and_every_copy(folder: Path) -> None:
    writer.retire(folder, 600, keep=1)
    left = {p.name for p in folder.iterdir()}
    assert left == {"step-00000600", "step-00000600-good", "step-best", "step-²"}


@pytest.mark.parametrize("manifest", ["", "[]", '{"best": {"loss": 1.0}}', '{"best": 3}'])
def test_a_damaged_manifest_knows_no_best_one(folder: Path, manifest: str) -> None:
    (folder / "step-00000600" / listing.MANIFEST).write_text(manifest)
    with pytest.raises(ConfigError):
        listing.of_step(folder, listing.BEST)
