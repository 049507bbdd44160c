"""Two builds of torch, and two Pythons, in one job: each island of this machine is started by a Python of its own.

PYTHONPATH=. python3 tests/gpu/two_builds_check.py --spec h200:1,cpu:2 --python cpu=/other/bin/python
PYTHONPATH=. python3 tests/gpu/two_builds_check.py --spec h200:2,mi325x:2 --python amd=/other/bin/python      (on CPUs)

Twelve fp64 steps as a pipeline and as replicas against one process, within 1e-10. Then a run that goes on from its
checkpoint under other layouts, so that what one build saved the other one reads, beside one that stays in one process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetctl.bench.parity import Across, compare
from hetctl.comm.contract.cluster import Access, Cluster, save_cluster
from hetctl.console import Sink
from hetctl.discovery.which_cluster import Where, running_cluster

STEPS, TOLERANCE = 12, 1e-10
CHAIN = (
    "pipeline=2 order=given",
    "pipeline=1",
    "pipeline=2 order=given layers=[1,3]",
    "pipeline=2 order=given schedule=zero-bubble",
)
LAYERS = 4


def with_pythons(cluster: Cluster, pythons: dict[str, str]) -> Cluster:
    """The cluster, each vendor's ranks started by the Python named for it, by this one where none is."""
    mine = {island.vendor: sys.executable for island in cluster.islands}
    access = Access(python=sys.executable, pythons=mine | pythons)
    return replace(cluster, hosts=tuple(replace(host, access=access) for host in cluster.hosts))


def train(folder: Path, cluster: Path, steps: int, settings: Sequence[str]) -> None:
    """A run in `folder` up to that step, from what is there."""
    model = {"model.name": str(folder.parent / "model.json"), "model.seq_len": 32, "batch.global_batch": 8}
    how = {
        "train.steps": steps,
        "train.precision": "fp64",
        "checkpoint.every": 2,
        "data.source": folder.parent / "text",
    }
    words = [*(f"{k}={v}" for k, v in {**model, **how}.items()), *(f"parallelism.{s}" for s in settings)]
    line = [sys.executable, "-m", "hetctl", "train", "--cluster", str(cluster), "--run-dir", str(folder)]
    done = subprocess.run([*line, *(f"--set={w}" for w in words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{settings}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def off_along_the_chain(folder: Path, cluster: Cluster) -> float:
    """Two steps under each layout, from the last one's checkpoint, against one process that makes them all."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 176}
    shape |= {"num_hidden_layers": LAYERS, "vocab_size": 257, "max_position_embeddings": 64, "model_type": "llama"}
    (folder / "model.json").write_text(json.dumps(shape))
    (folder / "text").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(4000)))
    first = replace(cluster.islands[0], members=cluster.islands[0].members[:1])
    alone = replace(cluster, islands=(first,), links=())
    save_cluster(folder / "both.yaml", cluster)
    save_cluster(folder / "alone.yaml", alone)
    train(folder / "one", folder / "alone.yaml", 2 * len(CHAIN), [])
    for number, layout in enumerate(CHAIN, 1):
        train(folder / "many", folder / "both.yaml", 2 * number, layout.split())
    one, many = losses(folder / "one"), losses(folder / "many")
    assert len(one) == len(many) == 2 * len(CHAIN), (one, many)
    return max(abs(a - b) for a, b in zip(one, many, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="h200:1,cpu:2")
    parser.add_argument("--python", action="append", required=True, metavar="VENDOR=PATH")
    asked, failed = parser.parse_args(), 0
    pythons = dict(word.split("=", 1) for word in asked.python)
    say = "import sys, torch; print('Python', sys.version.split()[0], 'with torch', torch.__version__)"
    for python in (sys.executable, *pythons.values()):
        print(
            subprocess.run([python, "-c", say], capture_output=True, text=True, check=True).stdout.strip(), flush=True
        )
    cluster = with_pythons(running_cluster(Where(None, asked.spec), Sink()), pythons)
    for across in get_args(Across):
        found = compare(cluster, across, steps=STEPS, sink=Sink())
        failed += found["worst_deviation"] > TOLERANCE
        print(f"{across}: off by {found['worst_deviation']:.1e}, {found['bridge_bytes']:,} bytes; {found['layout']}")
    with tempfile.TemporaryDirectory() as folder:
        off = off_along_the_chain(Path(folder), cluster)
    failed += off > TOLERANCE
    print(f"a checkpoint along {len(CHAIN)} layouts: off by {off:.1e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
