"""A peer is killed, stopped or partitioned at random moments of all-reduces: all ranks end with its name, in time.

    python -m tests.bench.kill [--moments 50] [--seed N] [--bridge tcp|shm] [--gpus N]

Islands of 2 and 2 ranks on two hosts, which are network namespaces where those can be made (otherwise this machine, and
nobody is partitioned; over shm and on GPUs neither). `--gpus`: so many ranks on GPUs, half of them an island, NCCL
inside; both islands share the GPUs where there are fewer. The seed is printed: it repeats the moments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hetctl.comm.contract import variables
from tests.busy import busy
from tests.rigs import netns

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
TIMEOUT_S, ALLOWED_S = 3.0, 8.0  # of an operation; for the error everywhere: deadline + 5 s
HOSTS = ("alpha", "beta")


@dataclass(frozen=True)
class Job:
    """What every moment runs: equal islands of `each` ranks, by which bridge, on CPUs or GPUs, in namespaces or not."""

    each: int
    bridge: str
    gpus: bool
    namespaces: bool

    @property
    def ranks(self) -> range:
        return range(2 * self.each)

    def host_of(self, rank: int) -> str:
        return HOSTS[rank >= self.each and self.bridge == "tcp"]


@dataclass(frozen=True)
class Moment:
    """Who is lost, how, and how many seconds after the first sum; a partition loses the victim's whole host."""

    way: str
    victim: int
    after_s: float
    elements: int

    @property
    def lost(self) -> set[int]:
        """The ranks whose end nobody awaits."""
        return {self.victim} if self.way in SIGNALS else set()

    def names(self, job: Job, rank: int) -> list[str]:
        """What the error on `rank` may say: any of these is the truth."""
        here = job.host_of(rank)
        gone = [self.victim] if self.way in SIGNALS else [r for r in job.ranks if job.host_of(r) != here]
        cut_off = ["the job's store does not answer"] if self.way == "partitioned" and here != HOSTS[0] else []
        return [f"rank {r} on {job.host_of(r)}" for r in gone] + cut_off


