"""A validation for people: a line as each claim ends, the table at the end, and what the bundle holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from hetctl.comm.contract.units import show_bytes, show_seconds
from hetctl.console import Sink
from hetctl.validate.claims import Claim, Result
from hetctl.validate.report import MARKS

_COLOURS = {"holds": "green", "does not hold": "red", "not applicable": "dim", "could not tell": "cyan"}
_MOST_FILES = 40


def claim_line(result: Result) -> str:
    """`✓ bridge.tcp  holds: ...  (12 s)`."""
    outcome = result.outcome
    mark = f"[{_COLOURS[outcome.verdict]}]{MARKS[outcome.verdict]}[/]"
    took = f" ({show_seconds(result.seconds)})" if result.seconds >= 0.1 else ""
    return f"{mark} {result.claim.id:<18} {outcome.verdict}: {escape(outcome.says)}{took}"


def results_table(results: Sequence[Result]) -> Table:
    """One row a claim."""
    table = Table("", "claim", "what it says", box=None, pad_edge=False, title_justify="left")
    for result in results:
        outcome = result.outcome
        mark = f"[{_COLOURS[outcome.verdict]}]{MARKS[outcome.verdict]}[/]"
        table.add_row(mark, result.claim.id, escape(outcome.says))
    table.caption = "✓ holds, x does not hold, - not applicable, ? could not tell"
    return table


def claims_table(claims: Sequence[Claim]) -> Table:
    """What can be validated."""
    table = Table("claim", "sentence", "needs", box=None, pad_edge=False)
    for claim in claims:
        table.add_row(claim.id, escape(claim.sentence), escape(claim.needs))
    return table


def show_contents(sink: Sink, path: Path, files: Mapping[str, bytes], masked: Mapping[str, int]) -> None:
    """What is about to be packed, and where it will lie."""
    total = sum(len(content) for content in files.values())
    sink.say(f"packing {len(files)} files ({show_bytes(total)}) into {path.absolute()}:")
    for name in list(files)[:_MOST_FILES]:
        sink.say(f"  {name}  {show_bytes(len(files[name]))}")
    if len(files) > _MOST_FILES:
        sink.say(f"  and {len(files) - _MOST_FILES} more")
    words = ", ".join(f"{count} {kind}" for kind, count in sorted(masked.items())) or "nothing was found to mask"
    sink.say(f"placeholders stand for: {words}; what they stand for is kept nowhere")
