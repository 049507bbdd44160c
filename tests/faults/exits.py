"""How a stock program ends over 2+2 ranks on two hosts, without a word to its process group, on a loaded machine:

    python -m tests.faults.exits [--runs 500] [--lanes 2] [--load 4] [--only WAY] [--out FILE]

Each way of ending has its exit code; whatever else a run ends with, or says of a store that had gone, is counted.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.rigs import netns
from tests.rigs.cluster import command, environment, write_cluster

PROGRAM = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("het")
value = torch.ones(4)
dist.all_reduce(value)
assert value[0] == 4
"""
WAYS = {  # what every rank does behind the sum, and the run's exit code
    "return": ("", 0),
    "sys.exit(3)": ("sys.exit(3)", 1),
    "exception": ("raise ValueError('planted')", 1),
    "os._exit in one rank": ("if dist.get_rank() == 1: os._exit(0)", 0),
}
ODD = (
    "terminate called",
    "Exception raised from",
    "recvValue failed",
    "Connection reset",
    "SIGABRT",
    "Traceback (most",
)


@dataclass(frozen=True)
class Ended:
    """How one run ended; `odd`: what it said that nobody wants to see."""

    way: str
    exit_code: int
    odd: tuple[str, ...]
    said: str

    @property
    def well(self) -> bool:
        """The exception's traceback is the program's own, and due."""
        own = {"Traceback (most"} if self.way == "exception" else set()
        return self.exit_code == WAYS[self.way][1] and set(self.odd) <= own


@contextmanager
def two_hosts(folder: Path) -> Iterator[netns.Rig]:
    with netns.hosts(2, folder / "rig", rails=1) as rig:
        write_cluster(rig, {"h200": ((0, 2),), "mi325x": ((1, 2),)}, folder / "cluster.yaml")
        yield rig


def ended(rig: netns.Rig, folder: Path, way: str, number: int) -> Ended:
    """One run, to its end."""
    program = folder / "program" / "ends.py"
    program.parent.mkdir(exist_ok=True)
    program.write_text(PROGRAM + WAYS[way][0] + "\n")
    argv = command("run", "--cluster", "cluster.yaml", "--run-dir", f"run-{number}", "--", "python", str(program))
    done = subprocess.run(
        argv, cwd=folder, env=environment(rig), text=True, capture_output=True, timeout=300, check=False
    )
    said = done.stdout + done.stderr
    return Ended(way, done.returncode, tuple(word for word in ODD if word in said), said[-2000:])


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many others want the cores, too."""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500, help="of each way")
    parser.add_argument("--lanes", type=int, default=1, help="rigs that run side by side, each other's load")
    parser.add_argument("--load", type=int, default=4, help="processes that only take time")
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--out", type=Path, help="a line of JSON per run that did not end well")
    options = parser.parse_args()
    if not netns.ready():
        return 3
    todo = [way for _ in range(options.runs) for way in ([options.only] if options.only else WAYS)]
    numbered, every, bad = iter(list(enumerate(todo))), Counter[str](), Counter[str]()

    def lane(rig: netns.Rig, folder: Path) -> None:
        while (following := next(numbered, None)) is not None:
            one = ended(rig, folder, following[1], following[0])
            every[one.way] += 1
            bad[one.way] += not one.well
            if not one.well:
                print(f"BAD {one.way}: exit {one.exit_code}, {one.odd}", flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(vars(one)) + "\n")
            if every.total() % 50 == 0:
                print(f"{every.total()} of {len(todo)}, {bad.total()} bad", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), ExitStack() as stack:  # told to end, it says what it has seen
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="he"))) for _ in range(options.lanes)]
        rigs = [stack.enter_context(two_hosts(folder)) for folder in folders]
        stack.enter_context(load(options.load))
        lanes = stack.enter_context(ThreadPoolExecutor(options.lanes))
        stack.callback(list, numbered)  # then no lane takes another
        for done in [lanes.submit(lane, *one) for one in zip(rigs, folders, strict=True)]:
            done.result()
    for way, count in every.items():
        print(f"{way}: {count - bad[way]} of {count} ended well", flush=True)
    return int(bad.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
