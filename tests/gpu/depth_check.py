"""More forwards in flight than eager 1F1B has, over a slow link (decision 126): python3 tests/gpu/depth_check.py

Two GPUs of one host, in a network namespace whose loopback is shaped, for both directions together:
ip netns add slow; ip -n slow link set lo up; tc -n slow qdisc add dev lo root tbf rate 9gbit burst 512kb latency 100ms
ip netns exec slow python3 tests/gpu/depth_check.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetctl.bench import plans
from hetctl.comm.contract.cluster import Cluster
from hetctl.commands.options import RunOptions
from hetctl.console import Sink
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe
from tests.gpu.predict_check import PAIR, SMALL, cluster_of

DEPTHS = (2, 3, 4, 5, 7)  # of the first of two stages; eager 1F1B has 3
PINNED = ("tensor=1", "order=given", "layers=[8,8]", "schedule=eager-1f1b")


def case(cluster: Cluster, depth: int) -> plans.PlanCase:
    settings = [f"parallelism.{pin}" for pin in (*PINNED, f"forwards_ahead=[{depth},1]")]
    settings += ["batch.micro_batch_size=1", "optimizer.lr=1.0e-5"]
    asked = RunOptions(settings=settings, model=SMALL, global_batch=32, seq_len=4096, bridge="tcp")
    recipe = load_recipe(None, asked.overrides)
    return plans.PlanCase(make_plan(cluster, recipe), recipe, f"{depth} in flight")


def main() -> int:
    cluster = cluster_of(PAIR)
    found = plans.bench_plans(cluster, [case(cluster, depth) for depth in DEPTHS], steps=6, sink=Sink())["plans"]
    eager = next(row["measured_s"] for row, depth in zip(found, DEPTHS, strict=True) if depth == 3)
    for row in found:
        low, high = row["spread_s"]
        ratio = row["measured_s"] / eager
        print(f"{row['name']}: {row['measured_s']:.3f} s ({low:.3f} - {high:.3f}), {ratio:.3f} of eager 1F1B")
    return 0


if __name__ == "__main__":
    sys.exit(main())
