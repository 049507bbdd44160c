"""From facts to fabric: which hosts share what, who forms an island, which NIC serves which GPU, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.cluster import Access, Cluster, TransportOption
from hetctl.comm.contract.facts import (
    Address,
    Gid,
    GpuFacts,
    HostFacts,
    Instance,
    Interpreter,
    Library,
    Near,
    NicFacts,
    Partition,
    Pcie,
    RdmaFacts,
    Reach,
    System,
)
from hetctl.discovery.devices import assign_rails, device_class, devices_of
from hetctl.discovery.fabric import NotedCluster, Report, build
from hetctl.discovery.networks import ports_of
from hetctl.discovery.unusual import unusual
from hetctl.trainer.planning.hardware import CLASSES

GB = 1e9
VERBS = RdmaFacts(
    libraries=(Library("libibverbs.so.1"),), device_files=("/dev/infiniband/uverbs0",), memlock_bytes="unlimited"
)


def ib(name: str, *, prefix: str = "fe80:0000:0000:0000", sm: int | None = 1, lid: int | None = None) -> NicFacts:
    return NicFacts(
        name=name,
        netdev=name,
        rdma_device=f"mlx5_{name[2:]}",
        link_layer="infiniband",
        state="active",
        rate_bytes_per_s=50 * GB,
        subnet_prefix=prefix,
        sm_lid=sm,
        lid=lid,
        pci_id="15b3:1021",
    )


def ethernet(name: str, ip: str | None, *, prefix: int = 24, rate: float = 3.125 * GB, **more: object) -> NicFacts:
    addresses = (Address(ip, prefix, "global"),) if ip else ()
    nic = NicFacts(
        name=name, netdev=name, link_layer="ethernet", state="up", rate_bytes_per_s=rate, addresses=addresses
    )
    return replace(nic, **more)  # type: ignore[arg-type]


def roce(name: str, ip: str | None, *, gid: str = "", rate: float = 50 * GB) -> NicFacts:
    a, b, c, d = (int(p) for p in (ip or "169.254.0.1").split("."))
    mapped = gid or f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
    gids = (Gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", "roce_v1"), Gid(3, mapped, "roce_v2"))
    return ethernet(name, ip, rate=rate, rdma_device=f"rdma_{name}", gids=gids, state="active")


def host(
    name: str,
    nics: Sequence[NicFacts],
    gpus: Sequence[GpuFacts] = (),
    *,
    rdma: RdmaFacts = VERBS,
    access: Access | None = None,
    data_address: str | None = None,
) -> Report:
    facts = HostFacts(system=System(hostname=name), gpus=tuple(gpus), nics=tuple(nics), rdma=rdma)
    return Report(name, access or Access(name), facts, data_address)


def green(count: int = 1, product: str = "NVIDIA H200", first: int = 0) -> tuple[GpuFacts, ...]:
    return tuple(
        GpuFacts("nvidia", first + i, product, memory_total_bytes=141 << 30, numa_node=0) for i in range(count)
    )


def red(count: int = 1, product: str = "AMD Instinct MI325X") -> tuple[GpuFacts, ...]:
    return tuple(GpuFacts("amd", i, product, memory_total_bytes=256 << 30) for i in range(count))


def shape(cluster: Cluster) -> dict[str, tuple[str, str, list[str]]]:
    kinds = {n.name: n.kind for n in cluster.networks} | {"host": "host"}
    return {i.name: (i.vendor, kinds[i.fabric], sorted({m.host for m in i.members})) for i in cluster.islands}


def way(fabric: NotedCluster, a: str, b: str, kind: str) -> TransportOption:
    link = fabric.cluster.link(a, b)
    assert link is not None
    return next(t for t in link.transports if t.kind == kind)


def said(fabric: NotedCluster) -> str:
    return "\n".join(f"{n.host}: {n.sentence}" for n in fabric.notes)


def test_infiniband_roce_and_ethernet_hosts_become_islands() -> None:
    front = [ethernet("eno1", f"192.168.0.{i}") for i in range(8)]
    reports = [
        *(host(f"g{i}", [ib("ib0"), front[i]], green(2)) for i in range(2)),
        *(
            host(f"r{i}", [roce("ens1", f"10.1.0.{i + 1}"), front[2 + i]], green(2, "NVIDIA A100-SXM4-80GB"))
            for i in range(2)
        ),
        *(host(f"a{i}", [roce("ens1", f"10.1.0.{i + 3}"), front[4 + i]], red(2)) for i in range(2)),
        *(host(f"e{i}", [front[6 + i]], green(1, "NVIDIA GeForce RTX 4090")) for i in range(2)),
    ]
    fabric = build(reports)
    assert shape(fabric.cluster) == {
        "h200": ("nvidia", "infiniband", ["g0", "g1"]),
        "a100": ("nvidia", "roce", ["r0", "r1"]),
        "rtx4090": ("nvidia", "ethernet", ["e0", "e1"]),
        "mi325x": ("amd", "roce", ["a0", "a1"]),
    }
    rdma = way(fabric, "a100", "mi325x", "rdma")
    assert rdma.usable
    assert rdma.rate_bytes_per_s == 100 * GB
    tcp = way(fabric, "h200", "mi325x", "tcp")
    assert tcp.usable
    assert tcp.rate_bytes_per_s == pytest.approx(6.25 * GB)
    assert "holds all their hosts" in way(fabric, "h200", "mi325x", "rdma").reason
    assert "e0 has no RDMA port" in way(fabric, "h200", "rtx4090", "rdma").reason
    assert not way(fabric, "a100", "mi325x", "direct").usable
    native = way(fabric, "h200", "a100", "native")
    assert native.usable  # one vendor across two fabrics: its sockets cross the ports that TCP does
    assert native.rate_bytes_per_s == way(fabric, "h200", "a100", "tcp").rate_bytes_per_s
    assert "nvidia and amd" in way(fabric, "h200", "mi325x", "native").reason
    fabric.cluster.validate(where="test")


def test_two_generations_on_one_fabric_are_one_island() -> None:
    reports = [host("a", [ib("ib0")], green(2)), host("b", [ib("ib0")], green(2, "NVIDIA A100-SXM4-80GB"))]
    [island] = build(reports).cluster.islands
    assert (island.name, len(island.members)) == ("h200+a100", 4)


def test_two_vendors_on_one_host_are_two_islands_with_devices_of_their_own_numbers() -> None:
    fabric = build([host("w", [ethernet("eno1", "10.0.0.1")], (*green(2), *red(2)))])
    assert {i.vendor: [m.device for m in i.members] for i in fabric.cluster.islands} == {
        "nvidia": [0, 1],
        "amd": [2, 3],
    }
    devices = fabric.cluster.hosts[0].devices
    assert [(d.index, d.ordinal) for d in devices] == [(0, None), (1, None), (2, 0), (3, 1)]
    assert way(fabric, "h200", "mi325x", "shm").usable
    assert way(fabric, "h200", "mi325x", "tcp").usable
    fabric.cluster.validate(where="test")


def test_no_common_fabric_is_said_not_guessed() -> None:
    fabric = build([host("a", [ethernet("e", "10.0.0.1")], green()), host("b", [ethernet("e", "10.0.1.1")], red())])
    assert not any(t.usable for link in fabric.cluster.links for t in link.transports)
    assert "data_address" in way(fabric, "h200", "mi325x", "tcp").reason


def test_declared_data_addresses_and_named_networks_join_what_subnets_do_not() -> None:
    one = host("a", [ethernet("e", "10.0.0.1")], green(), data_address="10.0.0.1")
    two = host("b", [ethernet("e", "10.0.1.1")], red(), data_address="10.0.1.1")
    assert way(build([one, two]), "h200", "mi325x", "tcp").usable
    fabric = build(
        [host("a", [roce("e", "10.0.0.1")], green()), host("b", [roce("e", "10.0.1.1")], green())],
        named={"spine": ["10.0.0.0/16"]},
    )
    assert [n.hosts for n in fabric.cluster.networks] == [("a", "b")]
    assert len(fabric.cluster.islands) == 1


def test_infiniband_subnets_are_told_apart() -> None:
    prefixes = build(
        [
            host("a", [ib("ib0", prefix="fec0:0000:0000:0001")], green()),
            host("b", [ib("ib0", prefix="fec0:0000:0000:0002")], green()),
        ]
    )
    assert len(prefixes.cluster.networks) == 2
    managers = build([host("a", [ib("ib0", sm=1)], green()), host("b", [ib("ib0", sm=7)], green())])
    assert len(managers.cluster.islands) == 2
    notes = unusual([host("a", [ib("ib0", sm=1)], green()), host("b", [ib("ib0", sm=7)], green())], managers.cluster)
    assert any("2 InfiniBand subnets (ib0: a; ib1: b)" in n.sentence for n in notes)


def test_no_subnet_manager_or_an_unknown_one_is_no_network() -> None:
    fabric = build([host("a", [ib("ib0", sm=0)], green()), host("b", [ib("ib0", sm=None)], green())])
    assert fabric.cluster.networks == ()
    assert "a: ib0 is left out: no subnet manager answers" in said(fabric)
    assert "b: ib0 is left out: it has the default subnet prefix" in said(fabric)


def test_one_lid_twice_proves_two_subnets() -> None:
    fabric = build([host("a", [ib("ib0", lid=5)], green()), host("b", [ib("ib0", lid=5)], green())])
    assert len(fabric.cluster.islands) == 2
    assert "both have LID 5" in said(fabric)


def test_link_local_gids_make_a_roce_nic_a_plain_one() -> None:
    local = "fe80:0000:0000:0000:0000:0000:0000:0002"
    fabric = build([host("a", [roce("e", "10.0.0.1", gid=local)], green()), host("b", [roce("e", "10.0.0.2")], red())])
    assert [n.kind for n in fabric.cluster.networks] == ["ethernet", "roce"]
    assert way(fabric, "h200", "mi325x", "tcp").usable
    assert "a has no RDMA port" in way(fabric, "h200", "mi325x", "rdma").reason


def test_what_carries_no_data_is_left_out() -> None:
    nics = [
        NicFacts("lo", "lo", addresses=(Address("127.0.0.1", 8),), virtual=True, state="unknown"),
        ethernet("docker0", "172.17.0.1", virtual=True),
        ethernet("veth12ab", "10.9.0.1", virtual=True),
        ethernet("eno1", "192.168.0.1"),
        ethernet("ens9", "192.168.9.1", state="down", carrier=False),
        ethernet("usb0", "169.254.3.1", driver="cdc_ether"),
        ethernet("ens2", None, bond="bond0"),
        ethernet("bond0", "10.0.0.1", virtual=True, bond_members=("ens2",)),
        ethernet("eno2", "192.168.5.1"),
    ]
    report = host("a", nics, green(), access=Access("a", exclude_nics=("eno2",)))
    fabric = build([report])
    assert [n.name for n in fabric.cluster.hosts[0].nics] == ["eno1", "bond0"]
    assert said(fabric) == "a: ens9 is left out: not up (state down)"


def test_a_container_whose_only_way_out_is_virtual_keeps_it() -> None:
    assert facts_nics(
        [ethernet("eth0", "10.0.0.1", virtual=True), ethernet("docker0", "172.17.0.1", virtual=True)]
    ) == ["eth0"]


def facts_nics(nics: Sequence[NicFacts]) -> list[str]:
    return [p.facts.name for p in ports_of("a", HostFacts(nics=tuple(nics)))[0]]


def near(gpu: GpuFacts, **paths: Near) -> GpuFacts:
    return replace(gpu, nics=tuple(Reach(name, path) for name, path in paths.items()))


def rails(gpus: Sequence[GpuFacts], nics: Sequence[NicFacts]) -> list[tuple[str, ...]]:
    return assign_rails(gpus, ports_of("a", HostFacts(nics=tuple(nics)))[0])


def test_the_nearest_nic_is_the_rail_and_none_is_used_twice() -> None:
    a, b = green(2)
    gpus = [near(a, ib0="sys", ib1="pix"), near(b, ib0="pxb", ib1="node")]
    assert rails(gpus, [ib("ib0"), ib("ib1")]) == [("ib1",), ("ib0",)]
    both_want_one = [near(a, ib0="pix", ib1="sys"), near(b, ib0="pxb", ib1="sys")]
    assert rails(both_want_one, [ib("ib0"), ib("ib1")]) == [("ib0",), ("ib1",)]


def test_numa_decides_where_distances_are_unknown() -> None:
    gpus = [replace(g, numa_node=n) for g, n in zip(green(2), (1, 0), strict=True)]
    nics = [replace(ib("ib0"), numa_node=0), replace(ib("ib1"), numa_node=1)]
    assert rails(gpus, nics) == [("ib1",), ("ib0",)]


def test_slow_and_plain_nics_are_no_rails_beside_fast_rdma() -> None:
    nics = [ib("ib0"), replace(ib("ib1"), rate_bytes_per_s=12.5 * GB), ethernet("eno1", "10.0.0.1", rate=100 * GB)]
    assert rails(green(2), nics) == [("ib0",), ("ib0",)]


@given(st.integers(1, 12), st.integers(1, 12), st.randoms())
def test_rails_are_shared_evenly(gpus: int, nics: int, random: object) -> None:
    words: tuple[Near, ...] = ("pix", "pxb", "phb", "node", "sys")
    names = [f"ib{n}" for n in range(nics)]
    made = [near(g, **{n: random.choice(words) for n in names}) for g in green(gpus)]  # type: ignore[attr-defined]
    chosen = rails(made, [ib(n) for n in names])
    used = [n for own in chosen for n in own]
    assert all(chosen)
    assert max(used.count(n) for n in names) <= -(-gpus // nics)
    if nics >= gpus:
        assert sorted(used) == sorted(names)


@pytest.mark.parametrize(
    ("vendor", "product", "name"),
    [
        ("nvidia", "NVIDIA A100-SXM4-80GB", "a100"),
        ("nvidia", "NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("nvidia", "NVIDIA A10", "a10"),
        ("nvidia", "NVIDIA H20", "h20"),
        ("nvidia", "NVIDIA H200", "h200"),
        ("nvidia", "NVIDIA GH200 480GB", "gh200"),
        ("nvidia", "NVIDIA L40S", "l40s"),
        ("nvidia", "NVIDIA L40", "l40"),
        ("nvidia", "NVIDIA L40G", None),
        ("nvidia", "Tesla V100-SXM2-32GB", "v100"),
        ("nvidia", "NVIDIA GeForce RTX 3080 Ti Laptop GPU", None),
        ("nvidia", "NVIDIA GeForce RTX 4090 D", None),
        ("nvidia", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000-maxq"),
        ("amd", "Aldebaran/MI200 [Instinct MI250X/MI250]", "mi250"),
        ("amd", "Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]", None),
        ("amd", "AMD Instinct MI250X", "mi250x"),
        ("amd", "AMD Instinct MI300X VF", "mi300x"),
        ("amd", "NVIDIA H200", None),
    ],
)
def test_product_names(vendor: str, product: str, name: str | None) -> None:
    row = CLASSES.of_gpu(vendor, [product])
    assert (row.name if row else None) == name


def test_an_unknown_vendor_is_no_device_and_an_unknown_product_is_one() -> None:
    strange = (
        GpuFacts("acme", 0, "Acme 9000"),
        GpuFacts("nvidia", 0, "NVIDIA Z9000", architecture="sm_86", memory_total_bytes=24 << 30),
        GpuFacts("amd", 0, pci_id="1002:9999"),
    )
    fabric = build([host("a", [ethernet("e", "10.0.0.1")], strange)])
    assert [i.name for i in fabric.cluster.islands] == ["z9000", "amd-1002-9999"]
    assert {row.name: bool(row.estimate) for row in fabric.cluster.classes} == {"z9000": True, "amd-1002-9999": True}
    for words in (
        "the vendor 'acme'",
        "z9000 is not in the hardware table and taken for 50% of what rtx3080 has, the slowest sm_86",
        "hetctl bench ops",
    ):
        assert words in said(fabric)


def test_a_person_names_an_unknown_product_by_its_class_or_its_name() -> None:
    z9000 = replace(green()[0], name="NVIDIA Z9000", pci_id="10de:ffff")
    for said_of_it in (CLASSES["a100"], replace(CLASSES["a100"], product_names=("Z9000",))):
        own = replace(said_of_it, name="z9000")
        fabric = build([host("a", [ethernet("e", "10.0.0.1")], (z9000,))], classes=[own])
        assert fabric.cluster.classes == (own,)
        assert fabric.notes == ()


def test_a_product_that_is_called_like_a_class_of_another_vendor() -> None:
    assert device_class(GpuFacts("amd", 0, "H100")).name == "amd-h100"
    assert device_class(GpuFacts("nvidia", 0, "CPU")).vendor == "nvidia"


def test_hosts_that_tell_unlike_memories_share_the_most_cautious_estimate() -> None:
    small, large = (
        GpuFacts("nvidia", 0, "NVIDIA Z9000", architecture="sm_86", memory_total_bytes=g << 30) for g in (5, 24)
    )
    made = [host(n, [ethernet("e", f"10.0.0.{i}")], (g,)) for i, (n, g) in enumerate([("a", large), ("b", small)], 1)]
    fabric = build(made)
    [row] = fabric.cluster.classes
    assert row.peak_tflops == pytest.approx(CLASSES["rtx3080"].peak_tflops / 4)
    assert said(fabric).count("not in the hardware table") == 1


def test_a_display_card_or_a_processor_s_graphics_is_left_out_unless_it_is_asked_for() -> None:
    """It would hold no layer, and one without bf16 would have all others compute in fp16."""
    display = GpuFacts("nvidia", 2, "NVIDIA T400 4GB", architecture="sm_75", memory_total_bytes=3906 << 20)
    facts = HostFacts(gpus=(*green(2), display))
    found = devices_of(facts, [])
    assert [d.index for d in found.devices] == [0, 1]
    assert found.estimated == ()
    assert found.notes == (
        "GPU nvidia:2 (t400-4gb) is left out: of its 3.8 GiB a rank needs half for itself (gpus: takes it in)",
    )
    asked = devices_of(facts, [], only=[1, 2])
    assert [d.device_class for d in asked.devices] == ["h200", "t400-4gb"]
    assert asked.notes == ()


def test_compute_instances_share_the_memory_of_their_instance() -> None:
    """Each of them sees all of it: counted twice, a plan would not fit."""
    profiles = ("1c.3g.71gb", "2c.3g.71gb")
    sliced = Partition("mig", instances=tuple(Instance(p, f"MIG-{p[0]}", 72 << 30) for p in profiles))
    found = devices_of(HostFacts(gpus=(replace(green()[0], partition=sliced),)), [])
    assert found.estimated == ()
    assert [d.memory_bytes for d in found.devices] == [24 << 30, 48 << 30]
    assert [d.device_class for d in found.devices] == [f"h200/{p}" for p in profiles]
    third, two_thirds = (CLASSES["h200"].part(p) for p in profiles)
    assert third
    assert two_thirds
    assert (
        two_thirds.peak_tflops
        == pytest.approx(2 * third.peak_tflops)
        == pytest.approx(CLASSES["h200"].peak_tflops * 2 / 7)
    )


def test_partitions_are_devices_of_their_own_class() -> None:
    instances = (Instance("3g.71gb", "MIG-1", 71 << 30), Instance("4g.71gb", "MIG-2", 71 << 30))
    sliced = replace(green()[0], partition=Partition("mig", instances=instances))
    fabric = build([host("a", [ethernet("e", "10.0.0.1")], (sliced, *green(1, first=1)))])
    devices = fabric.cluster.hosts[0].devices
    assert [(d.index, d.device_class, d.uuid) for d in devices] == [
        (0, "h200/3g.71gb", "MIG-1"),
        (1, "h200/4g.71gb", "MIG-2"),
        (2, "h200", None),
    ]
    assert device_class(replace(red()[0], partition=Partition("cpx"))).name == "mi325x/cpx"
    assert device_class(replace(red()[0], partition=Partition("spx"))).name == "mi325x"


def test_a_subset_of_devices() -> None:
    fabric = build([host("a", [ethernet("e", "10.0.0.1")], green(4), access=Access("a", gpus=(1, 3, 9)))])
    assert [d.index for d in fabric.cluster.hosts[0].devices] == [1, 3]
    assert "there is no device 9" in said(fabric)


def test_hosts_without_any_gpu_stand_as_cpu_processes() -> None:
    reports = [replace(host(n, [ethernet("e", f"10.0.0.{i + 1}")]), slots=i + 1) for i, n in enumerate("ab")]
    fabric = build(reports)
    assert [len(h.devices) for h in fabric.cluster.hosts] == [1, 2]
    assert shape(fabric.cluster) == {"cpu": ("cpu", "ethernet", ["a", "b"])}
    assert "no host has a GPU" in said(fabric)


def test_a_head_node_without_gpu_is_no_device_among_gpu_hosts() -> None:
    fabric = build([host("head", [ethernet("e", "10.0.0.9")]), host("a", [ethernet("e", "10.0.0.1")], green())])
    assert [len(h.devices) for h in fabric.cluster.hosts] == [0, 1]
    assert "head: no GPU was found" in said(fabric)


def test_unreachable_hosts_stay_with_their_reason() -> None:
    dead = Report("dead", Access("dead"), status="timeout", reason="no answer within 5 s")
    fabric = build([dead, host("a", [ethernet("e", "10.0.0.1")], green())])
    assert [(h.name, h.status) for h in fabric.cluster.hosts] == [("dead", "timeout"), ("a", "ok")]
    assert len(fabric.cluster.islands) == 1


def test_the_data_address_is_in_the_network_most_hosts_share_then_the_fastest() -> None:
    reports = [
        host(
            "a", [ethernet("e", "10.0.0.1"), roce("r", "10.1.0.1"), ethernet("x", "10.2.0.1", rate=400 * GB)], green()
        ),
        host("b", [ethernet("e", "10.0.0.2"), roce("r", "10.1.0.2")], green()),
        host("c", [ethernet("e", "10.0.0.3")], green(), data_address="10.7.7.7"),
    ]
    assert [h.data_address for h in build(reports).cluster.hosts] == ["10.0.0.1", "10.0.0.2", "10.7.7.7"]
    assert [h.data_address for h in build(reports[:2]).cluster.hosts] == ["10.1.0.1", "10.1.0.2"]


@pytest.mark.parametrize(
    ("rdma", "words"),
    [
        (RdmaFacts(), "unknown whether libibverbs"),
        (RdmaFacts(libraries=()), "libibverbs is not installed"),
        (replace(VERBS, device_files=()), "may not open /dev/infiniband"),
        (replace(VERBS, memlock_bytes=8 << 20), "may lock only 8.0 MiB"),
    ],
)
def test_rdma_needs_more_than_ports(rdma: RdmaFacts, words: str) -> None:
    fabric = build([host("a", [roce("r", "10.1.0.1")], green()), host("b", [roce("r", "10.1.0.2")], red(), rdma=rdma)])
    reason = way(fabric, "h200", "mi325x", "rdma").reason
    assert words in reason
    assert "b" in reason


def test_what_is_unusual_is_said_once_and_about_the_right_host() -> None:
    driver = [replace(g, driver="550.1") for g in green(2)]
    odd = [replace(g, driver="535.9", pcie=Pcie(width=8, max_width=16)) for g in green(1)]
    slow = replace(ib("ib0"), rate_bytes_per_s=25 * GB)
    reports = [
        host("a", [ib("ib0")], driver),
        host("b", [ib("ib0")], driver),
        host("c", [slow], odd),
        host("d", [ib("ib0")], red()),
    ]
    sentences = {(n.host, n.sentence) for n in unusual(reports, build(reports).cluster)}
    assert ("c", "the GPU driver is 535.9, its peers have 550.1") in sentences
    assert ("c", "the count of GPUs is 1, its peers have 2") in sentences
    assert ("c", "GPU nvidia:0 has 8 of its 16 PCIe lanes") in sentences
    assert ("c", "ib0 runs at 25.0 GB/s where others of the kind reach 50.0 GB/s") in sentences
    assert {host for host, _ in sentences} == {"c"}


def python_with(*packages: str) -> tuple[Interpreter, ...]:
    return (Interpreter("python3", packages=dict.fromkeys(packages, "1.0")),)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (("nixl",), ("nixl", "mooncake_transfer_engine_non_cuda"), ""),
        (("nixl",), (), "b: its Python has neither nixl nor mooncake"),
        (("nixl",), ("mooncake_transfer_engine",), "no engine in common"),
    ],
)
def test_rdma_needs_an_engine_that_both_hosts_have(one: tuple[str, ...], other: tuple[str, ...], words: str) -> None:
    reports = [host("a", [roce("r", "10.1.0.1")], green()), host("b", [roce("r", "10.1.0.2")], red())]
    pythons = [python_with(*one), python_with(*other)]
    told = [
        replace(r, facts=replace(r.facts, interpreters=p)) for r, p in zip(reports, pythons, strict=True) if r.facts
    ]
    for kind in ("rdma", "direct"):
        found = way(build(told), "h200", "mi325x", kind)
        assert words in found.reason
        assert found.usable == (not words and kind == "rdma")


def test_foreign_accelerators_are_named_and_their_host_is_no_riddle() -> None:
    npu = host("npu", [ethernet("eth0", "10.0.0.9")])
    assert npu.facts is not None
    npu = replace(npu, facts=replace(npu.facts, foreign={"Ascend 910B": 8}))
    found = build([host("green", [ethernet("eth0", "10.0.0.1")], green(1)), npu])
    assert said(found) == "npu: 8 x Ascend 910B: no back end for it here; docs/adding-a-vendor.md"
