"""Some changed inputs for each reader, and all that ever ended in something else than the house's errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.loop import CORPUS, defects, kept, tried
from tests.fuzz.targets import TARGETS

COUNTS = dict.fromkeys(TARGETS, 300) | dict.fromkeys(
    ("cluster", "hardware", "plan", "profile", "recipe", "run folder"), 60
)


@pytest.mark.parametrize("target", TARGETS)
def test_changed_inputs_end_in_a_sentence(target: str) -> None:
    found = [d for d in defects(target, COUNTS[target], 1) if d]
    assert not found, "\n".join(f"{d.what}\n{d.trace}" for d in found[:3])


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_what_failed_once_is_read(path: Path, tmp_path: Path) -> None:
    defect = tried(*kept(path), tmp_path / "case")
    assert defect is None, f"{defect.what}\n{defect.trace}"
