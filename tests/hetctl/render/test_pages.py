"""What the pages of plans and runs say: the verdict first, what limits, what failed, and nothing of what is unknown."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from hetctl.comm.contract.plan import Plan
from hetctl.render.bars import MemoryBar, memory_bars, waterfall
from hetctl.render.cluster_picture import cluster_picture, stroke_width
from hetctl.render.page import Line, chart
from hetctl.render.report import report_page, smoothed
from hetctl.render.verdict import plan_limit
from hetctl.trainer.planning.planner import Planning
from hetctl.trainer.planning.predicted_step import PredictedStep
from tests.hetctl.process import ROOT
from tests.hetctl.render.pages import FAILURE, plan_html, planning, run_folder, run_html, summary_of


@pytest.fixture(scope="module")
def made() -> Planning:
    return planning()


def said(page: str) -> str:
    """What of a page is not style or script."""
    return re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)


def headings(page: str) -> list[str]:
    return [unescape(head) for head in re.findall(r"<h2>(.*?)</h2>", page)]


def test_a_plan_says_its_verdict_first_and_then_everything(made: Planning) -> None:
    page = plan_html(made)
    predicted = made.plan.predicted
    assert predicted is not None
    assert f"llama-1b on 3 devices of 2 islands: {predicted.tokens_per_s:,.0f} tokens/s predicted" in page
    wanted = ["Figures", "Cluster", "Where a step's time goes", "One step", "Memory of each device", "Stages", "Why so"]
    assert headings(page) == [*wanted, "What else, and what would help"]
    assert "a &lt;b&gt;doubt" in page
    assert "leeoniya" not in page, "no chart, no library"


def test_a_plan_without_a_prediction_leaves_out_what_rests_on_it(made: Planning) -> None:
    bare = replace(made, plan=replace(made.plan, predicted=None))
    page = said(plan_html(replace(bare, predictions=made.predictions)))
    assert not {"Figures", "Where a step's time goes", "Memory of each device"} & set(headings(page))
    assert "not predicted" in page


def test_a_run_is_shown_beside_its_prediction(made: Planning, tmp_path: Path) -> None:
    page = run_html(run_folder(tmp_path / "run", made), made.plan)
    assert "Done: 40 of 40 steps of llama-1b on 3 devices of 2 islands" in page
    assert "predicted</div>" in page
    assert "measured</div>" in page
    assert "computing below the peak" in page
    assert "rank 2: 1.40 times as long as its like" in page
    assert "The upright mark" in page
    assert "MFU" in page
    assert "unknown" not in said(page)
    data = re.findall(r"<script type='application/json'>(.*?)</script>", page)
    lines = {line["label"]: line["y"] for line in json.loads(data[0])["series"]}
    assert lines["loss"][6] is None, "a step that was not finite is a gap, not zero"
    assert [y for y in lines["validation"] if y is not None] == [5.1, 4.2]
    assert len(lines["smoothed"]) == 40


def test_processes_that_share_cores_are_held_against_nothing(made: Planning, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", made)
    page = report_page(folder, summary_of(folder, made.plan, shares_cores=True))
    shown = said(page)
    assert "measured" in shown
    assert not re.search(r"predicted|Efficiency|MFU|lost to|stragglers", shown.partition("Memory of each device")[0])
    assert "stragglers" not in shown


def test_a_failed_run_says_who_failed_why_and_who_waited(made: Planning, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", made, steps=3, failure=FAILURE)
    words = "hetctl resume runs/latest"
    page = run_html(folder, made.plan, "failed", resume=words, checkpoint_step=2)
    assert headings(page)[:2] == ["What failed", "Go on from here"]
    assert "Rank 1 on mi325x-0 failed first:</strong> OSError: &lt;disk&gt; is full" in page
    assert "line 7, in step" in page
    assert "Hint: free some of it" in page
    assert "<td>0</td><td>rank 1</td><td>recv</td><td>pipeline</td>" in page
    assert "<td>2</td><td>its group</td><td>all_reduce</td>" in page
    assert "Rank 1 did not come to what the others had begun." in page
    assert "less &#39;/runs/a run/logs/rank-1.log&#39;" in page
    assert f"<code>{words}</code>" in page
    assert "of step 2" in page
    assert "<disk>" not in page


def test_the_card_reads_the_flight_recorders_where_they_are_here(made: Planning, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", made, steps=3, failure=FAILURE)
    done = {"operation": "all_reduce", "group": "data", "state": "done", "started": 1.0, "number": 1}
    for rank, operations in enumerate(([done, done | {"state": "started", "number": 2}], [done])):
        text = json.dumps({"rank": rank, "operations": operations})
        (folder.flight / f"flight-rank-{rank}.json").parent.mkdir(exist_ok=True)
        (folder.flight / f"flight-rank-{rank}.json").write_text(text)
    page = run_html(folder, made.plan, "failed")
    assert "<td>0</td><td>rank 1</td><td>all_reduce</td><td>data</td>" in page
    assert "Rank 1 did not come to what the others had begun." in page


def test_hosts_have_their_versions_and_what_is_unknown_is_empty(made: Planning, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", made)
    hosts = list(dict.fromkeys(r.host for r in made.plan.ranks))
    folder.versions.write_text(json.dumps({hosts[0]: {"torch": "2.9", "cuda": "13"}, hosts[1]: {"torch": "2.8"}}))
    page = run_html(folder, made.plan, parity={"steps": 5, "worst_deviation": 1e-6, "precision": "fp32", "equal": True})
    assert re.search(r"<td>h200</td><td>2.9</td><td>13</td>", page)
    assert re.search(r"<td>mi325x</td><td>2.8</td><td></td>", page)
    assert "Its first 5 losses equal one process" in said(page)


def test_what_a_run_does_not_know_is_left_out(made: Planning, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", made, steps=1)
    folder.predicted.unlink()
    page = said(run_html(folder, made.plan, "failed", wall_s=None, parameters=None))
    gone = {"What failed", "Go on from here", "Loss", "Tokens per second", "Where a step's time went", "One step"}
    assert not gone & set(headings(page))
    assert not re.search(r"unknown|None|nan|wall time|parameters|stragglers", page)


def test_a_prediction_of_another_plan_is_not_drawn(made: Planning, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", made)
    folder.predicted.write_text(folder.predicted.read_text().replace('"stage": 0', '"stage": 70'))
    assert "predicted</div>" not in run_html(folder, made.plan)
    folder.predicted.write_text("{")
    assert "predicted</div>" not in run_html(folder, made.plan)


def test_the_slow_bridge_is_what_limits_where_it_costs_most() -> None:
    slow = planning("h200:1,mi325x:1;10GbE", samples=4, seq_len=512, model="llama-1b-untied")
    limit = plan_limit(slow.plan, PredictedStep.of(slow))
    assert set(limit.islands) == {"h200", "mi325x"}
    assert "<g class='bridge slowest'>" in cluster_picture(slow.plan, limit.islands, limit.why)
    fast = planning("h200:1,mi325x:1", model="llama-1b-untied")
    assert len(plan_limit(fast.plan, PredictedStep.of(fast)).islands) == 1


def test_links_are_as_wide_as_they_are_fast(made: Planning) -> None:
    rates = (1e8, 1e9, 12.5e9, 50e9)
    widths = [stroke_width(rate) for rate in rates]
    assert widths == sorted(set(widths))
    rail = made.plan.bridges[0].rails[0]
    assert f"stroke-width='{stroke_width(rail.rate_bytes_per_s):.1f}'" in cluster_picture(made.plan)


def test_an_unknown_rate_is_dashed_and_no_figure(made: Planning) -> None:
    def unknown(plan: Plan) -> Plan:
        bridges = (replace(b, rails=tuple(replace(r, rate_bytes_per_s=None) for r in b.rails)) for b in plan.bridges)
        return replace(plan, bridges=tuple(bridges))

    picture = cluster_picture(unknown(made.plan))
    assert "stroke-dasharray" in picture
    assert not re.search(r"unknown|0 B/s", picture)


def test_a_waterfall_adds_up_and_keeps_to_its_frame() -> None:
    rows = waterfall(("ideal", 1.0), [("lost", 1.0), ("gained", -0.5)], "step")
    starts = re.findall(r"left:([\d.]+)%;width:([\d.]+)%", rows)
    assert [(float(a), float(b)) for a, b in starts] == [(0, 50), (50, 50), (75, 25), (0, 75)]
    assert "1.5s" in rows


def test_memory_has_one_scale() -> None:
    bars = [MemoryBar("a", (("weights", 1 << 30), ("activations", 1 << 30)), 4 << 30), MemoryBar("b", (), 4 << 30)]
    page = memory_bars(bars)
    assert "left:25.000%;width:25.000%" in page
    assert "2.0 GiB of 4.0 GiB" in page
    assert ">idle<" in page
    assert "upright mark" not in page


def test_smoothing_starts_at_the_first_value_and_passes_gaps() -> None:
    assert smoothed([4.0, None, 4.0]) == pytest.approx([4.0, None, 4.0])
    fell = smoothed([4.0, 2.0])[1]
    assert fell is not None
    assert 2 < fell < 4


def test_a_chart_of_names_that_end_scripts_stays_one() -> None:
    drawn = chart("x", [1, 2], [Line("</script>", [1.0, 2.0])])
    assert drawn.count("</script>") == 1


def test_no_line_of_the_picture_crosses_what_is_said_of_another() -> None:
    three = planning("h200:1,mi325x:1,a100:1", samples=48)
    picture = cluster_picture(three.plan)
    assert len(three.plan.bridges) > 1
    assert picture.rindex("<path class='rail'") < picture.index("<text class='why'")


def test_no_page_is_put_together_of_plain_strings() -> None:
    """What is formatted is Markup, which escapes: in an f-string a text of a run would be markup of the page."""
    rooms = [path for path in (ROOT / "hetctl" / "render").glob("*.py") if path.name != "plots.py"]  # pictures of docs/
    found = []
    for path in rooms:
        source = ast.parse(path.read_text(encoding="utf-8"))
        parts = [part for node in ast.walk(source) if isinstance(node, ast.JoinedStr) for part in node.values]
        texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
        found += [f"{path.name}: {text}" for text in texts if re.search(r"<[a-z/]", text)]
    assert found == []
    assert len(rooms) > 10
