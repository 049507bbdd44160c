"""`hetctl bench published`: what others measured beside what the planner predicts, and what it would have chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from hetctl.bench.predicted_curves import over_link_rates, over_splits
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import write_atomically
from hetctl.comm.contract.units import show_seconds
from hetctl.console import Sink
from hetctl.render.published import pages
from hetctl.trainer.planning.costs import Mode
from hetctl.trainer.planning.layout import Layout, layout_of, predict_layout
from hetctl.trainer.planning.predict import Prediction
from hetctl.trainer.planning.problem import Problem
from hetctl.trainer.planning.publication import Case, Publication, read_publications
from hetctl.trainer.planning.search import Search
from hetctl.trainer.planning.space import Pins

COARSE = 0.01  # relative: gains that are not looked for in the planner's own choice
MANY_KINDS = 3  # of devices: from here on only the published degree of tensor parallelism and micro-batch are searched
APART = 0.02  # relative: measured figures closer than this have no order
OURS = Path(__file__).resolve().parents[2] / "tests/published"


def publications(folder: Path | None, only: str | None) -> tuple[Publication, ...]:
    """Those of a folder, or of the repository that hetctl is run from. Raises ConfigError."""
    if folder is None and not OURS.is_dir():
        raise ConfigError(
            "the publications are not installed with hetctl",
            hint="--from FOLDER: the repository's tests/published, or your own",
        )
    return read_publications(folder or OURS, only=only)


def bench_published(found: Sequence[Publication], *, choose: bool, sink: Sink) -> dict[str, Any]:
    """Every case predicted, and what the planner would do on the same devices with the same batch."""
    rows: list[dict[str, Any]] = []
    for publication in found:
        if sink.live:
            sink.warn(publication.name)
        chosen: dict[tuple[object, ...], tuple[str, float] | None] = {}
        for case in publication.cases:
            rows.append(_row(publication, case))
            if choose:
                rows[-1]["choice"] = _choice(publication, case, chosen)
    sources = [{"name": p.name, "cases": len(p.cases), "left_out": list(p.left_out)} for p in found]
    return {"cases": rows, "publications": sources, "errors": errors(rows), "order": orders(rows)}


def _row(publication: Publication, case: Case) -> dict[str, Any]:
    problem, measured = publication.problem(case), publication.seconds(case)
    found = predict_layout(problem, case.layout, publication.engine)
    gpus, tokens = case.layout.devices, case.layout.samples * problem.costs.seq_len
    return {
        "publication": publication.name,
        "case": case.name,
        "cluster": case.cluster,
        "model": problem.costs.shape.name,
        "seq_len": problem.costs.seq_len,
        "samples": case.layout.samples,
        "devices": gpus,
        "layout": words(case.layout),
        "basis": "profile" if publication.profiles else "peaks",
        "held_out": publication.held_out(case),
        "predicted_s": found.seconds,
        "measured_s": measured,
        "error": found.seconds / measured - 1,
        "fits": found.fits,
        "tokens_per_s_per_device": tokens / measured / gpus,
    }


def _choice(
    publication: Publication, case: Case, known: dict[tuple[object, ...], tuple[str, float] | None]
) -> dict[str, Any] | None:
    """The planner's own layout and how much faster it is, both under hetctl's trainer; None where it has none."""
    problem = publication.problem(case)
    key = (case.cluster, problem.costs.shape, problem.costs.seq_len, problem.samples)
    if key not in known:
        known[key] = _fastest(problem, case.layout)
    if (own := known[key]) is None:
        return None
    given = predict_layout(problem, case.layout).seconds
    return {"layout": own[0], "predicted_s": own[1], "gain": given / own[1] - 1}


def _fastest(problem: Problem, published: Layout) -> tuple[str, float] | None:
    coarse = replace(problem, tolerance=max(problem.tolerance, COARSE))
    if len(problem.pools) >= MANY_KINDS:
        first = published.replicas[0]
        pins = Pins(tensor=first.stages[0].tensor)
        coarse = replace(coarse, pins=pins, micro_batch_size=first.micro_batch_size, modes=(Mode(published.recompute),))
    candidates = Search(coarse, keep=1).run().candidates
    return (words(layout_of(candidates[0])), Prediction(candidates[0]).seconds) if candidates else None


def errors(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and largest error of each half, for cases with and without per-layer profiles."""
    found = []
    for basis in ("profile", "peaks"):
        for held_out in (False, True):
            off = [abs(r["error"]) for r in rows if r["basis"] == basis and r["held_out"] == held_out]
            if off:
                half = "held out" if held_out else "fitted"
                found.append({"basis": basis, "half": half, "cases": len(off), "median": median(off), "most": max(off)})
    return found


