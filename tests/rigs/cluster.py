"""A cluster.yaml for namespaced hosts whose CPU processes stand for GPUs: islands with vendors' names, gloo in fact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.comm.contract.cluster import (
    Access,
    Cluster,
    Device,
    Host,
    Island,
    IslandLink,
    Member,
    Nic,
    TransportOption,
    save_cluster,
)
from tests.rigs.netns import Rig, RigHost

ROOT = Path(__file__).resolve().parents[2]
VENDORS = {"h200": "nvidia", "mi325x": "amd"}


def write_cluster(
    rig: Rig, islands: Mapping[str, Sequence[tuple[int, int]]], file: Path, *, python: Mapping[int, str] | None = None
) -> Cluster:
    """`islands` maps a class to (number of host, processes there); `python` is per host, else that of the tests."""
    hosts, made = [], []
    for name, places in islands.items():
        members = []
        for number, count in places:
            hosts.append(host_of(rig.hosts[number], name, count, (python or {}).get(number, sys.executable)))
            members += [Member(rig.hosts[number].name, i) for i in range(count)]
        made.append(Island(name, VENDORS[name], "test network", tuple(members)))
    names = list(islands)
    ways = (TransportOption("tcp", True, "the test network"),)
    links = tuple(IslandLink((a, b), ways) for i, a in enumerate(names) for b in names[i + 1 :])
    cluster = Cluster(tuple(hosts), tuple(made), links=links, source="emulated", runs="gloo")
    save_cluster(file, cluster)
    return cluster


def host_of(host: RigHost, device_class: str, count: int, python: str) -> Host:
    nic, address = ("rail0", host.rails[0]) if host.rails else ("eth0", host.address)
    return Host(
        name=host.name,
        access=Access(host.name, python=python, env={"OMP_NUM_THREADS": "1"}),  # the hosts share this one's cores
        data_address=address,
        devices=tuple(Device(i, VENDORS[device_class], device_class, 1 << 30, (nic,)) for i in range(count)),
        nics=(Nic(nic, address=address),),
    )


def with_nics(host: Host, place: RigHost, *, reached: Iterable[int], near: Callable[[int], tuple[int, ...]]) -> Host:
    """The host with a NIC on each of some networks; its devices are near to some of them, by their index."""
    nics = tuple(Nic(f"rail{r}", network=f"net{r}", address=place.rails[r]) for r in reached)
    devices = tuple(replace(d, nics=tuple(f"rail{r}" for r in near(d.index))) for d in host.devices)
    return replace(host, nics=nics, devices=devices)


def other_environment(folder: Path) -> str:
    """A second Python environment with the packages of the first: its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    packages = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    (site / "other.pth").write_text(f"{packages}\n")
    return str(folder / "bin" / "python")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "hetctl", *words]


def environment(rig: Rig, **more: str) -> dict[str, str]:
    """Of the person whose home is the rig's."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
    return {
        **inherited,
        "HOME": str(rig.home),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "SSH_AUTH_SOCK": "",
        **more,
    }


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
