"""Damaged recordings: cut, a line lost, a field that says nothing. Nothing crashes, nothing comes out that was not in.

Tools' outputs are cut and lose lines; a file of the kernel is read in one call, so that it is there, says nothing, or
is missing. What is tried is a sample, the same each time; DAMAGES=1000 tries that many a recording.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from hetctl.comm.contract.facts import GpuFacts, HostFacts, facts_to_data
from hetctl.probe import parse
from hetctl.probe.raw import Raw
from tests.hetctl.probe.recordings import Recorded, recordings

TRIES = int(os.environ.get("DAMAGES", "4"))  # of each kind, a recording
CASES = recordings()
WORDS = ["N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "None", "", "Unknown"]
BY_LINE = ("ibv_devinfo", "xpu-smi discovery")  # tables whose last line may have lost its end
# Where a value stands: between tags, quoted or bare behind a JSON key, quoted in CSV, behind `key:`, alone in a file
FIELDS = re.compile(
    r'(?<=>)[^<>\n]+(?=<)|(?<=": ")[^"\n]*(?=")|(?<=": )-?\d+|(?<=,")[^"\n]*(?=")|(?<=:\t\t)\S.*|^\d\S*$', re.M
)
FIGURES = ("memory_total_bytes", "memory_free_bytes", "pci", "uuid", "serial", "numa_node", "driver", "architecture")
PORT = ("rdma_device", "rdma_port", "link_layer", "rdma_mtu", "pci")

Damage = Callable[[str, random.Random], str]
Spoilt = Iterator[Raw]


def cut(text: str, dice: random.Random) -> str:
    return text[: dice.randrange(len(text) + 1)]


def without_a_line(text: str, dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    lost = dice.randrange(len(lines)) if lines else 0
    return "".join(line for number, line in enumerate(lines) if number != lost)


def saying_nothing(text: str, dice: random.Random) -> str:
    return saying(dice.choice(WORDS), FIELDS, text, dice)


def saying(word: str, fields: re.Pattern[str], text: str, dice: random.Random) -> str:
    """One field replaced by `word`."""
    spots = list(fields.finditer(text))
    if not spots:
        return text
    spot = dice.choice(spots)
    return text[: spot.start()] + word + text[spot.end() :]


def with_output(raw: Raw, name: str, stdout: str) -> Raw:
    return replace(raw, tools={**raw.tools, name: replace(raw.tools[name], stdout=stdout)})


def damaged(damage: Damage, raw: Raw, dice: random.Random) -> Spoilt:
    """The same host, one of its tools' outputs damaged, TRIES times."""
    for name in dice.choices(sorted(raw.tools), k=TRIES) if raw.tools else ():
        yield with_output(raw, name, damage(raw.tools[name].stdout, dice))


def prefixes(raw: Raw, dice: random.Random) -> Spoilt:
    for name in dice.choices(sorted(raw.tools), k=TRIES) if raw.tools else ():
        yield with_output(raw, name, cut(raw.tools[name].stdout, dice))


def without_a_file(raw: Raw, dice: random.Random) -> Spoilt:
    """The same host, one file missing or saying nothing; all but memory banks, which only together are a size."""
    for lost in dice.choices(sorted(p for p in raw.files if "/mem_banks/" not in p) or [""], k=TRIES):
        yield replace(raw, files={path: text for path, text in raw.files.items() if path != lost})
        yield replace(raw, files={**raw.files, lost: dice.choice(WORDS) + "\n"})


@cache
def whole(case: str) -> tuple[Raw, HostFacts]:
    raw = next(c for c in CASES if c.name == case).raw()
    return raw, parse(raw)


def wrong(found: HostFacts, whole: HostFacts) -> list[str]:
    """What a damaged host tells that the whole one does not."""
    now, before = facts_to_data(found), facts_to_data(whole)
    return [
        *(f"GPU {g['index']}: memory 0" for g in now.get("gpus", ()) if g.get("memory_total_bytes") == 0),
        *_strange(now.get("gpus", ()), before.get("gpus", ()), FIGURES),
        *_strange(now.get("nics", ()), before.get("nics", ()), PORT),
    ]


def _strange(now: Any, before: Any, figures: tuple[str, ...]) -> Iterator[str]:
    """Devices that mix what several say, or say what none said."""
    for device in now:
        told = {name: device[name] for name in figures if device.get(name) is not None}
        if not any(_agree(told, other) for other in before):
            yield f"no device of the whole host says {told}"


def _agree(told: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `other` tells the same; an address may come from the bus when the tool that told none is silent."""
    return all(other.get(name) == value or (name == "pci" and not other.get(name)) for name, value in told.items())


def check(case: Recorded, spoil: Callable[[Raw, random.Random], Spoilt]) -> None:
    raw, facts = whole(case.name)
    for one in spoil(raw, random.Random(case.name)):
        assert wrong(parse(one), facts) == []


each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each
def test_a_prefix(case: Recorded) -> None:
    check(case, prefixes)


@each
def test_a_lost_line(case: Recorded) -> None:
    check(case, partial(damaged, without_a_line))


@each
def test_a_lost_file(case: Recorded) -> None:
    check(case, without_a_file)


@each
def test_a_field_that_says_nothing(case: Recorded) -> None:
    check(case, partial(damaged, saying_nothing))


def every(word: str, fields: re.Pattern[str]) -> list[str]:
    """What is wrong with any host that says `word` somewhere."""
    say = partial(saying, word, fields)
    found = []
    for case in CASES:
        raw, facts = whole(case.name)
        found += [w for one in damaged(say, raw, random.Random(case.name)) for w in wrong(parse(one), facts)]
    return found


@pytest.mark.parametrize("word", ["ERR!", "GPU requires reset", "GPU is lost"])
def test_an_error_says_nothing(word: str) -> None:
    assert every(word, FIELDS) == []


def test_serial_zero_says_nothing() -> None:
    assert (
        every("0", re.compile(r'(?<=<serial>)[^<]+|(?<="product_serial": ")[^"]+|(?<="Serial Number": ")[^"]+')) == []
    )


@pytest.mark.parametrize("tool", BY_LINE)
def test_half_a_line_is_not_read(tool: str) -> None:
    for case in CASES:
        raw, facts = whole(case.name)
        text = raw.tools[tool].stdout if tool in raw.tools else ""
        for end in range(0, len(text), 3):
            assert wrong(parse(with_output(raw, tool, text[:end])), facts) == []


def test_what_is_wrong_is_seen() -> None:
    one = GpuFacts("nvidia", 0, pci="0000:01:00.0", uuid="GPU-a", memory_total_bytes=1)
    two = GpuFacts("nvidia", 1, pci="0000:02:00.0", uuid="GPU-b", memory_total_bytes=2)
    both = HostFacts(gpus=(one, two))
    assert wrong(HostFacts(gpus=(replace(one, uuid=None),)), both) == []
    assert len(wrong(HostFacts(gpus=(replace(one, uuid="GPU-b"),)), both)) == 1
    assert len(wrong(HostFacts(gpus=(replace(one, memory_total_bytes=0),)), both)) == 2
