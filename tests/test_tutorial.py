"""docs/tutorial.md is true: its commands, typed in order for two namespaced hosts, print what the page shows.

What differs from run to run or from machine to machine (times, sizes, losses, addresses) is masked on both sides, and
lines may come in another order. `make tutorial` writes what the commands print into the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.rigs import netns
from tests.rigs.cluster import environment
from tests.rigs.first_hosts import first_hosts

WHY_NOT = netns.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
WRITE = os.environ.get("HETCTL_TUTORIAL") == "write"
BLOCK = re.compile(r"^```(console|yaml|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 120  # for one command
YOURS = "/home/you/first-run"  # as long as what it stands for: tables keep their form
LEFT_OUT = "..."
PROGRAMS = {
    "hetctl": '"{python}" -m hetctl "$@"',
    "python": '"{python}" "$@"',
    "ssh": '/usr/bin/ssh -F "{config}" "$@"',
}
MASKS = {
    r"SHA256:\S+": "FINGERPRINT",
    r"-[0-9a-f]{8}\b": "-ID",
    r"\d+m\d+s|\d[\d.,]* ?(us|ms|s)\b": "TIME",
    r"\d[\d.,]* ?([KMGT]i?)?B\b": "SIZE",
    r"'def .*": "TEXT",
    r"\d[\d.,]*": "N",
    r"[\s│┃─━┌┐└┘├┤┬┴┼┏┓┗┛┡┩┳╇]+": " ",
}


class Person:
    """Who follows the page: types what it says, in a folder of their own, and compares what comes with it."""

    def __init__(self, rig: netns.Rig, folder: Path, programs: Path) -> None:
        self.rig, self.folder = rig, folder
        programs.mkdir()
        for name, line in PROGRAMS.items():
            said = line.format(python=sys.executable, config=rig.config)
            (programs / name).write_text(f"#!/bin/sh\nexec {said}\n")
            (programs / name).chmod(0o755)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.env = environment(rig, PATH=path, COLUMNS="250", HF_HUB_DISABLE_PROGRESS_BARS="1", OMP_NUM_THREADS="1")

    def follow(self, block: re.Match[str]) -> str:
        """Make the file that a block holds (its first line names it), or type its commands; the block as it came."""
        kind, text = block.groups()
        if kind != "console":
            name, _, _ = text.removeprefix("# ").partition("\n")
            (self.folder / name).write_text(text)
            return block[0]
        steps = [step.partition("\n") for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
        return "```console\n" + "".join(self._type(command, shown) for command, _, shown in steps) + "```"

    def _type(self, command: str, shown: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            input="y\n",
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
        printed, expected = self._presented(done.stdout), shown.splitlines()
        real, said = masked(printed), masked(expected)
        alike = said - {LEFT_OUT} <= real if LEFT_OUT in said else said == real
        unlike = [f"$ {command}", *(f"- {x}" for x in sorted(said - real)), *(f"+ {x}" for x in sorted(real - said))]
        assert alike or WRITE, "the page shows something else (make tutorial):\n" + "\n".join(unlike)
        return "\n".join([f"$ {command}", *shortened(printed, expected), ""])

    def _presented(self, text: str) -> list[str]:
        """What a person on machines of their own would see: their folders, their network, what they typed."""
        text = text.replace(str(self.folder), YOURS).replace("[y/N]: ", "[y/N]: y\n")
        for host in self.rig.hosts:
            text = text.replace(str(host.folder / "home"), "/root")
        text = text.replace(self.rig.hosts[0].address.removesuffix(".1"), "10.0.0")
        return [line.rstrip() for line in text.splitlines()]


def masked(lines: list[str]) -> set[str]:
    """The lines without what varies, each once: how often a run says how far it is varies, too, and where a long line
    of a tree was broken."""
    found = set()
    for line in re.sub(r"\n {8,}", " ", "\n".join(lines)).splitlines():
        for pattern, name in MASKS.items():
            line = re.sub(pattern, name, line)
        found.add(line.strip())
    return found


def shortened(printed: list[str], shown: list[str]) -> list[str]:
    """What was printed, as much of its beginning and its end as the page shows."""
    if LEFT_OUT not in shown or len(printed) < len(shown):
        return printed
    head = shown.index(LEFT_OUT)
    return [*printed[:head], LEFT_OUT, *printed[len(printed) - (len(shown) - head - 1) :]]


def test_the_commands_of_the_tutorial_print_what_it_shows(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="first-", dir="/tmp") as mine,
        first_hosts(tmp_path / "hosts", hide=Path(mine)) as rig,
    ):
        person = Person(rig, Path(mine), tmp_path / "programs")
        text = BLOCK.sub(person.follow, PAGE.read_text())
    if WRITE:
        PAGE.write_text(text)


def test_what_varies_is_masked_and_nothing_else() -> None:
    one = masked(["step 3/30  loss 5.59  2,744 tokens/s  5.4s left", "│ wall │ 11.6s │", "run 20261125-03-demo"])
    assert one == masked(
        ["run 20271231-04-demo", "│ wall  │ 1m11s   │", "step 30/30  loss 2.1  9 tokens/s  0.0ms left"]
    )
    assert masked(["read 3 MiB"]) != masked(["read 3 rails"])
    assert masked(["in 10.0.0.0/24; not", "        shm: no"]) == masked(["in 10.130.0.0/24;", "        not shm: no"])
    assert shortened(list("abcdef"), ["a", "...", "e", "f"]) == ["a", "...", "e", "f"]
