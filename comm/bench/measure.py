"""What a bridge does, measured on its ranks: messages and sums of all sizes, latency, and what a gigabyte costs.

`python -m hetctl.comm.bench.measure` is one rank of `hetctl bench bridge`; checks of real devices call the functions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hetctl.comm.bench import exact
from hetctl.comm.bench.exact import Ends
from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import TransportKind
from hetctl.comm.contract.events import Reporter
from hetctl.comm.contract.natives import backend_words
from hetctl.comm.contract.placement import PlacedBridge, Placement, current_placement
from hetctl.comm.contract.units import GiB, KiB, MiB
from hetctl.comm.group.autoload import register
from hetctl.comm.group.backend import create_over
from hetctl.comm.operation.device import has_streams, named_device_types, rank_device, synchronize
from hetctl.comm.operation.recorder import METER

IN_FLIGHT = 4  # messages under way at once
ENOUGH_SECONDS = 0.25  # of messages, up to MOST_MESSAGES: filling the pipeline and the last barrier take milliseconds;
FEWEST, MOST_COLLECTIVES, MOST_MESSAGES = 4, 50, 1000  # of collectives too, where a few calls swing by half
LATENCY_BYTES, LATENCY_TURNS = 1 * KiB, 300
COLLECTIVES = ("all-gather", "reduce-scatter", "broadcast", "all-to-all")  # beside the all-reduce, which plans count on
GROUPS = 8  # raw gloo groups side by side
RAW_MESSAGES = 8
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Task:
    """What to measure: transports by name, sizes up to `max_bytes`, and the native library where it can.

    `islands` and `engines` prove each island's native group and each host's engines instead of timing them.
    """

    transports: tuple[TransportKind, ...]
    max_bytes: int
    native: bool
    islands: bool = False
    engines: bool = False


def sizes_up_to(most: int) -> list[int]:
    """Powers of eight from 1 KiB, and `most` itself, in bytes."""
    return [*(KiB * 8**i for i in range(20) if KiB * 8**i < most), most]


def message_rate(ends: Ends, size: int) -> float:
    """Bytes per second of messages of `size` bytes from the first to the last rank, a few of them in flight."""
    data = [torch.zeros(size, dtype=torch.uint8, device=ends.device) for _ in range(IN_FLIGHT)]

    def seconds(turns: int) -> float:
        ends.settle()
        began = time.perf_counter()
        _stream(ends, data, turns)
        ends.settle()
        return time.perf_counter() - began

    seconds(1)  # connects
    turns = _enough(ends, seconds(IN_FLIGHT) / IN_FLIGHT)
    if turns > IN_FLIGHT:  # of four messages, the barrier takes as long as they do
        turns = _enough(ends, seconds(turns) / turns)
    return size * turns / seconds(turns)


def _enough(ends: Ends, seconds: float, *, most: int = MOST_MESSAGES) -> int:
    """How many messages or calls of about so many seconds to time: what the first rank says."""
    said = torch.tensor([min(max(int(ENOUGH_SECONDS / seconds), FEWEST), most)], dtype=torch.int64)
    dist.broadcast(said, 0, group=ends.group)
    return int(said)


def _stream(ends: Ends, data: list[torch.Tensor], count: int) -> None:
    if ends.peer is None:
        return
    move, works = _mover(ends), list[Any]()
    for index in range(count):
        if len(works) == len(data):
            works.pop(0).wait()
        works.append(move(data[index % len(data)], ends.peer, group=ends.group))
    for work in works:
        work.wait()


def _mover(ends: Ends) -> Callable[..., Any]:
    return dist.isend if ends.rank == 0 else dist.irecv


def latency(ends: Ends, *, turns: int = LATENCY_TURNS) -> dict[str, float]:
    """Seconds that a message of 1 KiB takes, half a round trip: {"p50": .., "p99": ..} (zeros on other ranks)."""
    data, times = torch.zeros(LATENCY_BYTES, dtype=torch.uint8, device=ends.device), [0.0]
    for turn in range(turns + 10 if ends.peer is not None else 0):
        began = time.perf_counter()
        for mine in (ends.rank == 0, ends.rank != 0):
            (dist.send if mine else dist.recv)(data, ends.peer, group=ends.group)
        synchronize(ends.device)
        if turn >= 10:  # the first ones connect
            times.append((time.perf_counter() - began) / 2)
    times = sorted(times[1:] or times)
    ends.settle()
    return {"p50": times[len(times) // 2], "p99": times[min(int(len(times) * 0.99), len(times) - 1)]}


def all_reduce_seconds(ends: Ends, size: int) -> float:
    """Mean seconds of an all-reduce of `size` bytes of fp32."""
    data = torch.zeros(max(size // 4, 1), device=ends.device)
    return _mean_of_enough(ends, lambda: dist.all_reduce(data, group=ends.group))


def sums_rate(ends: Ends, size: int) -> float:
    """Bytes per second of sums of about `size` bytes as replicas make them: gradients go in fp32 to whoever updates
    them, one bucket behind the other, then the weights come back in bf16: three quarters of an all-reduce's bytes."""
    count = max(size // 4 // ends.world, 1)

    def buffers(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        empty = partial(torch.zeros, dtype=dtype, device=ends.device)
        return [(empty(count), empty(count * ends.world)) for _ in range(IN_FLIGHT)]

    wide, narrow = buffers(torch.float32), buffers(torch.bfloat16)
    later: dict[str, Any] = {"group": ends.group, "async_op": True}

    def several() -> None:
        for work in [dist.reduce_scatter_tensor(part, whole, **later) for part, whole in wide]:
            work.wait()
        for work in [dist.all_gather_into_tensor(whole, part, **later) for part, whole in narrow]:
            work.wait()

    return 0.75 * wide[0][1].nbytes * IN_FLIGHT / mean_seconds(several, 3, settle=ends.settle)


def collective_seconds(ends: Ends, name: str, size: int) -> float:
    """Mean seconds of one of COLLECTIVES; `size` in bytes: of all ranks' blocks together, or of what is broadcast."""
    each = max(size // ends.world // 4, 1)
    block, whole = (torch.zeros(count, device=ends.device) for count in (each, each * ends.world))
    calls: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, block, group=ends.group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(block, whole, group=ends.group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=ends.group),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=ends.group),
    }
    return _mean_of_enough(ends, calls[name])


def _mean_of_enough(ends: Ends, call: Callable[[], Any]) -> float:
    """Mean seconds of a collective over as many calls as take a while."""
    turns = _enough(ends, mean_seconds(call, 1, settle=ends.settle), most=MOST_COLLECTIVES)
    return mean_seconds(call, turns, settle=ends.settle)


def mean_seconds(call: Callable[[], Any], turns: int, *, settle: Callable[[], None]) -> float:
    """Mean seconds of a call, after one for warming up."""
    call()
    settle()
    began = time.perf_counter()
    for _ in range(turns):
        call()
    settle()
    return (time.perf_counter() - began) / turns


@dataclass
class Cost:
    """Since it was made: CPU seconds, host memory touched (counted), and the most held above what there was then."""

    cpu_s: float = 0.0
    touched_bytes: int = 0
    held_bytes: int = 0

    def __post_init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._resident = _status("VmRSS")
        self.connected()

    def connected(self) -> None:
        """From here on time and bytes count: connecting is no part of what a gigabyte costs, its memory is held."""
        self._began, self._touched = time.process_time(), METER.touched

    def end(self) -> None:
        self.cpu_s = time.process_time() - self._began
        self.touched_bytes = METER.touched - self._touched
        self.held_bytes = max(_status("VmHWM") - self._resident, 0)


def _status(key: str) -> int:
    """Bytes of one line of /proc/self/status."""
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(key + ":"))
    return int(line.split()[1]) * KiB


