"""The fault matrix: python -m tests.faults [--random N] [--seed S] [--lanes N] [--only WORD] [--out FILE]. Needs root.

Without --random every fault is planted in every stage once, each in a run of its own that is then seen through to its
end. With it, N random faults in a row: a run that a fault ended goes on with the next one, until it completes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.drive import STEPS, STEPS_IN_A_ROW, Case, lane_environment, stage
from tests.faults.judge import try_case
from tests.faults.plant import FAULTS, STAGES, cannot_be
from tests.rigs import netns


def cells() -> list[tuple[str, str]]:
    """Every fault and stage that exist together."""
    return [cell for cell in itertools.product(FAULTS, STAGES) if not cannot_be(*cell)]


def drawn(count: int, chance: random.Random) -> list[Case]:
    """Random cases."""
    return [Case.drawn(chance.choice(cells()), chance) for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--only", default="", help="cells with this word")
    parser.add_argument("--small", action="store_true", help="one rank a host")
    parser.add_argument("--lanes", type=int, default=1, help="rigs that run side by side")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a line of JSON per case")
    options = parser.parse_args()
    if not netns.ready():
        return 3
    with tempfile.TemporaryDirectory(prefix="hf") as folder:
        out = options.out or Path(folder) / "out.jsonl"
        known = len(read(out))
        if options.lane is None:
            print(f"seed {options.seed}")
            if options.random is None:
                for cell in itertools.product(FAULTS, STAGES):
                    if why := cannot_be(*cell):
                        print(f"--  {cell[0]:18} {cell[1]:10} cannot be: {why}")
            lanes = [start_lane(number, options, out) for number in range(1, options.lanes)]
            try:
                work(cases(options)[0 :: options.lanes], options, out, Path(folder))
                for lane in lanes:
                    lane.wait()
            finally:
                for lane in lanes:
                    lane.terminate()
            return summarise(read(out)[known:])
        work(cases(options)[options.lane :: options.lanes], options, out, Path(folder))
        return 0


def cases(options: argparse.Namespace) -> list[Case]:
    chance = random.Random(options.seed)
    every = drawn(options.random, chance) if options.random else [Case.drawn(cell, chance) for cell in cells()]
    return [case for case in every if options.only in f"{case.fault} {case.stage}"]


def start_lane(number: int, options: argparse.Namespace, out: Path) -> subprocess.Popen[bytes]:
    """The same program for every so-many-th case, on a rig of its own."""
    argv = [sys.executable, "-m", "tests.faults", "--lane", str(number), "--lanes", str(options.lanes)]
    argv += ["--seed", str(options.seed), "--only", options.only, "--out", str(out)]
    argv += ["--random", str(options.random)] if options.random else []
    return subprocess.Popen([*argv, *(["--small"] if options.small else [])], env=lane_environment())


def work(chosen: Sequence[Case], options: argparse.Namespace, out: Path, folder: Path) -> None:
    """Try cases one after the other on one rig, and write down what became of each."""
    steps = STEPS_IN_A_ROW if options.random else STEPS
    with stage(folder / "rig", small=options.small, steps=steps) as on:
        run = on.fresh()
        for case in chosen:
            verdict = try_case(on, case, run, go_on=not options.random)
            with out.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
            said = "; ".join(verdict.problems) or f"exit {verdict.exit_code} {verdict.reason[:90]!r}"
            soon = "" if verdict.detected_s is None else f"known {verdict.detected_s:4.1f} s, "
            print(
                f"{'BAD' if verdict.problems else 'ok '} {case} {'' if verdict.planted else 'over before, '}"
                f"{soon}stopped {verdict.stopped_s:4.1f} s, case {verdict.whole_s:4.1f} s: {said}",
                flush=True,
            )
            if verdict.exit_code == 0 or not options.random or verdict.problems:
                run = on.fresh()


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def summarise(verdicts: Sequence[dict[str, Any]]) -> int:
    """A line per fault, and one over all."""
    for fault in FAULTS:
        of = [v for v in verdicts if v["fault"] == fault]
        if of:
            print(f"{fault:18} {len(of):4} cases: " + ", ".join(spreads(of)))
    bad, planted = sum(bool(v["problems"]) for v in verdicts), sum(v["planted"] for v in verdicts)
    took = statistics.mean(v["whole_s"] for v in verdicts) if verdicts else 0.0
    print(f"{len(verdicts)} cases, {planted} planted, {bad} bad, {took:.1f} s a case on average")
    return int(bad > 0)


def spreads(of: Sequence[dict[str, Any]]) -> Iterator[str]:
    ended = [v for v in of if v["exit_code"]]
    yield f"{len(ended)} ended the run, {sum(bool(v['problems']) for v in of)} bad"
    for name, key in (("known", "detected_s"), ("stopped", "stopped_s")):
        times = [v[key] for v in ended if v[key] is not None and v["planted"]]
        if times:
            yield f"{name} after {min(times):.2f} - {max(times):.2f} s, median {statistics.median(times):.2f}"


if __name__ == "__main__":
    sys.exit(main())
