"""published.md and its pictures, of what `hetctl bench published` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from hetctl.comm.contract.units import show_seconds
from hetctl.render.plots import drawn
from hetctl.trainer.planning.publication import Publication

HEADER = """# Other people's measurements, predicted

<!-- Made by `hetctl bench published -o docs` from tests/published/*.yaml: change those. -->

What others published of their layouts, beside the seconds that the planner's cost model gives those layouts, and what
the planner would have chosen for the same devices, model and batch.
[One YAML file adds a publication](adding-a-publication.md).

- "Profile": the publication has seconds per layer of its devices. "Peaks": only the hardware table is known of them.
- Half of the cases, by a hash of their names, are held out: no constant of the cost model was fitted to them. Rows of
  one table resemble each other, so a publication's held-out half is easier than another publication; where all of its
  errors lie on one side, the figures of its devices or its engine are off.
- The gain of the own choice compares predictions with predictions, both under hetctl's trainer.
- `hetctl bench published` prints this; `--json` has every row, and whether memory would have allowed each layout.
"""
X, Y = "measured, s", "predicted, s"
NAMES = {"profile": "per-layer profile", "peaks": "peaks only"}


def pages(
    found: Sequence[Publication], result: Mapping[str, Any], curves: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, str]:
    """Every file by its name."""
    rows = result["cases"]
    parts = [HEADER, *_errors(result), *_orders(result)]
    parts += ["![predicted over measured seconds](published.svg)", "", *_curves()]
    for publication, several in zip(found, groupby(rows, key=lambda r: str(r["publication"])), strict=True):
        parts += _section(publication, list(several[1]))
    return {"published.md": "\n".join(parts), **_pictures(rows, curves)}


def _errors(result: Mapping[str, Any]) -> list[str]:
    lines = ["| known of the devices | half | cases | median error | largest |", "|---|---|---|---|---|"]
    for r in result["errors"]:
        lines += [f"| {NAMES[r['basis']]} | {r['half']} | {r['cases']} | {r['median']:.1%} | {r['most']:.1%} |"]
    return [*lines, ""]


def _orders(result: Mapping[str, Any]) -> list[str]:
    lines = ["Pairs that were measured more than 2 % apart and are predicted in the same order:", ""]
    lines += [
        "| publication | layouts of one workload, by seconds | all cases, by tokens/s a device |",
        "|---|---|---|",
    ]
    for r in result["order"]:
        alike = _part(r["layouts_right"], r["layout_pairs"])
        lines += [f"| {r['publication']} | {alike} | {_part(r['right'], r['pairs'])} |"]
    whole = [sum(r[k] for r in result["order"]) for k in ("layouts_right", "layout_pairs", "right", "pairs")]
    return [*lines, f"| all | {_part(*whole[:2])} | {_part(*whole[2:])} |", ""]


def _part(right: int, pairs: int) -> str:
    return f"{right} of {pairs} ({right / pairs:.0%})" if pairs else ""


def _curves() -> list[str]:
    return [
        "## Predicted curves",
        "",
        "Llama-8B, 4096 tokens, on 8 H200 and 8 MI325X in two stages, from the table's figures: over the split",
        "(H200/MI325X layers), and over what joins the two hosts, at 17/15.",
        "",
        "![speed over split](published-split.svg)",
        "",
        "![speed over link rates](published-links.svg)",
        "",
    ]


def _section(publication: Publication, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    source, marks = publication.source, {"R": "", "R2": " Second-hand.", "D": " Derived.", "M": " From memory."}
    lines = [f"## {publication.name}", "", f"{source.title}. {source.where}. {source.licence}.{marks[source.read]}"]
    lines += ["", source.note, ""] if source.note else [""]
    lines += [
        "| case | model, batch | layout | predicted | measured | off by | own choice, gain |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_case(r) for r in rows]
    lines += ["", *(f"- Left out: {why}." for why in publication.left_out), ""]
    return lines


def _case(r: Mapping[str, Any]) -> str:
    own = r.get("choice")
    choice = f"{own['layout']}, {own['gain']:+.0%}" if own else ""
    name = r["case"] + (", held out" if r["held_out"] else "")
    times = f"{show_seconds(r['predicted_s'])} | {show_seconds(r['measured_s'])} | {r['error']:+.1%}"
    layout, choice = r["layout"].replace("|", "\\|"), choice.replace("|", "\\|")
    return f"| {name} | {r['model']}, {r['samples']} x {r['seq_len']} | {layout} | {times} | {choice} |"


def _pictures(rows: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    half = {True: "held out", False: "fitted"}
    dots = [{"kind": f"{r['basis']} {half[r['held_out']]}"} for r in rows]
    dots = [d | {X: r["measured_s"], Y: r["predicted_s"]} for d, r in zip(dots, rows, strict=True)]
    kinds = {f"{b} {h}": f"{NAMES[b]}, {h}" for b in NAMES for h in half.values()}
    scatter = {"kind": "scatter", "x": X, "y": Y, "band": 0.05, "kinds": kinds}
    scatter |= {"caption": "Predicted over measured seconds of a step, both logarithmic, with the 5 % band"}
    split = {"kind": "lines", "x": "split", "series": ["speed: k tokens/s"]}
    split |= {"caption": "Predicted thousand tokens/s over the layers on H200/MI325X (8 GPUs each, Llama-8B)"}
    links = {"kind": "lines", "x": "link", "series": ["speed: eager-1f1b", "speed: 1f1b"]}
    links |= {"caption": "Predicted thousand tokens/s of 17/15 over what joins the two hosts"}
    return {
        "published.svg": drawn({"title": "Predicted and measured", "rows": dots, "plot": scatter}),
        "published-split.svg": drawn({"title": "Speed over split", "rows": curves["split"], "plot": split}),
        "published-links.svg": drawn({"title": "Speed over links", "rows": curves["links"], "plot": links}),
    }
