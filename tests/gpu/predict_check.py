"""Predictions written down before the runs, and the runs beside them, on one, two or four GPUs of one host.

bash tests/gpu/predict_check.sh 2 FOLDER     the profile, the predictions and the runs, all on this machine
python -m tests.gpu.predict_check predict     from the profile beside this file, as of H200s; anywhere

Every case is planned from the profile alone. The run prints a table and one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetctl.bench import plans
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.emulate import Machine, label_machine, parse_spec
from hetctl.comm.contract.errors import Infeasible
from hetctl.commands.options import RunOptions
from hetctl.console import Sink
from hetctl.discovery.this_machine import gpu_class, this_machine
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.profile import load_profile
from hetctl.trainer.recipe import load_recipe

H200_BYTES = 150_109_880_320  # what torch reports of one
SMALL, LARGE, TIED = "llama-1b-untied", "llama-8b", "llama-1b"
UNMEASURED = ("qwen3-0.6b", "llama-3b", "qwen3-4b")  # whose shapes are between others'
STEPS = {SMALL: 5, TIED: 5}


@dataclass(frozen=True)
class Case:
    """One configuration: islands, transport, model, samples per step, and what the recipe pins."""

    spec: str
    bridge: str
    model: str
    samples: int
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        words = [self.spec, self.bridge, self.model, f"batch {self.samples}", *self.settings]
        return " ".join(w.removeprefix("parallelism.").removeprefix("batch.") for w in words)


def _pipeline(*settings: str) -> tuple[str, ...]:
    return ("parallelism.pipeline=2", "parallelism.order=given", *settings)


def _mb(size: int) -> str:
    return f"batch.micro_batch_size={size}"


DATA = ("parallelism.pipeline=1", "parallelism.data=2")
SCHEDULES = ("1f1b", "eager-1f1b", "zero-bubble", "interleaved")
PAIR, SLOW, NATIVE = "h200:1,mi325x:1", "h200:1,mi325x:1@0.6", "h200:2"
ONE, HOST = "h200:1", "parallelism.optimizer_state=host"
FOUR, FOUR_SLOW = "h200:2,mi325x:2", "h200:2,mi325x:2@0.6"
CASES = (
    Case(PAIR, "shm", SMALL, 16, _pipeline(_mb(1))),
    *(Case(PAIR, "shm", SMALL, 16, _pipeline(_mb(1), f"parallelism.schedule={name}")) for name in SCHEDULES),
    Case(PAIR, "shm", SMALL, 16, _pipeline(_mb(1), "parallelism.layers=[10,6]")),
    Case(PAIR, "shm", SMALL, 16, _pipeline(_mb(2), "parallelism.layers=[6,10]")),
    Case(PAIR, "shm", SMALL, 32, _pipeline(_mb(4))),
    Case(PAIR, "shm", SMALL, 32, _pipeline(_mb(2), "parallelism.recompute=full")),
    Case(PAIR, "shm", SMALL, 16, (*DATA, _mb(1))),
    Case(PAIR, "shm", SMALL, 64, (*DATA, _mb(4))),
    Case(PAIR, "shm", LARGE, 16, _pipeline(_mb(1))),
    Case(PAIR, "shm", LARGE, 16, _pipeline(_mb(1), "parallelism.layers=[20,12]")),
    Case(PAIR, "shm", LARGE, 8, _pipeline(_mb(1), "parallelism.layers=[16,16]")),
    Case(PAIR, "shm", LARGE, 16, _pipeline(_mb(2), "parallelism.recompute=full")),
    Case(PAIR, "tcp", SMALL, 16, _pipeline(_mb(1))),
    *(Case(PAIR, "tcp", SMALL, 16 * size, (*DATA, _mb(size))) for size in (2, 3, 4)),
    Case(PAIR, "tcp", LARGE, 16, _pipeline(_mb(1))),
    Case(PAIR, "shm", TIED, 16, _pipeline(_mb(1))),
    Case(PAIR, "tcp", TIED, 16, _pipeline(_mb(1))),
    Case(NATIVE, "auto", TIED, 16, _pipeline(_mb(1))),
    Case(SLOW, "shm", SMALL, 32, _pipeline(_mb(2))),
    Case(SLOW, "shm", SMALL, 32, _pipeline(_mb(2), "parallelism.layers=[8,8]")),
    Case(SLOW, "shm", SMALL, 64, DATA),
    Case(SLOW, "shm", LARGE, 16, _pipeline(_mb(1))),
    Case(NATIVE, "auto", SMALL, 16, _pipeline(_mb(1))),
    Case(NATIVE, "auto", SMALL, 32, ("parallelism.pipeline=1", _mb(4))),
    Case(NATIVE, "auto", SMALL, 16, ("parallelism.pipeline=1", "parallelism.tensor=2", _mb(1))),
    Case(NATIVE, "auto", LARGE, 16, _pipeline(_mb(1))),
    Case(NATIVE, "auto", LARGE, 16, ("parallelism.pipeline=1", _mb(2))),
    *(Case(ONE, "auto", SMALL, 16, (_mb(size),)) for size in (1, 2, 4)),
    Case(ONE, "auto", SMALL, 16, (_mb(2), "parallelism.recompute=full")),
    Case(ONE, "auto", TIED, 16, (_mb(1),)),
    *(Case(f"{ONE}@0.6", "auto", SMALL, 16, (_mb(size),)) for size in (1, 4)),
    *(Case(ONE, "auto", model, 16, (_mb(1),)) for model in UNMEASURED),
    *(Case(ONE, "auto", model, 16, (_mb(2), "parallelism.recompute=full")) for model in UNMEASURED),
    Case(ONE, "auto", SMALL, 8, (HOST, _mb(1))),
    Case(ONE, "auto", SMALL, 32, (HOST, _mb(4))),
    Case(ONE, "auto", LARGE, 8, (HOST, _mb(1))),
    Case(ONE, "auto", LARGE, 16, (HOST, _mb(2), "parallelism.recompute=full")),
    Case(PAIR, "shm", SMALL, 16, _pipeline(HOST, _mb(1))),
    Case(FOUR, "shm", LARGE, 32, ()),
    Case(FOUR, "shm", LARGE, 32, ("parallelism.pipeline=1",)),
    Case(FOUR, "tcp", LARGE, 32, _pipeline(_mb(2))),
    Case(FOUR_SLOW, "shm", LARGE, 32, ()),
    Case(FOUR_SLOW, "shm", SMALL, 64, DATA),
)


def gpus_of(spec: str) -> int:
    return sum(island.count for island in parse_spec(spec, CLASSES))


def cluster_of(spec: str) -> Cluster:
    """The cluster that `--emulate` makes of this machine's GPUs; where it has none, of H200s."""
    islands = parse_spec(spec, CLASSES)
    machine = Machine("h200-host", "nccl", (H200_BYTES,) * gpus_of(spec), "h200")
    if gpu_class():
        machine, _ = this_machine([island.count for island in islands])
    return label_machine(islands, machine)


