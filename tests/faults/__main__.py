"""The fault matrix: python -m tests.faults [--count N] [--seed S] [--only WORD] [--out FILE]. Needs root.

Without --count every fault is planted in every stage once; with it, N random cases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.faults.drive import stage, try_case
from tests.faults.plant import FAULTS, STAGES
from tests.rigs import netns


def cases(count: int | None, chance: random.Random) -> list[tuple[str, str, int]]:
    """(fault, stage, host) to try; faults that need ranks have none while code is shipped."""
    every = [(f, s) for f, s in itertools.product(FAULTS, STAGES) if s != "shipping" or not FAULTS[f].needs_ranks]
    chosen = every if count is None else [chance.choice(every) for _ in range(count)]
    return [(fault, name, chance.randrange(2)) for fault, name in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--only", default="", help="faults with this word")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if why_not := netns.unavailable():
        print(f"not run: {why_not}")
        return 3
    print(f"seed {options.seed}")
    bad, tried, stopped = 0, Counter[str](), [0.0]
    with tempfile.TemporaryDirectory(prefix="hf") as folder, stage(Path(folder)) as on:
        for fault, name, victim in cases(options.count, random.Random(options.seed)):
            if options.only not in fault:
                continue
            began = time.monotonic()
            verdict = try_case(on, fault, name, victim)
            bad += bool(verdict.problems)
            tried["planted" if verdict.planted else "over before"] += 1
            stopped.append(verdict.stopped_s if verdict.exit_code else 0.0)
            words = "; ".join(verdict.problems) or f"exit {verdict.exit_code} {verdict.reason[:90]!r}"
            print(
                f"{'BAD' if verdict.problems else 'ok '} {fault:18} {name:10} host {victim} "
                f"stopped {verdict.stopped_s:4.1f} s, {time.monotonic() - began:5.1f} s: {words}",
                flush=True,
            )
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
    print(f"{sum(tried.values())} cases ({dict(tried)}), {bad} bad, longest until stopped {max(stopped):.1f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
