"""Which room imports which, and the picture of it in docs/architecture.md: `python -m tests.room_imports` writes it.

A room is a folder of a top folder; a module that stands alone beside them (console, recipe) counts as one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
TOPS = ("hetctl", "launcher", "trainer", "comm")
BEGIN, END = "```mermaid\n", "```\n"
Rooms = dict[str, set[str]]


def main() -> None:
    PAGE.write_text(with_picture(PAGE.read_text()))


def with_picture(page: str) -> str:
    """The page, with today's picture in place of the one it holds."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + picture(rooms()) + END + rest.partition(END)[2]


@cache
def rooms() -> Rooms:
    """For each room the rooms that it imports."""
    found: Rooms = {}
    for path in chain.from_iterable(sorted((ROOT / top).rglob("*.py")) for top in TOPS):
        here = _room(path.relative_to(ROOT).with_suffix("").parts)
        if here:
            found.setdefault(here, set()).update(_imported(path) - {here})
    return {room: {other for other in others if other in found} for room, others in found.items()}


def floors(imports: Rooms) -> dict[str, int]:
    """The floor of each room: 1 imports no other, else one above the highest that it imports. Raises on a circle."""

    @cache
    def floor(room: str, seen: frozenset[str] = frozenset()) -> int:
        if room in seen:
            raise ValueError(f"rooms import each other in a circle: {', '.join(sorted(seen))}")
        return 1 + max((floor(other, seen | {room}) for other in imports[room]), default=0)

    return {room: floor(room) for room in imports}


def picture(imports: Rooms) -> str:
    """A mermaid flowchart. An import that follows from others by way of another room is left out."""
    lines = ["flowchart TD"]
    for top in TOPS:
        inside = sorted(room for room in imports if room.startswith(f"{top}/"))
        lines += [
            f'  subgraph {top}_folder["{top}/"]',
            *[f"    {_id(r)}[{r.partition('/')[2]}]" for r in inside],
            "  end",
        ]
    edges = sorted((a, b) for a in imports for b in _nearest(imports, a))
    return "\n".join([*lines, *[f"  {_id(a)} --> {_id(b)}" for a, b in edges], ""])


def _nearest(imports: Rooms, room: str) -> set[str]:
    """What a room imports and none of its other imports leads to."""
    return {other for other in imports[room] if not any(other in _below(imports, n) for n in imports[room] - {other})}


def _below(imports: Rooms, room: str) -> set[str]:
    found, todo = set[str](), [room]
    while todo:
        new = imports[todo.pop()] - found
        found |= new
        todo += new
    return found


def _imported(path: Path) -> set[str]:
    return {room for name in _names(ast.parse(path.read_text())) if (room := _room(name.split(".")))}


def _names(tree: ast.AST) -> Iterator[str]:
    """Every `hetctl...` name that a module imports, inner imports too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hetctl"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("hetctl"))


def _room(parts: tuple[str, ...] | list[str]) -> str:
    """The room of a module's path or dotted name; '' for the packages themselves and their entries."""
    names = list(parts[1:]) if len(parts) > 1 and parts[0] == "hetctl" and parts[1] in TOPS else list(parts)
    if len(names) < 2 or names[1] in ("__init__", "__main__", "app", "__version__"):
        return ""
    return f"{names[0]}/{names[1]}"


def _id(room: str) -> str:
    return room.replace("/", "_")


if __name__ == "__main__":
    main()