def moments(count: int, seed: int, ways: Sequence[str], job: Job) -> list[Moment]:
    """Random moments, the same ones for a seed."""
    dice = random.Random(seed)
    sizes = [100, 10**5, 4 * 10**6, 10**8] if job.gpus else [100, 10**5, 4 * 10**6]
    return [
        Moment(dice.choice(ways), dice.randrange(1, len(job.ranks)), dice.uniform(0, 1), dice.choice(sizes))
        for _ in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--bridge", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--gpus", type=int, default=0, help="so many ranks on GPUs instead of 2 + 2 on CPUs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank_of_job(asked.rank, json.loads(os.environ["BENCH"]))
        return
    why_not = "over shm" if asked.bridge == "shm" else "on GPUs" if asked.gpus else netns.unavailable()
    job = Job(asked.gpus // 2 or 2, asked.bridge, bool(asked.gpus), not why_not)
    print(f"seed {asked.seed}" + (f"; nobody is partitioned: {why_not}" if why_not else ""), flush=True)
    ways, wrong = [*SIGNALS] if why_not else [*SIGNALS, "partitioned"], 0
    for number, moment in enumerate(moments(asked.moments, asked.seed, ways, job), 1):
        faults, slowest = try_moment(moment, job)
        wrong += bool(faults)
        print(f"{number:3} {moment}: {'; '.join(faults) or f'right, {slowest:.1f} s'}", flush=True)
    print(f"{asked.moments - wrong} of {asked.moments} moments ended everybody with the name within {ALLOWED_S:g} s")
    sys.exit(bool(wrong))


def try_moment(moment: Moment, job: Job) -> tuple[list[str], float]:
    """What was wrong at one moment (nothing, if all is well), and the seconds until the last rank had its error."""
    with tempfile.TemporaryDirectory() as name, places(Path(name), namespaces=job.namespaces) as (spaces, address):
        folder = Path(name)
        running = [start(rank, folder, spaces, address, moment, job) for rank in job.ranks]
        try:
            _await(lambda: all((folder / f"started-{r}").exists() for r in job.ranks), seconds=300)
            time.sleep(moment.after_s)  # the random moment itself
            lost_at = time.monotonic()
            if moment.way in SIGNALS:
                running[moment.victim].send_signal(SIGNALS[moment.way])
            else:
                space = spaces[HOSTS.index(job.host_of(moment.victim))]
                subprocess.run(["ip", "-n", space, "link", "set", "eth0", "down"], check=True)
            awaited = [r for r in job.ranks if r not in moment.lost]
            with contextlib.suppress(TimeoutError):
                _await(lambda: all((folder / f"error-{r}").exists() for r in awaited), seconds=ALLOWED_S * busy() + 12)
            return _faults(moment, job, awaited, folder, lost_at)
        finally:
            for process in running:
                process.kill()
                process.wait()


def _faults(moment: Moment, job: Job, awaited: list[int], folder: Path, lost_at: float) -> tuple[list[str], float]:
    faults, slowest = [], 0.0
    for rank in awaited:
        if not (folder / f"error-{rank}").exists():
            faults.append(f"rank {rank} did not end")
            continue
        said = json.loads((folder / f"error-{rank}").read_text())
        slowest = max(slowest, said["time"] - lost_at)
        if said["time"] - lost_at > ALLOWED_S * busy():
            faults.append(f"rank {rank} took {said['time'] - lost_at:.1f} s")
        if "all_reduce" not in said["error"] or not any(name in said["error"] for name in moment.names(job, rank)):
            faults.append(f"rank {rank} said: {said['error']}")
    return faults, slowest


@contextlib.contextmanager
def places(folder: Path, *, namespaces: bool) -> Iterator[tuple[list[str], str]]:
    """The namespaces of both hosts ('' for none) and the address of the first."""
    if not namespaces:
        yield ["", ""], "127.0.0.1"
        return
    (folder / "rig").mkdir()
    with netns.hosts([netns.HostSpec(sshd=False)] * 2, folder / "rig") as rig:
        yield [h.namespace for h in rig.hosts], rig.hosts[0].address


def start(
    rank: int, folder: Path, spaces: list[str], address: str, moment: Moment, job: Job
) -> subprocess.Popen[bytes]:
    space = spaces[HOSTS.index(job.host_of(rank))]
    settings = {"folder": str(folder), "store": address, "elements": moment.elements, "job": asdict(job)}
    env = {**os.environ, "BENCH": json.dumps(settings), "PYTHONPATH": str(ROOT)}
    if space:
        env["GLOO_SOCKET_IFNAME"] = "eth0"
    words = [sys.executable, "-m", "tests.bench.kill", "--rank", str(rank)]
    prefix = ["ip", "netns", "exec", space] if space else []
    return subprocess.Popen([*prefix, *words], cwd=ROOT, env=env, stderr=subprocess.DEVNULL)


def rank_of_job(rank: int, settings: dict[str, Any]) -> None:
    """Sums without end; the error goes to a file with its time."""
    import torch
    import torch.distributed as dist

    from hetctl.comm.contract.placement import PlacedBridge, PlacedIsland, Placement
    from hetctl.comm.group.autoload import register

    folder, job = Path(settings["folder"]), Job(**settings["job"])
    world, kind = len(job.ranks), ("nvidia", "nccl") if job.gpus else ("cpu", "gloo")
    islands = (
        PlacedIsland("one", *kind, tuple(range(job.each))),
        PlacedIsland("two", *kind, tuple(range(job.each, world))),
    )
    bridges = (PlacedBridge(("one", "two"), job.bridge),)  # type: ignore[arg-type]
    path = folder / f"placement-{rank}.json"
    path.write_text(Placement(islands, bridges, hosts=tuple(job.host_of(r) for r in job.ranks)).to_json())
    os.environ[variables.PLACEMENT] = str(path)
    torch.set_num_threads(1)
    register()
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore(settings["store"], 0, world, is_master=True, wait_for_workers=False)
        (folder / "port.part").write_text(str(store.port))
        (folder / "port.part").rename(port)
    else:
        _await(port.exists, seconds=300)
        store = dist.TCPStore(settings["store"], int(port.read_text()), world, is_master=False)
    dist.init_process_group("het", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=60))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    device = torch.device("cuda", rank % torch.cuda.device_count()) if job.gpus else torch.device("cpu")
    if job.gpus:
        torch.cuda.set_device(device)
    data = torch.ones(settings["elements"], device=device)
    one_sum(data, group)
    (folder / f"started-{rank}").touch()
    try:
        while True:
            one_sum(data, group)
    except RuntimeError as error:
        said = json.dumps({"error": str(error), "time": time.monotonic()})
    (folder / f"part-{rank}").write_text(said)
    (folder / f"part-{rank}").rename(folder / f"error-{rank}")
    signal.pause()  # until the parent has seen everybody: the store must not go with rank 0


def one_sum(data: Any, group: Any) -> None:
    """Everybody's ones, and what they are; on a GPU the host waits for the device, which a lost peer must not hang."""
    import torch
    import torch.distributed as dist

    total = data.clone()
    dist.all_reduce(total, group=group)
    if total.is_cuda:
        torch.cuda.synchronize()


def _await(condition: Any, *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