def planned(case: Case, cluster: Cluster, profile: Path) -> plans.PlanCase:
    asked = RunOptions(
        settings=["parallelism.tensor=1", "optimizer.lr=1.0e-5", *case.settings],
        model=case.model,
        global_batch=case.samples,
        seq_len=4096,
        bridge=case.bridge,
    )
    recipe = load_recipe(None, asked.overrides)
    plan = make_plan(cluster, recipe, profile=load_profile(profile))
    return plans.PlanCase(plan, recipe, case.name)


def predict(profile: Path, output: Path) -> int:
    rows = []
    for case in CASES:
        try:
            made = planned(case, cluster_of(case.spec), profile)
        except Infeasible as error:
            print(f"{case.name}: {error}")
            continue
        assert made.plan.predicted is not None
        rows.append(
            {
                "case": case.name,
                "layout": plans.layout(made.plan),
                "basis": made.plan.predicted.basis,
                "predicted_s": made.plan.predicted.step_time_s,
                "predicted_memory_bytes": max(made.plan.predicted.memory_bytes),
            }
        )
        print(f"{rows[-1]['predicted_s']:8.4f} s  {case.name}: {rows[-1]['layout']}")
    output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def run(predictions: Path, profile: Path, gpus: int, *, only: str, skip: list[str], steps: int | None) -> int:
    known = {row["case"]: row for row in json.loads(predictions.read_text(encoding="utf-8"))}
    wanted = [c for c in CASES if c.name in known and gpus_of(c.spec) == gpus]
    wanted = [c for c in wanted if only in c.name and not any(s in c.name for s in skip)]
    rows: list[dict[str, Any]] = []
    for spec, bridge in dict.fromkeys((c.spec, c.bridge) for c in wanted):
        for model in dict.fromkeys(c.model for c in wanted if (c.spec, c.bridge) == (spec, bridge)):
            cluster = cluster_of(spec)
            cases = [
                planned(c, cluster, profile) for c in wanted if (c.spec, c.bridge, c.model) == (spec, bridge, model)
            ]
            began = time.monotonic()
            try:
                found = plans.bench_plans(cluster, cases, steps=steps or STEPS.get(model, 3), sink=Sink())["plans"]
            except Exception as error:
                rows += [{"name": c.name, "failed": f"{type(error).__name__}: {error}"[:1500]} for c in cases]
                print(f"FAILED {spec} {bridge} {model}: {error} {getattr(error, 'hint', '')}"[:1500], flush=True)
                continue
            for row in found:
                written = known[row["name"]]
                error = written["predicted_s"] / row["measured_s"] - 1
                rows.append(row | {"predicted_s": written["predicted_s"], "error": error})
                low, high = row["spread_s"]
                held = (row["peak_memory_bytes"] or 0) / 2**30
                print(
                    f"{written['predicted_s']:7.3f} {row['measured_s']:7.3f} ({low:.3f}-{high:.3f}) {error:+6.1%} "
                    f"mem {written['predicted_memory_bytes'] / 2**30:5.1f}/{held:5.1f}  {row['name']} [{row['layout']}]"
                    + (f" {row['slower']}" if row["slower"] else ""),
                    flush=True,
                )
                for rank, (spent, (foretold, held)) in enumerate(zip(row["spent_s"], row["memory_bytes"], strict=True)):
                    memory = f"mem {foretold / 2**30:.1f}/{(held or 0) / 2**30:.1f}"
                    print(
                        f"        rank {rank}:", *(f"{kind} {s:.3f}" for kind, s in spent.items()), memory, flush=True
                    )
            print(f"# {spec} {bridge} {model}: {time.monotonic() - began:.0f} s", flush=True)
    errors = sorted(abs(r["error"]) for r in rows if "error" in r)
    if errors:
        print(f"median {statistics.median(errors):.1%}, worst {errors[-1]:.1%} of {len(errors)}")
    print(json.dumps(rows))
    return 1 if any("failed" in r for r in rows) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("predict", "run"))
    here = Path(__file__).parent / "predictions"
    parser.add_argument("--profile", type=Path, default=here / "profile.yaml")
    parser.add_argument("--predictions", "--output", type=Path, default=here / "predictions.json")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    if options.what == "predict":
        return predict(options.profile, options.predictions)
    return run(
        options.predictions, options.profile, options.gpus, only=options.only, skip=options.skip, steps=options.steps
    )


if __name__ == "__main__":
    sys.exit(main())
