"""`hetctl bench published`: the goals that stand, the page that it makes, and what it says where it cannot."""

import json
from pathlib import Path
from typing import Any

import pytest

from hetctl.bench.published import OURS, bench_published, errors, orders, publications, write
from hetctl.comm.contract.errors import ConfigError
from hetctl.console import Sink

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return bench_published(publications(None, None), choose=True, sink=Sink(as_json=True))


def test_held_out_cases_are_predicted_well(found: dict[str, Any]) -> None:
    held = {r["basis"]: r["median"] for r in found["errors"] if r["half"] == "held out"}
    assert held["profile"] <= 0.08
    assert held["peaks"] <= 0.10


def test_layouts_come_out_in_the_measured_order(found: dict[str, Any]) -> None:
    pairs, right = (sum(r[k] for r in found["order"]) for k in ("layout_pairs", "layouts_right"))
    assert pairs >= 30
    assert right / pairs >= 0.9


def row(name: str, measured: float, predicted: float, samples: int = 8) -> dict[str, Any]:
    speed = {"tokens_per_s_per_device": samples / measured}
    known = {"publication": name, "model": "m", "seq_len": 1, "samples": samples, "devices": 1, "basis": "peaks"}
    times = {"measured_s": measured, "predicted_s": predicted, "error": predicted / measured - 1}
    return known | speed | times | {"held_out": predicted > measured}


def test_pairs_are_of_one_workload_and_measured_apart() -> None:
    rows = [row("a", 1.0, 1.0), row("a", 1.01, 2.0), row("a", 2.0, 1.5), row("a", 3.0, 3.3, 16), row("b", 9.0, 1.0)]
    one, other = orders(rows)
    assert (one["layout_pairs"], one["layouts_right"]) == (2, 1)  # 1.0 and 1.01 have no order
    assert (one["pairs"], one["right"]) == (5, 2)
    assert (other["pairs"], other["fitted"], other["held_out"]) == (0, pytest.approx(8 / 9), None)


def test_errors_are_of_each_half() -> None:
    halves = {r["half"]: r for r in errors([row("a", 1.0, 1.5), row("a", 1.0, 0.9), row("a", 1.0, 0.7)])}
    assert halves["held out"]["median"] == pytest.approx(0.5)
    assert (halves["fitted"]["median"], halves["fitted"]["most"]) == (pytest.approx(0.2), pytest.approx(0.3))


def test_an_own_choice_comes_with_its_gain() -> None:
    [sailor] = publications(OURS, "sailor-opt-gh200")
    rows = bench_published([sailor], choose=True, sink=Sink(as_json=True))["cases"]
    assert all(r["choice"]["gain"] > -0.02 for r in rows if r["fits"])
    assert json.dumps(rows)


def test_without_the_repository_a_folder_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hetctl.bench.published.OURS", tmp_path / "none")
    with pytest.raises(ConfigError, match="not installed") as caught:
        publications(None, None)
    assert "--from FOLDER" in str(caught.value.hint)


# of 20 s, and quick all the same: whoever changes planning changes the page
def test_the_page_is_what_the_command_makes(found: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, publications(None, None), found)
    for made in sorted(tmp_path.iterdir()):
        assert (DOCS / made.name).read_text() == made.read_text(), f"{made.name}: hetctl bench published -o docs"
