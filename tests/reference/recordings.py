"""The table in docs/discover.md, made of the recordings in tests/facts."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.hetctl.probe.recordings import Recorded, recordings

PAGE = Path(__file__).parents[2] / "docs" / "discover.md"
TITLE = "## What has been read\n\n"
HEAD = """
Made of the recordings in tests/facts (`make reference`), each with its source, its licence and what is expected of it:
{outputs} outputs, {broken} of them of something broken or strange. {named} were recorded in {projects} named projects
and issue trackers, {unnamed} in public files whose repository is not known. Recorded elsewhere means that hetctl reads
what such a machine printed, never that it ran there.
"""
TABLE = """\
| tool | version | products | seen | outputs |
|---|---|---|---|---|
"""


def discover() -> str:
    """The page with its last section as the recordings would have it."""
    return PAGE.read_text().split(TITLE)[0] + TITLE + _made()


def _made() -> str:
    cases = recordings()
    elsewhere = [c for c in cases if c.expected.seen == "recorded elsewhere"]
    head = HEAD.format(
        outputs=len(cases),
        broken=sum(c.expected.condition != "healthy" for c in cases),
        named=sum(bool(projects([c])) for c in elsewhere),
        unnamed=sum(not projects([c]) for c in elsewhere),
        projects=len(projects(elsewhere)),
    )
    named = textwrap.fill(f"The projects: {', '.join(projects(elsewhere))}.", 118, break_on_hyphens=False)
    return f"{textwrap.fill(head.strip(), 118)}\n\n{TABLE}" + "\n".join(_rows(cases)) + f"\n\n{named}\n"


def projects(cases: Iterable[Recorded]) -> list[str]:
    """owner/name of every source that is named so."""
    found = (re.match(r"[\w.-]+/[\w.-]+", case.expected.source) for case in cases)
    return sorted({match.group(0) for match in found if match}, key=str.lower)


def _rows(cases: Iterable[Recorded]) -> Iterator[str]:
    """A row for a tool's outputs of one generation, those of documentation apart."""
    groups: dict[tuple[str, str, str], list[Recorded]] = defaultdict(list)
    for case in cases:
        groups[case.tool, generation(case.expected.version), case.expected.seen].append(case)
    for (tool, _, seen), members in sorted(groups.items()):
        versions = sorted({release(case.expected.version) for case in members}, key=lambda v: (_number(v), v))
        products = sorted({product for case in members for product in case.expected.products}, key=str.lower)
        yield f"| {tool} | {', '.join(versions)} | {', '.join(products)} | {seen} | {len(members)} |"


def release(version: str) -> str:
    """The branch of a driver (535 of 535.54.03), major and minor of a ROCm release, or what is there."""
    driver = re.fullmatch(r"(\d{3})\.[\d.]+", version)
    rocm = re.match(r"ROCm \d+\.\d+", version)
    return driver.group(1) if driver else rocm.group(0) if rocm else "not told" if version == "unknown" else version


def generation(version: str) -> str:
    """`5` of the drivers 510 to 595, `ROCm 6`; nothing of all others."""
    found = re.match(r"ROCm \d+|\d(?=\d\d(\.|$))", release(version))
    return found.group(0) if found else ""


def _number(version: str) -> float:
    match = re.search(r"\d+(?:\.\d+)?", version)
    return float(match.group(0)) if match else 0.0
