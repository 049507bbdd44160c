"""Whole hosts, by vendor: what is believed when sources disagree, are missing, or show several vendors at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetctl.comm.contract.facts import Gid, HostFacts, Near
from hetctl.probe import Raw, parse
from hetctl.probe import remote as program
from hetctl.probe.notes import compact
from hetctl.probe.raw import Options, ToolOutput, load
from hetctl.probe.rdma import parse_fi_info
from hetctl.probe.topology import PCI, branch, distance
from hetctl.probe.vendors.nvidia_smi import parse_instances, parse_nvlink
from hetctl.probe.wanted import request
from tests.rigs.dress import Costume, dress_host

FACTS = Path(__file__).resolve().parents[2] / "facts"
XML, DUMP = "nvidia-smi -q -x", "xpu-smi discovery"


def output(text: str) -> ToolOutput:
    return ToolOutput(exit_code=0, stdout=text)


def recorded(path: str) -> str:
    return (FACTS / path).read_bytes().decode()


def device(
    pci: str, vendor: str, *, driver: str | None, parent: str = "pci0000:00"
) -> tuple[dict[str, str], dict[str, str]]:
    """Files and links of one display device in sysfs."""
    files = {f"{PCI}{pci}/vendor": vendor, f"{PCI}{pci}/class": "0x030200", f"{PCI}{pci}/numa_node": "1"}
    links = {PCI + pci: f"/sys/devices/{parent}/{pci}"}
    if driver:
        links[f"{PCI}{pci}/driver"] = f"/sys/bus/pci/drivers/{driver}"
    return files, links


def host(*devices: tuple[dict[str, str], dict[str, str]], tools: dict[str, ToolOutput] | None = None) -> HostFacts:
    files = {k: v for f, _ in devices for k, v in f.items()}
    links = {k: v for _, found in devices for k, v in found.items()}
    return parse(Raw(1, files=files, links=links, tools=tools or {}))


def test_two_vendors_in_one_host(tmp_path: Path) -> None:
    raws = []
    for number, vendor in enumerate(("nvidia", "amd")):
        costume = Costume("ws", number, vendor, gpus=1 + number, nics=0, tool_delay_s=0)  # type: ignore[arg-type]
        dress = dress_host(tmp_path / vendor, costume)
        raws.append(load(program.collect(request(Options(root=str(dress.root), path=str(dress.tools))))))
    one, two = raws
    shifted = {k.replace("/0000:", "/0001:"): v for k, v in two.files.items() if "/kfd/" not in k}
    nodes = {k: v.replace("domain 0", "domain 1") for k, v in two.files.items() if "/kfd/" in k}
    links = {k.replace("/0000:", "/0001:"): v.replace("0000:", "0001:") for k, v in two.links.items()}
    tools = {n: t for n, t in two.tools.items() if n.startswith("amd")}
    tools = {n: ToolOutput(t.argv, 0, 0, t.stdout.replace("0000:", "0001:")) for n, t in tools.items()}
    both = Raw(1, files={**one.files, **shifted, **nodes}, links={**one.links, **links}, tools={**one.tools, **tools})
    facts = parse(both)
    assert facts.vendors["nvidia"] == facts.vendors["amd"] == "present"
    assert [(g.id, g.pci) for g in facts.gpus] == [
        ("nvidia:0", "0000:13:00.0"),
        ("amd:0", "0001:13:00.0"),
        ("amd:1", "0001:23:00.0"),
    ]
    assert [(r.to, r.path) for r in facts.gpus[1].gpus] == [("amd:1", "xgmi"), ("nvidia:0", "node")]
    assert facts.sources["gpus[0].architecture"] != facts.sources["gpus[1].architecture"]


def test_a_gpu_has_its_ids_from_sysfs_and_every_name_that_is_one() -> None:
    base = f"{PCI}0000:75:00.0/"
    files, links = device("0000:75:00.0", "0x1002", driver="amdgpu")
    board = {"device": "0x75a0", "subsystem_vendor": "0x1002", "subsystem_device": "0x75A0", "product_name": "67XA6S"}
    files |= {base + name: text for name, text in board.items()}
    static = [{"gpu": 0, "bus": {"bdf": "0000:75:00.0"}, "board": {"product_name": "AMD Instinct MI350 OAM"}}]
    static[0]["asic"] = {"market_name": "AMD Instinct MI350X", "vendor_id": "0x1002", "device_id": "0x75ff"}
    [gpu] = host((files, links), tools={"amd-smi static": output(json.dumps(static))}).gpus
    assert (gpu.pci_id, gpu.subsystem_id) == ("1002:75a0", "1002:75a0")
    assert gpu.name == "AMD Instinct MI350 OAM"
    assert set(gpu.names) == {"AMD Instinct MI350 OAM", "AMD Instinct MI350X"}
    card = {"PCI Bus": "0000:75:00.0", "Card SKU": "D05101", "Card Model": "0x0b0c", "Device ID": "0x740c"}
    [only] = host((files, links), tools={"rocm-smi": output(json.dumps({"card0": card}))}).gpus
    assert only.names == ()
    [told] = host(tools={"amd-smi static": output(json.dumps(static))}).gpus
    assert told.pci_id == "1002:75ff"


def test_without_a_driver_a_gpu_is_reported_and_not_used() -> None:
    facts = host(device("0000:05:00.0", "0x10de", driver="vfio-pci"), device("0000:06:00.0", "0x1002", driver=None))
    assert facts.gpus == ()
    assert facts.vendors["nvidia"] == "1 on the PCI bus, none usable: bound to vfio-pci"
    assert facts.vendors["amd"] == "1 on the PCI bus, none usable: bound to no driver"


def test_gpus_hidden_from_the_tool_are_said_aloud() -> None:
    visible, hidden = (device(f"0000:{bus}:00.0", "0x10de", driver="nvidia") for bus in ("9d", "1b"))
    facts = host(visible, hidden, tools={XML: output(recorded("nvidia-smi/r570-h200/output.xml"))})
    assert [(g.index, g.pci) for g in facts.gpus] == [(0, "0000:9d:00.0")]
    assert "sysfs shows 1 GPU(s) that nvidia-smi does not (0000:1b:00.0)" in facts.warnings[0]


def test_without_the_tool_sysfs_still_lists_the_gpus() -> None:
    facts = host(device("0000:9d:00.0", "0x10de", driver="nvidia"))
    (gpu,) = facts.gpus
    assert (gpu.pci, gpu.numa_node, gpu.name, gpu.memory_total_bytes) == ("0000:9d:00.0", 1, None, None)
    assert facts.why_unknown("gpus[0].memory_total_bytes") == "not told by nvidia-smi -q -x"
    assert facts.warnings == ("nvidia-smi gave no answer: not run",)


def test_a_broken_tool_is_named() -> None:
    failing = {XML: ToolOutput(exit_code=9, stderr="NVIDIA-SMI has failed because it couldn't communicate\n")}
    facts = host(device("0000:9d:00.0", "0x10de", driver="nvidia"), tools=failing)
    assert facts.warnings == ("nvidia-smi gave no answer: NVIDIA-SMI has failed because it couldn't communicate",)


def test_mig_instances_get_their_names_from_the_list() -> None:
    listed = (
        "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaaaaaa-0000-1111-2222-333333333333)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-1)\n  MIG 3g.40gb     Device  1: (UUID: MIG-2)\n"
        "GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbbbbbb-0000-1111-2222-333333333333)\n"
    )
    tools = {XML: output(recorded("nvidia-smi/r470-a100-mig/output.xml")), "nvidia-smi -L": output(listed)}
    first, second = host(tools=tools).gpus
    assert [(i.profile, i.uuid, i.memory_total_bytes) for i in first.partition.instances] == [
        ("3g.40gb", "MIG-1", 40192 * 2**20),
        ("3g.40gb", "MIG-2", 40192 * 2**20),
    ]
    assert (second.partition.mode, second.partition.pending_mode, second.partition.instances) == ("none", "mig", ())
    assert parse_instances("MIG 1g Device 0: (UUID: MIG-x)") == {}


def test_nvlink_states() -> None:
    text = "GPU 0: X (UUID: GPU-a)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: X (UUID: GPU-b)\n"
    assert parse_nvlink(text) == {"GPU-a": (1, 1)}


def test_amd_partitions_share_one_package() -> None:
    raw = load(recorded("kfd/mi300x-cpx-partitions/raw.json").encode())
    files, links = device("0000:05:00.0", "0x1002", driver="amdgpu")
    extra = {
        f"{PCI}0000:05:00.0/mem_info_vram_total": str(192 * 2**30),
        f"{PCI}0000:05:00.0/mem_info_vram_used": "0",
        f"{PCI}0000:05:00.0/current_compute_partition": "CPX",
    }
    facts = parse(Raw(1, files={**raw.files, **files, **extra}, links=links))
    assert [g.partition.mode for g in facts.gpus] == ["cpx", "cpx"]
    assert [g.memory_total_bytes for g in facts.gpus] == [24 * 2**30] * 2  # not the package's
    assert [g.memory_free_bytes for g in facts.gpus] == [None, None]  # sysfs tells the package's only


def test_amd_without_kfd_says_that_the_order_is_a_guess() -> None:
    tools = {"amd-smi static": output(recorded("amd-smi-static/rocm6.0-list/output.json"))}
    facts = host(tools=tools)
    assert [g.pci for g in facts.gpus] == ["0000:05:00.0", "0000:26:00.0"]
    assert "HIP may differ" in facts.warnings[0]


def test_intel_beside_the_processors_own_graphics() -> None:
    own, card = device("0000:00:02.0", "0x8086", driver="i915"), device("0000:29:00.0", "0x8086", driver="xe")
    assert host(own).vendors["intel"] == "absent"
    facts = host(own, card, tools={DUMP: output(recorded("xpu-smi/v1.2-two-max-1100/output.csv"))})
    assert [(g.name, g.memory_total_bytes) for g in facts.gpus] == [
        ("Intel(R) Data Center GPU Max 1100", 48 * 2**30)
    ] * 2
    assert facts.why_unknown("gpus[1].memory_free_bytes") == "not read for this vendor"
    bare = host(own, card)
    assert [g.pci for g in bare.gpus] == ["0000:29:00.0"]
    assert bare.warnings == ("xpu-smi gave no answer: not run",)


def hygon_host(*, kfd: bool = True, smi: bool = True) -> HostFacts:
    raw = load(recorded("kfd/hygon-beside-nothing-of-amd/raw.json").encode())
    files, links = device("0000:07:00.0", "0x1d94", driver="hydcu")
    files[f"{PCI}0000:07:00.0/class"] = "0x0b4000"  # a co-processor, among bridges of the same vendor
    bridge, _ = device("0000:00:01.3", "0x1d94", driver="pcieport")
    bridge[f"{PCI}0000:00:01.3/class"] = "0x060400"
    one = json.dumps({"card0": json.loads(recorded("hy-smi/k100-ai-two-of-eight/output.json"))["card0"]})
    tools = {name: output(one) for name in (("hy-smi", "rocm-smi") if smi else ())}
    return parse(Raw(1, files={**(raw.files if kfd else {}), **files, **bridge}, links=links, tools=tools))


@pytest.mark.parametrize(
    ("kfd", "smi", "name"), [(True, True, "K100_AI"), (False, True, "K100_AI"), (True, False, None)]
)
def test_hygon_is_not_taken_for_amd_whose_tools_it_speaks(kfd: bool, smi: bool, name: str | None) -> None:
    facts = hygon_host(kfd=kfd, smi=smi)
    assert (facts.vendors["hygon"], facts.vendors["amd"]) == ("present", "absent")
    assert [(g.id, g.name, g.memory_total_bytes) for g in facts.gpus] == [("hygon:0", name, 65520 * 2**20)]
    assert facts.foreign == {}
    assert facts.why_unknown("gpus[0].memory_free_bytes") == "not read for this vendor"
    (only,) = facts.gpus
    assert only.pci == ("0000:07:00.0" if kfd else None)


def test_hygon_without_kfd_and_tool_is_what_its_driver_holds() -> None:
    (only,) = hygon_host(kfd=False, smi=False).gpus
    assert (only.pci, only.numa_node, only.name) == ("0000:07:00.0", 1, None)


def test_moore_threads_by_its_tool_else_by_its_driver() -> None:
    cards = [device(f"0000:{bus}:00.0", "0x1ed5", driver="mtgpu") for bus in ("2a", "3a", "4c")]
    facts = host(*cards, tools={"mthreads-gmi": output(recorded("mthreads-gmi/v2.3.2-three-s5000/output.txt"))})
    assert [(g.id, g.pci, g.name, g.numa_node) for g in facts.gpus] == [
        (f"mthreads:{i}", f"0000:{bus}:00.0", "MTT S5000", 1) for i, bus in enumerate(("2a", "3a", "4c"))
    ]
    bare = host(*cards)
    assert [g.pci for g in bare.gpus] == ["0000:2a:00.0", "0000:3a:00.0", "0000:4c:00.0"]
    assert bare.warnings == ("mthreads-gmi gave no answer: not run",)


def on_the_bus(*devices: tuple[str, str]) -> Raw:
    """A host with functions of (vendor:device, class) on its PCI bus, in turn."""
    files, links = {}, {}
    for number, (identity, kind) in enumerate(devices):
        base = f"{PCI}0000:{number:02x}:00.0"
        vendor, _, model = identity.partition(":")
        files |= {f"{base}/vendor": f"0x{vendor}\n", f"{base}/device": f"0x{model}\n", f"{base}/class": f"0x{kind}\n"}
        links[base] = f"/sys/devices/pci0000:00/0000:{number:02x}:00.0"
    return Raw(1, files=files, links=links)


@pytest.mark.parametrize(
    ("identity", "kind", "product"),
    [
        ("1da3:1020", "120000", "Gaudi2"),
        ("1da3:1021", "120000", "Gaudi2"),  # 2E
        ("1da3:1060", "120000", "Gaudi3"),
        ("1da3:1010", "120000", "Gaudi"),
        ("19e5:d802", "120000", "Ascend 910B"),
        ("19e5:d107", "120000", "Ascend"),
        ("19e5:a250", "120000", None),  # a ZIP engine of a Kunpeng
        ("19e5:a222", "020000", None),  # its network controller
        ("19e5:3754", "010802", None),  # an NVMe SSD
        ("1d0f:7364", "088000", "Trainium2"),
        ("1d0f:ec20", "020000", None),
        ("1d0f:efa1", "020000", None),
        ("1d0f:8061", "010802", None),
        ("1d22:3684", "078000", "Kunlun"),
        ("1d22:1380", "010802", None),
        ("9999:0a01", "038000", "MetaX C500"),
        ("9999:4001", "120000", "MetaX"),
        ("9999:0a01", "010802", "MetaX C500"),  # an id says more than a class
        ("1ee0:0100", "120000", "Biren"),
        ("1ee0:0100", "010802", None),
        ("cabc:0370", "120000", "Cambricon MLU370"),
        ("cabc:0590", "120000", "Cambricon MLU"),
        ("1e3e:0002", "120000", "Iluvatar"),
        ("10de:2330", "030200", None),
    ],
)
def test_accelerators_that_nothing_here_drives_are_named(identity: str, kind: str, product: str | None) -> None:
    facts = parse(on_the_bus((identity, kind), (identity, kind)))
    assert facts.foreign == ({product: 2} if product else {})


def test_virtual_functions_are_no_further_accelerators() -> None:
    raw = on_the_bus(("19e5:d802", "120000"), ("19e5:d802", "120000"))
    links = {**raw.links, f"{PCI}0000:01:00.0/physfn": "/sys/devices/pci0000:00/0000:00:00.0"}
    assert parse(Raw(1, files=raw.files, links=links)).foreign == {"Ascend 910B": 1}


def test_accelerators_of_unusual_classes_are_read_on_the_host_and_no_other_function_is(tmp_path: Path) -> None:
    dress = dress_host(tmp_path, Costume("ws", 0, "nvidia", gpus=1, nics=0, tool_delay_s=0))
    for number, (identity, kind) in enumerate((("1D0F:7164", "0x088000"), ("8086:09A2", "0x088000"))):
        vendor, _, model = identity.partition(":")
        at = dress.root / f"sys/bus/pci/devices/0000:f{number}:00.0"
        at.mkdir(parents=True)
        told = {"modalias": f"pci:v0000{vendor}d0000{model}sv0000", "class": kind}
        told |= {"vendor": f"0x{vendor.lower()}", "device": f"0x{model.lower()}"}
        for file, text in told.items():
            (at / file).write_text(text + "\n")
    raw = load(program.collect(request(Options(root=str(dress.root), path=str(dress.tools)))))
    assert [path for path in raw.files if "0000:f1" in path] == []
    facts = parse(raw)
    assert (facts.foreign, len(facts.gpus)) == ({"Trainium": 1}, 1)


ROOT_PORT = "pci0000:10/0000:10:01.0/"
SWITCH = ROOT_PORT + "0000:11:00.0/"
BELOW = SWITCH + "0000:12:00.0/0000:13:00.0/0000:14:00.0/"  # a second switch below the first


@pytest.mark.parametrize(
    ("a", "b", "nodes", "expected"),
    [
        (SWITCH + "0000:12:00.0/A", SWITCH + "0000:12:01.0/B", (0, 0), "pix"),
        (ROOT_PORT + "A", ROOT_PORT + "B", (0, 0), "pix"),
        (BELOW + "A", SWITCH + "0000:12:01.0/B", (0, 0), "pxb"),
        (ROOT_PORT + "A", "pci0000:10/0000:10:02.0/B", (0, 0), "phb"),
        (ROOT_PORT + "A", "pci0000:20/0000:20:01.0/B", (0, 0), "node"),
        (ROOT_PORT + "A", "pci0000:20/0000:20:01.0/B", (0, 1), "sys"),
        (ROOT_PORT + "A", "pci0000:20/0000:20:01.0/B", (None, 1), None),
        ("", "pci0000:20/0000:20:01.0/B", (0, 1), None),
    ],
)
def test_distances(a: str, b: str, nodes: tuple[int | None, int | None], expected: Near | None) -> None:
    ends = {"A": "0000:aa:00.0", "B": "0000:bb:00.0"}
    ways = [f"/sys/devices/{way[:-1]}{ends[way[-1]]}" if way else "" for way in (a, b)]
    links = {PCI + end: way for end, way in zip(ends.values(), ways, strict=True)}
    one, other = (branch(links, end) for end in ends.values())
    assert distance(one, other, nodes) == distance(other, one, nodes[::-1]) == expected


def test_gid_words() -> None:
    mapped = Gid(3, "0000:0000:0000:0000:0000:ffff:0a01:0004", "roce_v2")
    assert (mapped.ipv4, mapped.routable) == ("10.1.0.4", True)
    assert not Gid(3, "0000:0000:0000:0000:0000:ffff:a9fe:0004", "roce_v2").routable
    assert not Gid(1, "fe80:0000:0000:0000:0000:00ff:fe00:0001", "roce_v2").routable
    assert Gid(5, "fd00:0000:0000:0000:0000:0000:0000:0001", "roce_v2").routable
    assert Gid(0, "fec0:0000:0000:0001:0000:0000:0000:0001", "ib").ipv4 is None


def test_what_a_host_refuses_is_said() -> None:
    failed = {"/etc/machine-id": "Permission denied", "/sys/class/net/eth0/speed": "Invalid argument"}
    facts = parse(Raw(1, failed=failed))
    assert facts.unknown["/etc/machine-id"] == "the host said: Permission denied"
    assert "/sys/class/net/eth0/speed" not in facts.unknown


def test_equal_notes_of_a_list_become_one() -> None:
    notes = {"gpus[0].uuid": "a", "gpus[1].uuid": "a", "gpus[0].name": "a", "gpus[1].name": "b", "system.os": "c"}
    assert compact(notes, {"gpus": 2}) == {
        "gpus[*].uuid": "a",
        "gpus[0].name": "a",
        "gpus[1].name": "b",
        "system.os": "c",
    }
    assert compact({"gpus[0].uuid": "a"}, {"gpus": 2}) == {"gpus[0].uuid": "a"}


def test_the_request_is_plain_ascii_and_small() -> None:
    text = request(Options(interpreters=("/opt/pythön/bin/python",)))
    assert text.isascii()
    assert len(text) < 16_000
    assert json.loads(text)["options"]["interpreters"] == ["/opt/pythön/bin/python"]


def test_a_vlan_on_a_bridge_stands_on_hardware() -> None:
    net = "/sys/class/net/"
    names = ("br0", "br0.7", "docker0", "eno1", "loop0", "loop1", "veth1")
    links = {f"{net}{name}": f"/sys/devices/virtual/net/{name}" for name in names if name != "eno1"}
    links |= {f"{net}eno1": "/sys/devices/pci0000:00/0000:00:1f.0/net/eno1", f"{net}eno1/master": f"{net}br0"}
    links |= {f"{net}eno1/device": "/sys/devices/pci0000:00/0000:00:1f.0"}
    lowers = [("br0", "veth1"), ("br0", "eno1"), ("br0.7", "br0"), ("docker0", "veth1"), ("loop0", "loop1")]
    links |= {f"{net}{upper}/lower_{lower}": f"{net}{lower}" for upper, lower in [*lowers, ("loop1", "loop0")]}
    files = {f"{net}{name}/mtu": "1500" for name in names}
    found = {n.name: n for n in parse(Raw(1, files=files, links=links, listings={net.rstrip("/"): names})).nics}
    assert {name: nic.virtual for name, nic in found.items()} == {
        **dict.fromkeys(("br0", "br0.7", "eno1"), False),
        **dict.fromkeys(("docker0", "loop0", "loop1", "veth1"), True),
    }
    assert found["br0.7"].pci == "0000:00:1f.0"
    assert found["br0"].over == ("eno1", "veth1")


@pytest.mark.parametrize(
    ("text", "providers"),
    [
        (
            "efa:\n    version: 121.0\ntcp:\n    version: 121.0\nofi_rxm:\n    version: 121.0\n",
            ("efa", "ofi_rxm", "tcp"),
        ),
        (
            "provider: cxi\n    fabric: cxi\n    domain: cxi0\nprovider: tcp;ofi_rxm\n    fabric: 10.0.0.0/8\n",
            ("cxi", "tcp;ofi_rxm"),
        ),
        ("fi_getinfo: -61\n", None),
        ("", None),
    ],
)
def test_providers_of_libfabric(text: str, providers: tuple[str, ...] | None) -> None:
    assert parse_fi_info(text) == providers