def costs(ends: Ends, *, total: int) -> dict[str, float | None]:
    """CPU seconds and host memory touched per 10^9 bytes of a stream of about `total` bytes, both ends together.

    Touched is what copies and sockets of this back end read and wrote, None for others; held is the host memory
    that came to be resident for it, in bytes.
    """
    data = [torch.ones(MiB * 4, dtype=torch.uint8, device=ends.device) for _ in range(IN_FLIGHT)]
    count = max(total // data[0].numel(), FEWEST)
    cost = Cost()
    _stream(ends, data, FEWEST)
    ends.settle()
    cost.connected()
    _stream(ends, data, count)
    synchronize(ends.device)
    cost.end()
    every: list[Any] = [None] * ends.world
    dist.all_gather_object(every, None if ends.peer is None else cost)
    spent = [each for each in every if each is not None]
    gb = count * data[0].numel() / 1e9
    touched = sum(c.touched_bytes for c in spent)
    return {
        "cpu_s_per_gb": sum(c.cpu_s for c in spent) / gb,
        "host_bytes_per_gb": touched / gb if touched else None,
        "host_bytes_held": sum(c.held_bytes for c in spent),
    }


def way(ends: Ends, max_bytes: int) -> dict[str, Any]:
    """Everything about one way between the islands, and whether it is exact."""
    sizes = sizes_up_to(max_bytes)
    # first: what it holds includes what it starts with
    cost = costs(ends, total=min(max(max_bytes * 8, 128 * MiB), 2 * GiB))
    seconds = {size: all_reduce_seconds(ends, size) for size in sizes}
    return {
        "exact": exact.proved(ends),
        "message_bytes_per_s": {str(size): message_rate(ends, size) for size in sizes},
        "all_reduce_s": {str(size): s for size, s in seconds.items()},
        "all_reduce_bytes_per_s": {str(size): size / s for size, s in seconds.items()},
        "collectives_bytes_per_s": {
            name: {str(size): size / collective_seconds(ends, name, size) for size in sizes} for name in COLLECTIVES
        },
        "sums_bytes_per_s": sums_rate(ends, min(max_bytes, 256 * MiB)),
        "latency_s": latency(ends),
        **cost,
    }


def raw_ceilings(ends: Ends, *, nbytes: int = 64 * MiB) -> dict[str, float]:
    """What the parts can do by themselves, bytes per second: host copies, and raw gloo groups side by side."""
    pinned = has_streams(ends.device)
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    there = torch.zeros_like(host, device=ends.device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> float:
        return nbytes / mean_seconds(lambda: target.copy_(source, non_blocking=True), 5, settle=ends.settle)

    words = ("pinned copy down", "pinned copy up") if pinned else ("host copy",)
    rates = {word: copy(*pair) for word, pair in zip(words, ((host, there), (there, host)), strict=False)}
    groups = [dist.new_group([0, ends.world - 1], backend="gloo") for _ in range(GROUPS)]
    stream = lambda: _raw_stream(ends, groups, [host, torch.zeros_like(host)])  # noqa: E731
    return rates | {f"{GROUPS} gloo groups": RAW_MESSAGES * nbytes / mean_seconds(stream, 4, settle=ends.settle)}


def _raw_stream(ends: Ends, groups: list[Any], messages: list[torch.Tensor]) -> None:
    """Some messages over all groups, two of them in flight."""
    if ends.peer is None:
        return
    under_way: list[list[Any]] = []
    for number in range(RAW_MESSAGES):
        parts = messages[number % 2].split(max(messages[0].numel() // (2 * GROUPS), 1))
        under_way.append([_mover(ends)(p, ends.peer, group=groups[i % GROUPS]) for i, p in enumerate(parts)])
        for work in under_way.pop(0) if number else ():
            work.wait()
    for work in under_way.pop():
        work.wait()


def over(placement: Placement, transport: TransportKind) -> Placement:
    """The placement with all its bridges over one transport."""
    names = [island.name for island in placement.islands]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return replace(placement, bridges=tuple(PlacedBridge(pair, transport) for pair in pairs))


def make_group(transport: TransportKind) -> Any:
    """A group of all ranks whose bridges take this transport, whatever the placement says."""
    name = f"het{transport}"

    def create(options: Any, backend_options: Any = None) -> Any:
        return create_over(options, over(current_placement(), transport))

    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, create, extended_api=True, devices=named_device_types())
    return dist.new_group(backend=name, timeout=TIMEOUT)


def ways(task: Task, device: torch.device) -> Iterator[tuple[str, Ends]]:
    """(name, ends) of each way to measure: native, then each transport; a group lives while it is measured."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if task.native:
        yield "native", Ends(dist.group.WORLD, rank, world, device)
    for transport in task.transports:
        group = make_group(transport)
        yield transport, Ends(group, rank, world, device)
        dist.destroy_process_group(group)


def _prove(task: Task, device: torch.device) -> None:
    if task.islands and (found := exact.islands_proved(current_placement(), device)) is not None:
        Reporter(active=True).figures("island", island=found)
    if task.engines and os.environ["LOCAL_RANK"] == "0":
        host = current_placement().hosts[dist.get_rank()]
        Reporter(active=True).figures("engines", on=host, **exact.engines_tried(device))


@record
def main() -> None:
    """Prove and measure what the task asks for; rank 0 reports, and who is first on its island or host."""
    task = variables.read_named(variables.MEASURE, Task)
    device = rank_device()
    register()
    dist.init_process_group(backend_words(device.type) if task.native else "het", timeout=TIMEOUT)
    reporter = Reporter(active=dist.get_rank() == 0)
    _prove(task, device)
    for name, ends in ways(task, device):
        reporter.figures("way", way=name, figures=way(ends, task.max_bytes))
    world = Ends(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), device)
    reporter.figures("result", raw_bytes_per_s=raw_ceilings(world) if task.transports else {})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
