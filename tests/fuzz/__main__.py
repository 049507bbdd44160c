"""`python -m tests.fuzz --count 1000000 --seed 1`: all targets, or those named; failing inputs go into the corpus."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.loop import Defect, defects, keep
from tests.fuzz.targets import TARGETS

EVERY = 5000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=sorted(TARGETS), help="all of them if left out")
    parser.add_argument("--count", type=int, default=1_000_000, help="of changed inputs, over all targets")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    found: dict[tuple[str, str], Defect] = {}
    began, done = time.monotonic(), 0
    for target in asked.targets:
        for defect in defects(target, asked.count // len(asked.targets), asked.seed):
            done += 1
            if defect and (target, defect.what) not in found:
                found[target, defect.what] = defect
                print(f"{target}: {defect.what}\n{defect.trace}\nkept as {keep(defect).name}", flush=True)
            if done % EVERY == 0:
                print(f"{done} of {asked.count}, {target}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{done} changed inputs, seed {asked.seed}, {len(found)} defects, {time.monotonic() - began:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