def orders(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each publication's median errors, and how many of its pairs come out in the measured order: all by tokens per
    second and device, and those layouts of one workload (model, length, batch, number of devices) by their seconds."""
    found = []
    for name, several in groupby(rows, key=lambda r: str(r["publication"])):
        mine = list(several)
        alike = [(a, b) for a, b in combinations(mine, 2) if _workload(a) == _workload(b)]
        every = list(combinations(mine, 2))
        of_all, of_alike = list(_agreeing(every, _speed)), list(_agreeing(alike, _seconds))
        row: dict[str, Any] = {"publication": name, "fitted": _median(mine, False), "held_out": _median(mine, True)}
        row |= {"pairs": len(of_all), "right": sum(of_all)}
        found.append(row | {"layout_pairs": len(of_alike), "layouts_right": sum(of_alike)})
    return found


def _median(rows: Sequence[dict[str, Any]], held_out: bool) -> float | None:
    off = [abs(r["error"]) for r in rows if r["held_out"] == held_out]
    return median(off) if off else None


def _workload(row: dict[str, Any]) -> tuple[object, ...]:
    return (row["model"], row["seq_len"], row["samples"], row["devices"])


def _seconds(row: dict[str, Any]) -> tuple[float, float]:
    return row["measured_s"], row["predicted_s"]


def _speed(row: dict[str, Any]) -> tuple[float, float]:
    speed = row["tokens_per_s_per_device"]
    return speed, speed * row["measured_s"] / row["predicted_s"]


def _agreeing(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], values: Any) -> Iterator[bool]:
    """For each pair that was measured apart, whether prediction has the same order."""
    for one, other in pairs:
        (a, predicted_a), (b, predicted_b) = values(one), values(other)
        if abs(a - b) > APART * min(a, b):
            yield (a < b) == (predicted_a < predicted_b)


def words(layout: Layout) -> str:
    """A layout as people write it: layers per stage, devices, micro-batches; equal replicas counted."""
    replicas = []
    for replica, several in groupby(layout.replicas):
        count = len(list(several))
        stages = []
        for (where, wide, tensor, shards), alike in groupby(
            replica.stages, key=lambda s: (s.pool, s.width, s.tensor, s.shards)
        ):
            extras = f" tensor {tensor}" * (tensor > 1) + f" shards {shards}" * (shards > 1)
            stages.append(f"{'+'.join(str(s.layers) for s in alike)} on {where} x{wide * tensor}{extras}")
        one = f"{' | '.join(stages)}; {replica.micro_batches} of {replica.micro_batch_size}"
        replicas.append(f"{count} times ({one})" if count > 1 else one)
    extras = [layout.schedule] if layout.schedule != "1f1b" else []
    extras += [f"{layout.chunks} chunks"] * (layout.chunks > 1) + [f"{layout.recompute} recompute"] * (
        layout.recompute != "none"
    )
    return ", ".join([" + ".join(replicas), *extras])


def write(folder: Path, found: Sequence[Publication], result: dict[str, Any]) -> None:
    """published.md and its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(found, result, {"split": over_splits(), "links": over_link_rates()}).items():
        write_atomically(folder / name, text)


def cases_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One publication's cases, one row each."""
    shown = Table("case", "layout", "predicted", "measured", "off by", "own choice", title=rows[0]["publication"])
    for r in rows:
        own = r.get("choice")
        said = f"{own['layout']} ({own['gain']:+.0%})" if own else ""
        name = r["case"] + (" (held out)" if r["held_out"] else "")
        times = (show_seconds(r["predicted_s"]), show_seconds(r["measured_s"]), f"{r['error']:+.1%}")
        shown.add_row(name, r["layout"], *times, said)
    return shown


def errors_table(result: dict[str, Any]) -> Table:
    """The two halves' errors."""
    shown = Table("known of devices", "half", "cases", "median error", "largest")
    for r in result["errors"]:
        basis = "per-layer profile" if r["basis"] == "profile" else "peaks only"
        shown.add_row(basis, r["half"], str(r["cases"]), f"{r['median']:.1%}", f"{r['most']:.1%}")
    return shown


def orders_table(result: dict[str, Any]) -> Table:
    """How many pairs are in the measured order."""
    shown = Table("publication", "pairs in the right order", "layouts of one workload in the right order")
    for r in result["order"]:
        shown.add_row(r["publication"], f"{r['right']} of {r['pairs']}", f"{r['layouts_right']} of {r['layout_pairs']}")
    return shown
