"""The environment variables by which a launcher tells its ranks things, and people tell hetctl: every one of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeVar

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.values import decode

# Of people
PORTS = "HETCTL_PORTS"  # where the run's store may listen, for example 29500-29520
RAILS = "HETCTL_RAILS"  # tcp connections between two ranks
ENGINE = "HETCTL_ENGINE"  # nixl or mooncake; else the first that both ends have
INITIATOR = "HETCTL_INITIATOR"  # of direct transfers: sender, receiver or lower (the lower rank), the same on all ranks
ISLAND = "HETCTL_ISLAND"  # of a rank that hetctl did not start: its island, which else its vendor, fabric and torch say

# Of the launcher, for its ranks
RUN = "HETCTL_RUN"  # the run's identity, by which `hetctl clean` knows what belongs to it
HOST = "HETCTL_HOST"  # the host's name in the plan
EVENTS = "HETCTL_EVENTS_FD"  # the descriptor that a rank writes its events to
FLIGHT = "HETCTL_FLIGHT_DIR"  # where operations under way are written when something fails; nowhere where it is unset
SPREAD = "HETCTL_SPREAD"  # 1: the hosts of the run share no folder
DEVICE_TYPE = "HETCTL_DEVICE_TYPE"  # the torch device type that a process computes on
DEVICE_INDEX = "HETCTL_DEVICE_INDEX"  # which of the devices that a process sees is its own
NICS = "HETCTL_NICS"  # the interfaces that a rank's tcp rails take, and the network of each: ens1@roce0,ens2@roce0
# rxe0:1=1@roce0,mlx5_0:1=3 (device:port=GID index@network), or `sockets`, once per rail, to try engines without RDMA
RDMA = "HETCTL_RDMA"
SPEEDS = "HETCTL_SPEEDS"  # of each rank, against the slowest: how `hetctl.data` shares out samples
AS_NCCL = "HETCTL_AS_NCCL"  # 1: a program that asks for nccl gets the `het` back end

# Of the launcher: the names of JSON files
PLACEMENT = "HETCTL_PLACEMENT"  # which rank is in which island, and what joins them
JOB = "HETCTL_JOB"  # what a rank of `hetctl train` is told
MEASURE = "HETCTL_MEASURE"  # what ranks of `hetctl bench bridge` try
BENCH_JOBS = "HETCTL_BENCH_JOBS"  # a list of jobs
BENCH_CLASSES = "HETCTL_BENCH_CLASSES"  # what each rank of `bench ops --cluster` measures, in their order
BENCH_PLACEMENTS = "HETCTL_BENCH_PLACEMENTS"  # a list of placements, one a job: islands may be relabelled

# Of the launcher, for benchmarks' ranks
BENCH_STEPS = "HETCTL_BENCH_STEPS"  # of each plan
BENCH_ROUNDS = "HETCTL_BENCH_ROUNDS"  # that count
BENCH_NATIVE = "HETCTL_BENCH_NATIVE"  # 1: one native library serves all islands

T = TypeVar("T")


def read_named(variable: str, cls: type[T]) -> T:
    """What the JSON file that a variable names holds. Raises ConfigError."""
    path = os.environ.get(variable)
    if not path:
        raise ConfigError(f"{variable} is not set", hint="start the program with `hetctl run` or `hetctl train`")
    return decode(cls, json.loads(Path(path).read_text(encoding="utf-8")), where=variable)
