"""docs/benchmarks.md and its plots, made of the records in docs/benchmarks/*.json: `make benchmarks`.

A record is one claim: title, claim, command, commit, machine, columns, rows, notes, and perhaps a plot. A cell is a
text, a number, {"samples": [..]} where all are known, or {"median", "min", "max"} (as far as they were published).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetctl.render.plots import drawn, spread

ROOT = Path(__file__).resolve().parents[2]
HEADER = """# Benchmarks

<!-- Made by `make benchmarks` from docs/benchmarks/*.json: change those. -->

One current table for each claim. A cell is a median (least - most). Speeds are compared side by side in one run, as
the machines are shared and noisy. Older figures are in [CHANGELOG.md](../CHANGELOG.md).

- **No figure here comes from an AMD GPU or an RDMA NIC.** H200s are NVIDIA H200 of one host (driver 580, torch
  2.11.0+cu130, no RDMA NIC). Islands there are emulated labels: an "AMD island" is an NVIDIA GPU that may not talk
  natively to the other label.
- "Shared" means islands that share GPUs: right or wrong can be told there, speeds cannot.
- The numbers of machines tell lent machines apart: the same cards, but hosts with memory of unlike speed.
- "Not recorded" is a commit that nobody wrote down at the time.
"""


def main() -> None:
    for path, text in made().items():
        path.write_text(text)


def made() -> dict[Path, str]:
    """Every file that the records make, with its text."""
    folder = ROOT / "docs/benchmarks"
    records = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    files = {path.with_suffix(".svg"): drawn(record) for path, record in records.items() if "plot" in record}
    sections = [_section(record, path) for path, record in records.items()]
    files[ROOT / "docs/benchmarks.md"] = "\n".join([HEADER, _contents(list(records.values())), *sections])
    return files


def _contents(records: list[dict[str, Any]]) -> str:
    rows = [f"| [{r['title']}](#{_anchor(r['title'])}) | {r['claim']} |" for r in records]
    return "\n".join(["| table | claim |", "|---|---|", *rows, ""])


def _anchor(title: str) -> str:
    """GitHub's: lower case, spaces become hyphens, other signs go."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _section(record: dict[str, Any], path: Path) -> str:
    lines = [f"## {record['title']}", "", record["claim"], "", "```", record["command"], "```"]
    lines += [f"Machine: {record['machine']}. Commit: {record['commit']}.", ""]
    if "plot" in record:
        lines += [f"![{record['plot']['caption']}](benchmarks/{path.stem}.svg)", ""]
    return "\n".join([*lines, *_table(record), "", *[f"- {note}" for note in record["notes"]], ""])


def _table(record: dict[str, Any]) -> list[str]:
    columns, rows = record["columns"], record["rows"]
    places = {c: _places([row[c] for row in rows if isinstance(row.get(c), dict)]) for c in columns}
    body = ["| " + " | ".join(_cell(row.get(c, ""), places[c]) for c in columns) + " |" for row in rows]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body]


def _cell(value: Any, places: int) -> str:
    if isinstance(value, dict):
        middle, least, most = spread(value)
        both = "" if least is None or most is None else f"{least:,.{places}f} - {most:,.{places}f}"
        return both if middle is None else f"{middle:,.{places}f}" + (f" ({both})" if both else "")
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _places(values: list[dict[str, Any]]) -> int:
    """Decimals that show every published number of a column as it was."""
    numbers = [n for v in values for n in [*v.get("samples", []), v.get("median"), v.get("min"), v.get("max")] if n]
    return max((len(str(n).partition(".")[2]) for n in numbers if isinstance(n, float)), default=0)


if __name__ == "__main__":
    main()
