"""What ranks are started with: each value from the right host's facts, with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.comm.contract.cluster import Access, Cluster, Device, Host, Island, Member, Network, Nic
from hetctl.comm.contract.emulate import Machine, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.facts import Address, Gid, HostFacts, Library, NicFacts, RdmaFacts, facts_to_data
from hetctl.launcher.supervisor.environment import (
    HostShape,
    Seat,
    Setting,
    device_type,
    host_settings,
    interface_of,
    rank_settings,
    without_secrets,
)
from hetctl.launcher.supervisor.launch import Launch
from hetctl.trainer.planning.hardware import CLASSES


def gid(index: int, text: str, kind: str = "roce_v2") -> Gid:
    return Gid(index, text, kind)  # type: ignore[arg-type]


V4 = "0000:0000:0000:0000:0000:ffff:0a01:0002"
LINK_LOCAL = "fe80:0000:0000:0000:0000:0000:0000:0001"


def host(name: str, vendor: str, *, kind: str = "infiniband", gids: tuple[Gid, ...] = (), env: object = None) -> Host:
    ports = tuple(NicFacts(f"p{n}", netdev=f"p{n}", rdma_device=f"mlx5_{n}", rdma_port=1, gids=gids) for n in range(2))
    management = NicFacts("mgmt0", netdev="mgmt0", addresses=(Address("10.0.0.5"),))
    nics = tuple(Nic(p.name, kind, network="fast", rdma_device=p.rdma_device) for p in ports)  # type: ignore[arg-type]
    devices = tuple(Device(i, vendor, "x", uuid=f"GPU-{i}", ordinal=i + 4) for i in range(4))
    access = Access(name, env=env or {})  # type: ignore[arg-type]
    data = facts_to_data(HostFacts(nics=(*ports, management)))
    return Host(name, access, "10.0.0.5", devices=devices, nics=(*nics, Nic("mgmt0")), facts=data)


def cluster(one: Host, kind: str = "infiniband") -> Cluster:
    island = Island("x", one.devices[0].vendor, "fast", tuple(Member(one.name, d.index) for d in one.devices))
    return Cluster((one,), (island,), (Network("fast", kind, (one.name,)),))  # type: ignore[arg-type]


SEATS = (Seat(0, "other", 0), Seat(1, "a", 3), Seat(2, "a", 1))


def values(one: Host, kind: str = "infiniband", environment: dict[str, str] | None = None) -> dict[str, str]:
    return {s.name: s.value for s in host_settings(cluster(one, kind), one, SEATS, environment=environment)}


def test_devices_are_named_by_uuid_in_the_order_of_local_ranks() -> None:
    found = values(host("a", "nvidia"))
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-3,GPU-1"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_where_the_runtime_takes_no_uuid_its_own_numbers_are_used() -> None:
    found = values(host("a", "amd"))
    assert found["HIP_VISIBLE_DEVICES"] == "7,5"
    assert "CUDA_VISIBLE_DEVICES" not in found


def test_a_rank_sees_its_own_vendors_devices_alone_and_counts_among_them() -> None:
    devices = tuple(
        Device(i, v, "x", uuid=f"u{i}", ordinal=o) for i, v, o in ((0, "nvidia", 0), (1, "amd", 0), (2, "amd", 1))
    )
    both = replace(host("a", "nvidia"), devices=devices)
    islands = tuple(
        Island(v, v, "host", tuple(Member("a", d.index) for d in devices if d.vendor == v)) for v in ("nvidia", "amd")
    )
    mixed, seats = Cluster((both,), islands), (Seat(0, "a", 2), Seat(1, "a", 0), Seat(2, "a", 1))
    shape, own = HostShape(6, "cuda", "10.0.0.1", None, "/code"), host_settings(mixed, both, seats)
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HETCTL_DEVICE_INDEX", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = [
        {s.name: s.value for s in rank_settings(seats, seat, shape, world_size=len(seats), files={}, more=own)}
        for seat in seats
    ]
    assert [tuple(map(one.get, names)) for one in found] == [
        (None, "1,0", "0", "0", "2"),
        ("u0", None, "0", "0", "1"),
        (None, "1,0", "1", "1", "2"),
    ]
    assert {one["OMP_NUM_THREADS"] for one in found} == {"2"}, "the cores are shared by all"


def test_rdma_ports_are_exact_and_infiniband_needs_no_gid() -> None:
    found = values(host("a", "nvidia"))
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert "NCCL_IB_GID_INDEX" not in found


def test_a_plugin_of_another_name_is_named() -> None:
    def found(*names: str) -> str | None:
        one = host("a", "nvidia", kind="efa")
        facts = HostFacts(rdma=RdmaFacts(libraries=tuple(map(Library, names))))
        return values(replace(one, facts=facts_to_data(facts)), "efa").get("NCCL_NET_PLUGIN")

    assert found("libnccl-net-ofi.so", "libnccl.so.2") == "ofi"
    assert found("libnccl-net.so", "libnccl-net-ofi.so") is None
    assert found() is None
    assert "NCCL_IB_HCA" not in values(host("a", "nvidia", kind="efa"), "efa")


def test_the_gid_is_chosen_by_its_content() -> None:
    gids = (gid(0, LINK_LOCAL), gid(1, V4, "roce_v1"), gid(5, V4))
    assert values(host("a", "nvidia", kind="roce", gids=gids), "roce")["NCCL_IB_GID_INDEX"] == "5"
    assert "NCCL_IB_GID_INDEX" not in values(host("a", "nvidia", kind="roce", gids=gids[:2]), "roce")


def test_the_interface_is_the_one_with_the_data_address() -> None:
    one = host("a", "nvidia")
    assert interface_of(one) == "mgmt0"
    shape = HostShape(8, "cuda", "10.0.0.1", interface_of(one), "/code")
    own = host_settings(cluster(one), one, SEATS)
    found = {s.name: s.value for s in rank_settings(SEATS, SEATS[2], shape, world_size=len(SEATS), files={}, more=own)}
    assert found["GLOO_SOCKET_IFNAME"] == "mgmt0"
    assert found["NCCL_SOCKET_IFNAME"] == "=mgmt0"
    assert (found["RANK"], found["LOCAL_RANK"], found["HETCTL_DEVICE_INDEX"]) == ("2", "1", "1")
    assert found["OMP_NUM_THREADS"] == "4"
    assert found["MASTER_ADDR"] == "10.0.0.1"


def test_a_persons_value_wins_but_not_over_the_ranks_numbers() -> None:
    one = host("a", "nvidia", env={"NCCL_IB_HCA": "mlx5_1", "RANK": "9"})
    shape = HostShape(8, "cuda", "10.0.0.1", None, "/code")
    own = host_settings(cluster(one), one, SEATS)
    found = {s.name: s.value for s in rank_settings(SEATS, SEATS[1], shape, world_size=len(SEATS), files={}, more=own)}
    assert (found["NCCL_IB_HCA"], found["RANK"]) == ("mlx5_1", "1")


def test_a_value_from_the_launchers_environment_is_never_shown() -> None:
    one = host("a", "nvidia", env={"HF_TOKEN": None})
    settings = host_settings(cluster(one), one, SEATS, environment={"HF_TOKEN": "hf_secret"})
    assert Setting("HF_TOKEN", "hf_secret", "from the environment of who launches", secret=True) in settings
    assert all("hf_secret" not in repr(s) for s in without_secrets(settings))
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        host_settings(cluster(one), one, SEATS, environment={})


@pytest.mark.parametrize("name", ["", "A=B", "A\0B"])
def test_names_that_no_environment_can_hold_are_refused(name: str) -> None:
    one = host("a", "nvidia", env={name: "x"})
    with pytest.raises(ConfigError):
        host_settings(cluster(one), one, SEATS)


def test_cpu_clusters_compute_on_cpu() -> None:
    real = Cluster((), (), ())
    assert device_type(real, ["cpu", "cpu"]) == "cpu"
    assert device_type(real, ["nvidia", "amd"]) == "cuda"
    assert device_type(real, ["intel", "cpu"]) == "xpu"
    assert device_type(replace(real, runs="gloo"), ["nvidia"]) == "cpu"
    assert device_type(replace(real, runs="nccl"), ["cpu"]) == "cpu"


def test_each_rank_bridges_over_the_ports_near_its_device() -> None:
    def wired(name: str, vendor: str, last: int) -> Host:
        one = host(name, vendor, kind="roce", gids=(gid(3, V4),))
        nics = tuple(replace(n, address=f"10.1.{i}.{last}") for i, n in enumerate(one.nics) if n.network)
        return replace(one, nics=nics, devices=tuple(replace(d, nics=(f"p{d.index % 2}",)) for d in one.devices))

    one, other = wired("a", "nvidia", 1), wired("b", "amd", 2)
    islands = tuple(
        Island(h.name, h.devices[0].vendor, "fast", tuple(Member(h.name, d.index) for d in h.devices))
        for h in (one, other)
    )
    both = Cluster((one, other), islands, (Network("fast", "roce", ("a", "b")),))
    seats = (Seat(0, "a", 0), Seat(1, "a", 3), Seat(2, "b", 0))
    shape = HostShape(8, "cuda", "10.0.0.1", interface_of(one), "/code")
    own = host_settings(both, one, seats)
    found = [
        {s.name: s.value for s in rank_settings(seats, seat, shape, world_size=len(seats), files={}, more=own)}
        for seat in seats[:2]
    ]
    assert [f["HETCTL_RDMA"] for f in found] == ["mlx5_0:1=3@fast", "mlx5_1:1=3@fast"]
    assert [f["HETCTL_NICS"] for f in found] == ["p0@fast", "p1@fast"]
    apart = tuple(replace(n, network=f"fast{i}") if n.network else n for i, n in enumerate(one.nics))
    split = Cluster(
        (replace(one, nics=apart), replace(other, nics=apart)),
        islands,
        tuple(Network(f"fast{i}", "roce", ("a", "b")) for i in range(2)),
    )
    ports = [s for s in host_settings(split, split.hosts[0], seats) if s.name == "HETCTL_RDMA"]
    assert [(s.value, s.device) for s in ports] == [("mlx5_0:1=3@fast0,mlx5_1:1=3@fast1", None)]  # any two ranks meet
    asked = replace(one, access=Access("a", env={"GLOO_SOCKET_IFNAME": "mgmt0"}))
    both = Cluster((asked, other), islands, both.networks)
    assert "HETCTL_NICS" not in {s.name for s in host_settings(both, asked, seats)}  # a person's word


def test_ranks_of_islands_that_share_gpus_are_told_the_real_ones() -> None:
    spec = parse_spec("h200:2,mi325x:1", CLASSES)
    machine = Machine("here", "nccl", (40, 40, 40), gpus=2)
    labelled = label_machine(spec, machine)
    seats = tuple(Seat(i, "here", i) for i in range(3))
    shape = HostShape(8, "cuda", "127.0.0.1", None, "/code")
    own = host_settings(labelled, labelled.hosts[0], seats)
    found = [
        {s.name: s.value for s in rank_settings(seats, s, shape, world_size=len(seats), files={}, more=own)}
        for s in seats
    ]
    assert [one["HETCTL_DEVICE_INDEX"] for one in found] == ["0", "1", "0"]
    assert labelled.shares_devices
    alone = label_machine(spec, replace(machine, gpus=None))
    assert not alone.shares_devices
    places = (Member("here", 0),), (Member("there", 0),)
    first, second = (replace(i, members=m) for i, m in zip(alone.islands, places, strict=True))
    apart = replace(alone, hosts=(alone.hosts[0], replace(alone.hosts[0], name="there")), islands=(first, second))
    assert not apart.shares_devices  # devices of two hosts, each called 0
    assert not host_settings(alone, alone.hosts[0], seats)
    [ways] = [{t.kind: t.usable for t in link.transports} for link in labelled.links]
    assert (ways["shm"], ways["native"]) == (True, False)


@pytest.mark.parametrize("gpus", [None, 1])
def test_ranks_of_cpus_beside_devices_compute_on_the_host(gpus: int | None) -> None:
    spec = parse_spec("cpu:2,h200:1,mi325x:1", CLASSES)
    machine = Machine("here", "nccl", (40, 40), host_memory_bytes=400, gpus=gpus)
    labelled = label_machine(spec, machine)
    launch = Launch.of(labelled)
    shape = HostShape(8, launch.device_type, "127.0.0.1", None, "/code")
    own = launch.settings()["here"]
    found = [
        {
            s.name: s.value
            for s in rank_settings(launch.seats, s, shape, world_size=len(launch.seats), files={}, more=own)
        }
        for s in launch.seats
    ]
    assert [one["HETCTL_DEVICE_TYPE"] for one in found] == ["cpu", "cpu", "cuda", "cuda"]
    assert [one["HETCTL_DEVICE_INDEX"] for one in found[2:]] == ["0", "0" if gpus else "1"]
    assert [island.torch_backend for island in launch.placement.islands] == ["gloo", "nccl", "nccl"]
    assert [labelled.device(Member("here", i)).memory_bytes for i in range(4)] == [100, 100, 40, 40]
    assert labelled.shares_devices == (gpus is not None)
    ways = {link.islands: {t.kind: t.usable for t in link.transports} for link in labelled.links}
    assert [way["direct"] for way in ways.values()] == [False, False, True]
    assert all(way["shm"] for way in ways.values())
    with pytest.raises(ConfigError, match="asks for 3 devices, this machine offers 2"):
        label_machine(parse_spec("cpu:2,h200:3", CLASSES), machine)
