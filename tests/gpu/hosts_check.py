"""The whole path on GPUs: namespaced hosts with real sshds, discovered, examined, trained on, measured.

PYTHONPATH=. python3 tests/gpu/hosts_check.py [--gpus 2] [--hosts 2] [--rates 10gbit,2gbit] [--parts path,pipeline]

As root. The hosts share out this machine's GPUs evenly, one GPU to several hosts of an island where there are more
hosts; what joins them is a bridge of veth pairs, shaped to `--rates` in turn. A cluster file has one island per vendor
and fabric, so the script splits the single one into halves: native libraries inside, TCP between.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetctl.bench import plans
from hetctl.comm.contract.cluster import Island, IslandLink, TransportOption, load_cluster, save_cluster
from hetctl.comm.contract.plan import Replica, Stage, load_plan, save_plan
from hetctl.commands.options import RunOptions
from hetctl.trainer.planning.assemble import assemble
from hetctl.trainer.recipe import load_recipe
from tests.rigs import netns
from tests.rigs.cluster import command, environment, losses

LLAMA = (
    "model.name=llama-160m",
    "data.source=python-stdlib",
    "model.seq_len=1024",
    "batch.global_batch=16",
    "train.steps=8",
    "train.validation_samples=16",
    "checkpoint.last=false",
    "train.precision=fp64",  # bf16 runs of one plan differ by 1e-3 after eight steps: kernels add in any order
    "optimizer.warmup_steps=2",
    "parallelism.pipeline=2",  # a model so small is faster on one host alone: then nothing would cross the bridge
    "parallelism.data=1",
)


def hetctl(rig: netns.Rig, folder: Path, *words: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    env = environment(rig)
    done = subprocess.run(command(*words), cwd=folder, env=env, text=True, capture_output=True, timeout=seconds)
    print(f"$ hetctl {' '.join(words)} -> {done.returncode}", flush=True)
    return done


def must(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode:
        raise SystemExit((done.stdout + done.stderr)[-4000:])
    return done


def write_inventory(rig: netns.Rig, folder: Path, gpus: int, *, first: int) -> None:
    hosts: dict[str, Any] = {}
    for number, host in enumerate(rig.hosts):
        begin, end = (n * gpus // len(rig.hosts) for n in (number, number + 1))
        mine = list(range(first + begin, first + max(end, begin + 1)))
        # NCCL takes namespaces for one machine, and refuses a GPU twice in one
        env = {"NCCL_HOSTID": host.name}
        hosts[host.name] = {"python": sys.executable, "data_address": host.rails[0], "gpus": mine, "env": env}
    # namespaces do not share the abstract sockets that NCCL passes memory handles over
    env = {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    text = json.dumps({"defaults": {"env": env}, "hosts": hosts})
    (folder / "inventory.yaml").write_text(text)


def split_in_two(file: Path) -> None:
    """Two islands, half of the hosts each, TCP between them."""
    cluster = load_cluster(file)
    whole = cluster.islands[0]
    half = [host.name for host in cluster.hosts][: len(cluster.hosts) // 2]
    first = tuple(m for m in whole.members if m.host in half)
    second = tuple(m for m in whole.members if m.host not in half)
    islands = tuple(
        Island(f"{whole.name}-{n}", whole.vendor, whole.fabric, members) for n, members in enumerate((first, second))
    )
    names = (islands[0].name, islands[1].name)
    link = IslandLink(names, (TransportOption("tcp", True, "the veth pairs"),))
    save_cluster(file, replace(cluster, islands=islands, links=(link,)))


def write_wide_plan(folder: Path) -> None:
    """The planner's plan, but each stage on all ranks of its island: of so small a model it leaves most to one."""
    cluster = load_cluster(folder / "cluster.yaml")
    recipe = load_recipe(None, RunOptions(settings=LLAMA).overrides)
    (case,) = plans.candidates(cluster, recipe, profile=None, alternatives=0)
    stages = []
    for stage in case.plan.replicas[0].stages:
        ranks = case.plan.island_of_rank[stage.ranks[0]].ranks
        size = 2 * len(ranks)
        stages.append(Stage(stage.layers, ranks, size, recipe.batch.global_batch // size, shards=len(ranks)))
    plan = assemble(
        cluster,
        recipe,
        recipe.shape(),
        replicas=(Replica(tuple(stages)),),
        schedule=case.plan.schedule,
        forwards_ahead=case.plan.forwards_ahead,
        predicted=None,
        reasons=("Every GPU of an island takes part in its stage.",),
    )
    save_plan(folder / "wide.yaml", plan)


def whole_path(rig: netns.Rig, folder: Path, gpus: int) -> None:
    """discover, doctor, train; and the same plan emulated in one namespace, one rank per stage where GPUs are few."""
    ranks = max(gpus, len(rig.hosts))
    settings = [w for key in LLAMA for w in ("--set", key)]
    doctor = hetctl(rig, folder, "doctor", "-i", "inventory.yaml", "--level", "pairs", "--json")
    found = json.loads(doctor.stdout)
    failed = [f"{f['check']} on {f['host']}: {f['reason']}" for f in found["findings"] if f["state"] == "fail"]
    print(f"doctor: {found['problems']} problems\n  " + "\n  ".join(failed))
    for f in found["findings"]:
        if f["check"].split(".")[0] in ("perf", "island"):
            print(f"  {f['state']:8} {f['check']} on {f.get('host') or f.get('pair')}: {f['reason']}")
    began = time.monotonic()
    write_wide_plan(folder)
    plan = ("--cluster", "cluster.yaml", "--plan", "wide.yaml")
    must(hetctl(rig, folder, "train", *settings, *plan, "--skip-checks", "--run-dir", "run"))
    print(f"train over ssh: {time.monotonic() - began:.1f} s")
    layout = ("--plan", "run/plan.yaml") if ranks == gpus else ("--emulate", "h200:1,h200:1")
    must(hetctl(rig, folder, "train", *settings, *layout, "--run-dir", "alone"))
    there, here = losses(folder / "run"), losses(folder / "alone")
    far = max(abs(a - b) / abs(b) for a, b in zip(there, here, strict=True))
    print(
        f"losses on hosts {there[0]:.6f} .. {there[-1]:.6f}, emulated {here[0]:.6f} .. {here[-1]:.6f}: {far:.1e} apart"
    )
    summary = json.loads((folder / "run" / "summary.json").read_text())
    print(json.dumps({k: summary[k] for k in ("bridge_bytes", "processes_left", "tokens_per_s")}))
    assert far < 1e-9, far
    replicas = load_plan(folder / "run" / "plan.yaml").replicas
    used = {rank for replica in replicas for stage in replica.stages for rank in stage.ranks}
    assert used == set(range(ranks)), f"only ranks {sorted(used)} of {ranks} worked"
    for replica in replicas:
        for stage in replica.stages:
            print(f"layers {stage.layers}: ranks {stage.ranks}")
    assert summary["bridge_bytes"] > 1 << 20, "next to nothing crossed the bridge"


def reshape(rig: netns.Rig, rate: str) -> None:
    """Shape both ends of every host's rail anew."""
    for number, host in enumerate(rig.hosts):
        shape = netns.shaping(rate)
        outer = f"{host.namespace[:-2]}r0v{number}"
        subprocess.run(["tc", "qdisc", "replace", "dev", outer, *shape], check=True)
        subprocess.run(["tc", "-n", host.namespace, "qdisc", "replace", "dev", "rail0", *shape], check=True)


def pipeline(rig: netns.Rig, folder: Path, model: str, seq_len: int, rate: str, rounds: int) -> None:
    """`hetctl bench pipeline` over the shaped pair."""
    reshape(rig, rate)
    words = ("--cluster", "cluster.yaml", "--model", model, "--seq-len", str(seq_len), "--rounds", str(rounds))
    done = must(hetctl(rig, folder, "bench", "pipeline", *words, "--json"))
    found = json.loads(done.stdout)
    ratios = {k: f"{statistics.median(v):.3f} ({min(v):.3f}-{max(v):.3f})" for k, v in found["ratios"].items()}
    rates = {k: round(statistics.median(v)) for k, v in found["tokens_per_s"].items()}
    print(json.dumps({"model": model, "seq_len": seq_len, "rate": rate, "tokens_per_s": rates, "ratios": ratios}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--first-gpu", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", default="10gbit")
    parser.add_argument("--parts", default="path,pipeline")
    parser.add_argument("--models", default="llama-8b:4096", help="MODEL:TOKENS,.. for the pipeline")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.gpus % 2 or options.hosts % 2 or 16 % max(options.gpus, options.hosts):
        parser.error("two islands of as many GPUs and hosts each, of 2, 4, 8 or 16 ranks together")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    rates = options.rates.split(",")
    why_not = netns.unavailable()
    if why_not:
        raise SystemExit(why_not)
    with (
        tempfile.TemporaryDirectory() as name,
        netns.hosts(options.hosts, Path(name) / "rig", rails=1, rate=rates[0]) as rig,
    ):
        folder = Path(name) / "mine"
        folder.mkdir()
        write_inventory(rig, folder, options.gpus, first=options.first_gpu)
        must(hetctl(rig, folder, "discover", "-i", "inventory.yaml", "-o", "cluster.yaml"))
        split_in_two(folder / "cluster.yaml")
        if "path" in options.parts:
            whole_path(rig, folder, options.gpus)
        if "pipeline" in options.parts:
            for model, tokens in (word.split(":") for word in options.models.split(",")):
                for rate in rates:
                    pipeline(rig, folder, model, int(tokens), rate, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
