"""The table in docs/discover.md, made of the recordings in tests/facts: `python -m tests.bench.recordings_table`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.hetctl.probe.recordings import Recorded, recordings

PAGE = Path(__file__).parents[2] / "docs" / "discover.md"
TITLE = "## What has been read\n"
HEAD = """
Made of the recordings in tests/facts (`make reference`), each with its source, its licence and what is expected of it:
{outputs} outputs, {broken} of them of something broken or strange. {named} were recorded in {projects} named projects
and issue trackers, {unnamed} in public files whose repository is not known. Recorded elsewhere means that hetctl reads
what such a machine printed, never that it ran there.

| tool | version | products | seen | outputs |
|---|---|---|---|---|
"""


def with_table(page: str) -> str:
    """The page with its last section as the recordings would have it."""
    return page.split(TITLE)[0] + TITLE + made()


def made() -> str:
    cases = recordings()
    elsewhere = [c for c in cases if c.expected.seen == "recorded elsewhere"]
    head = HEAD.format(
        outputs=len(cases),
        broken=sum(c.expected.condition != "healthy" for c in cases),
        named=sum(bool(projects([c])) for c in elsewhere),
        unnamed=sum(not projects([c]) for c in elsewhere),
        projects=len(projects(elsewhere)),
    )
    return head + "\n".join(_rows(cases)) + f"\n\nThe projects: {', '.join(projects(elsewhere))}.\n"


def projects(cases: Iterable[Recorded]) -> list[str]:
    """owner/name of every source that is named so."""
    found = (re.match(r"[\w.-]+/[\w.-]+", case.expected.source) for case in cases)
    return sorted({match.group(0) for match in found if match}, key=str.lower)


def _rows(cases: Iterable[Recorded]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[Recorded]] = defaultdict(list)
    for case in cases:
        groups[case.tool, release(case.expected.version), case.expected.seen].append(case)
    for (tool, version, seen), members in sorted(
        groups.items(), key=lambda row: (row[0][0], _number(row[0][1]), row[0])
    ):
        products = sorted({product for case in members for product in case.expected.products}, key=str.lower)
        yield f"| {tool} | {version} | {', '.join(products)} | {seen} | {len(members)} |"


def release(version: str) -> str:
    """The branch of a driver (535 of 535.54.03), major and minor of a ROCm release, or what is there."""
    driver = re.fullmatch(r"(\d{3})\.[\d.]+", version)
    rocm = re.match(r"ROCm \d+\.\d+", version)
    return driver.group(1) if driver else rocm.group(0) if rocm else "not told" if version == "unknown" else version


def _number(version: str) -> float:
    match = re.search(r"\d+(?:\.\d+)?", version)
    return float(match.group(0)) if match else 0.0


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
