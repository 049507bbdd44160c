"""What people see of a run while it trains: a table of the islands on a terminal, short lines elsewhere."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from hetctl.console import Sink
from hetctl.render.cluster_picture import cluster_picture
from hetctl.render.plan import show_plan
from hetctl.render.run import LiveRun, next_lines, summary_table
from tests.hetctl.render.pages import planning

ISLAND = {"step_s": 2.0, "compute_s": 1.0, "bridge_wait_s": 0.5, "other_wait_s": 0.4, "update_s": 0.1}


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "tokens_per_s": 1234.0, **more}


def shown(*records: dict[str, Any], terminal: bool) -> str:
    """All that a run of three steps prints of these records."""
    sink = Sink()
    sink.people = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    with LiveRun(sink, 3) as live:
        live.begin(0)
        for one in records:
            live.step(one)
            if live.live is not None:
                live.live.refresh()
    assert isinstance(sink.people.file, io.StringIO)
    return sink.people.file.getvalue()


def rows(text: str, island: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if f" {island} " in line]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def test_a_terminal_shows_the_latest_known_figures_of_every_island() -> None:
    islands = {"h200": {**ISLAND, "memory_bytes": 2**30}, "mi325x": {**ISLAND, "compute_s": 1.5, "memory_bytes": 2**31}}
    text = shown(record(1), record(2, islands=islands, mfu=0.41, efficiency=0.972), record(3), terminal=True)
    before, after = text.split("2/3", 1)
    assert "island" not in before, "a table of nothing"
    assert "loss 2.5000  1,234 tokens/s  MFU 41.0%  efficiency 97.2%" in after
    assert rows(text, "h200")[0] == ["h200", "2.0s", "50%", "25%", "20%", "5%", "1.0 GiB"]
    assert rows(text, "mi325x")[0] == ["mi325x", "2.0s", "75%", "25%", "20%", "5%", "2.0 GiB"]
    assert rows(text.split("3/3", 1)[1], "h200"), "figures stay until newer ones come"


def test_elsewhere_lines_stay_short_and_say_what_is_known() -> None:
    text = shown(record(3, mfu=0.41, islands={"h200": {**ISLAND, "memory_bytes": 1}}), terminal=False)
    assert text == "step 3/3  loss 2.5000  1,234 tokens/s  MFU 41.0%  0.0ms left\n"


def test_the_summary_says_what_efficiency_rests_on() -> None:
    summary: dict[str, Any] = {
        "run": "r",
        "status": "done",
        "steps": 3,
        "steps_planned": 3,
        "wall_s": 1.0,
        "run_dir": "/",
    }
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table({**summary, "mfu": 0.4, "efficiency": 0.9, "efficiency_basis": "measured"}))
    console.print(summary_table(summary))
    assert isinstance(console.file, io.StringIO)
    known, unknown = console.file.getvalue().split("run r: done")[1:]
    assert "90.0% of what the islands would reach alone (predicted from a profile's measured times)" in known
    assert "MFU" in known
    assert not [word for word in ("unknown", "MFU", "efficiency", "validation") if word in unknown]


def test_what_looks_like_a_mistake_is_explained() -> None:
    """More than 100 % of the parts; and a finished run that is repeated, which has no speed rather than 0 tokens/s."""
    ended = {"run": "r", "status": "done", "steps": 3, "steps_planned": 3, "wall_s": 1.0, "run_dir": "/", "tokens": 99}
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table({**ended, "efficiency": 1.04, "efficiency_basis": "table"}))
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "104.0% of what the islands would reach alone" in said
    assert "above 100%: alone each has less memory and fewer samples" in said
    assert "99 (no step was left to do)" in said
    assert "0 tokens/s" not in said


def test_names_and_paths_stand_as_they_are_whatever_brackets_they_hold() -> None:
    sink = Sink()
    sink.people = Console(file=io.StringIO(), width=200, color_system=None)
    run = {"run": "x]run", "status": "done", "steps": 3, "steps_planned": 3, "wall_s": 1.0, "run_dir": "/my[/x]run"}
    sink.say(summary_table(run))
    sink.say("report: /my[/x]run/report.html, [bold]data[/], :warning:.txt")
    sink.say("[bold]theme[/]", markup=True)
    assert isinstance(sink.people.file, io.StringIO)
    text = sink.people.file.getvalue()
    assert text.startswith("run x]run: done")
    assert "│ /my[/x]run " in text
    assert text.endswith("report: /my[/x]run/report.html, [bold]data[/], :warning:.txt\ntheme\n")


def test_ranks_that_share_cores_are_not_compared_nor_held_against_predictions() -> None:
    run = {"run": "r", "status": "done", "steps": 3, "steps_planned": 3, "run_dir": "/", "wall_s": 1.0}
    slow = {"rank": 0, "host": "here", "ratio": 1.4}
    figures = {"mfu": 0.4, "efficiency": 0.2, "efficiency_basis": "table", "bubble_share": 0.5, "stragglers": [slow]}
    words = ("MFU", "efficiency", "waiting", "slow rank")
    for shared in (False, True):
        console = Console(file=io.StringIO(), width=120)
        console.print(summary_table({**run, **figures, "shares_cores": shared}))
        assert isinstance(console.file, io.StringIO)
        assert [word in console.file.getvalue() for word in words] == [not shared] * len(words)
    sink = Sink()
    sink.people = Console(file=io.StringIO(), width=100, color_system=None)
    with LiveRun(sink, 3, paces=False) as live:
        live.step(record(3, mfu=0.4, efficiency=0.2))
    assert isinstance(sink.people.file, io.StringIO)
    assert "efficiency" not in sink.people.file.getvalue()


def test_an_emulation_that_was_trained_says_that_it_works_and_what_to_type_next() -> None:
    run: dict[str, Any] = {"status": "done", "emulated": True, "steps": 160, "islands": [{}, {}], "run_dir": "/my run"}
    run |= {"first_loss": 5.6143, "last_loss": 2.1599, "bridge_bytes": 2**20}
    first, second, _ = next_lines(run)
    assert first == "it works: 2 islands, 160 steps, loss 5.61 -> 2.16, 1.0 MiB over the bridge"
    assert second == "next: hetctl export '/my run' --to my-model"
    parity = {"steps": 5, "worst_deviation": 1.43e-6, "allowed": 1e-4, "precision": "fp32", "equal": True}
    _, second, _, _ = next_lines({**run, "parity": parity})
    assert second.strip() == "its first 5 losses equal one process's within 1e-06 (fp32)"
    assert next_lines({**run, "parity": {**parity, "equal": False}}) == []
    assert next_lines({**run, "status": "failed"}) == []
    assert next_lines({**run, "emulated": False}) == []
    assert next_lines({**run, "first_loss": None}) == []


def test_one_of_a_kind_is_not_counted_as_many(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planning("h200:1", samples=1).plan
    show_plan(Sink(), plan)
    said = capsys.readouterr().out
    assert "1 sample of 1024 tokens a step on 1 device\n" in said
    assert "on roce0, rank 0" in said or "on host, rank 0" in said
    assert not re.search(r"\b1 (samples|devices|ranks|hosts)\b|\branks \d\b(?![-,])", said)
    assert not re.search(r"\b1 devices\b", cluster_picture(plan))
