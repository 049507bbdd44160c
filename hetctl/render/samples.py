"""Samples as people and scripts see them: text and tokens, and which of them bear loss."""

from __future__ import annotations

import re
from typing import Any

from rich.text import Text

from hetctl.trainer.data.samples import Sample

SHADES = {
    True: ("green", "not bold green"),
    False: ("not bold", "not bold dim"),
}  # of tokens that bear loss and others, by turns
GUTTERS = {True: " loss | ", False: "      | "}


def sample_lines(sample: Sample) -> Text:
    """A sample's text behind a gutter that says which of it bears loss; neighbouring tokens have unlike shades."""
    count, begun, before = int(sample.bears_loss.sum()), False, False
    name = f"{sample.name}, {sample.side}" if sample.side else sample.name
    shown = Text(f"{name}: {len(sample.tokens)} tokens, {count} bear loss\n", style="bold")
    for number, (piece, bears) in enumerate(zip(pieces_of(sample), sample.bears_loss.tolist(), strict=True)):
        for line in re.findall(r"[^\n]*\n|[^\n]+", piece):
            if begun and bears != before:
                shown.append("\n")
            if not begun or bears != before:
                shown.append(GUTTERS[bears], style="not bold dim")
            shown.append(_visible(line), style=SHADES[bears][number % 2])
            begun, before = not line.endswith("\n"), bears
            shown.append("" if begun else "\n")
    return shown


def sample_row(sample: Sample) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "name": sample.name,
        **({"side": sample.side} if sample.side else {}),
        "text": sample.text,
        "tokens": sample.tokens.tolist(),
        "pieces": pieces_of(sample),
        "bears_loss": sample.bears_loss.tolist(),
    }


def pieces_of(sample: Sample) -> list[str]:
    """The text of each token; of tokens that share a character the first has it, and what no token has goes before."""
    pieces, at = [], 0
    for past_last in sample.places[:, 1].tolist():
        pieces.append(sample.text[at:past_last])
        at = max(at, past_last)
    return pieces


def _visible(text: str) -> str:
    """Control characters as Python writes them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
