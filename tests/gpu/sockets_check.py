"""One vendor across fabrics: two GPUs that the library takes for two hosts, joined over its sockets and by the bridge.

PYTHONPATH=. python3 tests/gpu/sockets_check.py

Needs two GPUs of one host. `NCCL_HOSTID` makes each rank a host of its own, so the library uses its network between
them; every communicator's own debug output says which. Prints what each group said, that sums and messages are exact,
and the rates of both ways, in turn.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from hetctl.comm.bench import exact, measure
from hetctl.comm.contract import variables
from hetctl.comm.contract.placement import PlacedBridge, PlacedIsland, Placement

MIB = 2**20
ISLANDS = (PlacedIsland("ib", "nvidia", "nccl", (0,)), PlacedIsland("roce", "nvidia", "nccl", (1,)))
ROUNDS, SIZES = 3, (MIB, 16 * MIB, 256 * MIB)


def rank(number: int, folder: Path, results: Any) -> None:
    """What one rank finds: rates by way and size, and which network the library says it uses, by way."""
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(folder / f"nccl-{number}")}
    os.environ.update(debug, NCCL_HOSTID=f"host{number}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    placement = Placement(ISLANDS, (PlacedBridge(("ib", "roce"), "native"),), hosts=("one", "two"))
    (folder / f"placement-{number}").write_text(placement.to_json())
    os.environ[variables.PLACEMENT] = str(folder / f"placement-{number}")
    from hetctl.comm.group.autoload import register

    register()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("het", rank=number, world_size=2, store=store, timeout=timedelta(seconds=60))
    ways = {"native": exact.Ends(dist.group.WORLD, number, 2, device)}
    ways["tcp"] = exact.Ends(measure.make_group("tcp"), number, 2, device)
    found: dict[str, Any] = {name: exact.proved(ends) for name, ends in ways.items()}
    said = _said(folder / f"nccl-{number}")
    for size in SIZES:
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, ends in ways.items():
                data = torch.ones(size // 4, device=device)
                rates[name].append(size / _seconds(lambda d=data, g=ends.group: dist.all_reduce(d, group=g)))
        found[f"{size // MIB} MiB"] = {
            name: f"{statistics.median(r) / 1e9:.2f} ({min(r) / 1e9:.2f} - {max(r) / 1e9:.2f}) GB/s"
            for name, r in rates.items()
        }
    results.put((number, found | {"networks": said}))
    dist.barrier()
    os._exit(0)


def _seconds(call: Callable[[], object], count: int = 4) -> float:
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def _said(log: Path) -> list[str]:
    return sorted(set(re.findall(r"Using network \S+", log.read_text())))


def main() -> int:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [context.Process(target=rank, args=(n, Path(folder), results)) for n in range(2)]
        for one in ranks:
            one.start()
        found = dict(results.get(timeout=180) for _ in ranks)
        for one in ranks:
            one.join()
    for number, about in sorted(found.items()):
        for what, value in about.items():
            print(f"rank {number} | {what} | {value}")
    wrong = [w for about in found.values() for name in ("native", "tcp") for w in about[name]["wrong"]]
    return int(bool(wrong) or any(about["networks"] != ["Using network Socket"] for about in found.values()))


if __name__ == "__main__":
    sys.exit(main())
