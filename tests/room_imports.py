"""The picture of rooms in docs/architecture.md, made of what modules import: `python -m tests.room_imports`."""

from __future__ import annotations

from functools import cache

from tests.test_house import ROOMS, ROOT, imported, modules, room_of

PAGE = ROOT / "docs/architecture.md"
FOLDERS = ("hetctl", "launcher", "trainer", "comm")
ENTRIES = ("app", "__main__", "trainer.__main__")  # not rooms: they only start what is in one
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
    """For each room (`hetctl.runs`, `comm.bridge`) the rooms that it imports."""
    found: Rooms = {room: set() for room in ROOMS if room not in ENTRIES}
    for name, path in modules().items():
        if (here := room_of(name)) in found:
            found[here] |= {there for other in imported(path) if (there := room_of(other)) in found and there != here}
    return {_full(room): {_full(other) for other in others} for room, others in found.items()}


def picture(imports: Rooms) -> str:
    """A mermaid flowchart. An import that follows from others by way of another room is left out."""
    lines = ["flowchart TD"]
    for folder in FOLDERS:
        inside = sorted(room.partition(".")[2] for room in imports if room.startswith(f"{folder}."))
        lines += [f'  subgraph {folder}_folder["{folder}/"]', *[f"    {folder}_{r}[{r}]" for r in inside], "  end"]
    edges = sorted((a, b) for a in imports for b in _nearest(imports, a))
    return "\n".join([*lines, *[f"  {a} --> {b}".replace(".", "_") for a, b in edges], ""])


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


def _full(room: str) -> str:
    return room if "." in room else f"hetctl.{room}"


if __name__ == "__main__":
    main()
