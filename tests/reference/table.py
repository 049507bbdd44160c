"""Tables of Markdown, whatever stands in their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are Markdown; a bar in one does not end it."""
    lines = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n" for cells in rows)
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n" + "".join(lines)


def code(text: str) -> str:
    """A cell's words as they are typed; nothing of nothing."""
    if "|" in text or "`" in text:  # which backticks cannot hold in a table
        return f"<code>{escape(text, quote=False)}</code>"
    return f"`{text}`" if text else ""


def plain(text: str) -> str:
    """A cell's words of which none is Markdown."""
    return escape(text, quote=False).replace("*", "\\*")
