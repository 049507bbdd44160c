"""Tools that are old, fail, or speak of broken devices: what they say is kept, and a broken device is no healthy one.

What is quoted was printed on hosts of others, in the threads and files that each case names; only facts are taken.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.facts import HostFacts
from hetctl.discovery.fabric import Report, build
from hetctl.doctor.check import CheckedCluster
from hetctl.doctor.registry import BY_ID
from hetctl.doctor.runner import judge
from hetctl.probe import Raw, parse
from hetctl.probe import remote as program
from hetctl.probe.nics import nics
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Options, ToolOutput, load
from hetctl.probe.topology import PCI
from hetctl.probe.vendors.amd_smi import kfd_nodes, parse_static
from hetctl.probe.vendors.nvidia_smi import parse_nvlink, parse_xml
from hetctl.probe.wanted import request
from hetctl.probe.words import told
from tests.hetctl.probe.test_vendors import XML, device, host, output, recorded
from tests.rigs.dress import Costume, dress_host

H200 = recorded("nvidia-smi/r570-h200/output.xml")  # one GPU at 9d:00.0
GREEN = [device(f"0000:{bus}:00.0", "0x10de", driver="nvidia") for bus in ("1b", "9d")]
NAMES = {
    f"/proc/driver/nvidia/gpus/0000:{bus}:00.0/information": "Model: NVIDIA H200\n" for bus in ("1b", "9d")
}  # procfs knows the product of a GPU that nothing can use


def smi(stdout: str, code: int = 0, stderr: str = "") -> HostFacts:
    """A host with two GPUs, after nvidia-smi answered so."""
    return host(*GREEN, (NAMES, {}), tools={XML: ToolOutput(exit_code=code, stdout=stdout, stderr=stderr)})


def lent(product: str) -> dict[str, str]:
    """A display device of Microsoft's as sysfs shows it in a guest."""
    values = {"vendor": "0x1414", "device": product, "class": "0x030200"}
    return {f"{PCI}5582:00:00.0/{name}": text + "\n" for name, text in values.items()}


# --- old tools -------------------------------------------------------------------------------------------------------

OLD_ROCM_SMI = """#!/bin/sh
PATH=/usr/bin:/bin
unknown=
for word; do case "$word" in {unknown}) unknown="$unknown $word";; esac; done
if [ -n "$unknown" ]; then
  printf 'usage: rocm-smi [-h]\nrocm-smi: error: unrecognized arguments:%s\n' "$unknown" >&2
  exit 2
fi
cat {answer}
"""


@pytest.mark.parametrize("unknown", ["--showmemorypartition", "--showmemorypartition|--showcomputepartition"])
def test_an_old_rocm_smi_is_asked_for_what_it_has(tmp_path: Path, unknown: str) -> None:
    """ROCm 5.5 to 5.7 know no memory partitions, older ones no partitions; argparse then refuses the whole line."""
    dress = dress_host(tmp_path, Costume(vendor="amd", gpus=1, nics=0, tool_delay_s=0))
    (dress.tools / "amd-smi").unlink()
    (tmp_path / "answer").write_text(recorded("rocm-smi/rocm5.7/output.json"))
    (dress.tools / "rocm-smi").write_text(OLD_ROCM_SMI.format(unknown=unknown, answer=tmp_path / "answer"))
    (dress.tools / "rocm-smi").chmod(0o755)
    raw = load(program.collect(request(Options(root=str(dress.root), path=str(dress.tools)))))
    assert raw.tool("rocm-smi").exit_code == 0
    assert not set(unknown.split("|")) & set(raw.tool("rocm-smi").argv)
    assert "card0" in raw.tool("rocm-smi").stdout


def test_power_limits_since_rocm_7() -> None:
    """The shape is that of the AMD SMI changelog of ROCm 7.1 (MIT); ppt1 is N/A where there is one limit."""
    watts = {"max_power_limit": "N/A", "socket_power_limit": {"value": 1000, "unit": "W"}}
    absent = dict.fromkeys(watts, "N/A")
    entry = {"gpu": 0, "bus": {"bdf": "0000:05:00.0"}, "limit": {"ppt0": watts, "ppt1": absent}}
    [gpu] = parse_static(json.dumps({"gpu_data": [entry]}))
    assert gpu.health.power_limit_w == 1000
    [old] = parse_static(json.dumps([{"gpu": 0, "limit": {"max_power": {"value": 750, "unit": "W"}}}]))
    assert old.health.power_limit_w == 750


def test_amd_smi_may_name_one_gpu_without_a_list() -> None:
    assert [g.name for g in parse_static('{"gpu": 1, "asic": {"market_name": "AMD Instinct MI210"}}')] == [
        "AMD Instinct MI210"
    ]


@pytest.mark.parametrize("rest", [{"error": "AMDSMI_STATUS_NOT_INIT"}, {"asic": {"market_name": "AMD Instinct MI210"}}])
def test_where_amd_smi_tells_no_address_the_one_of_sysfs_stands(rest: dict[str, object]) -> None:
    card = device("0000:03:00.0", "0x1002", driver="amdgpu")
    [gpu] = host(card, tools={"amd-smi static": output(json.dumps([{"gpu": 0, **rest}]))}).gpus
    assert gpu.pci == "0000:03:00.0"
    assert gpu.name == ("AMD Instinct MI210" if "asic" in rest else None)


def test_a_card_of_which_rocm_smi_tells_nothing_is_said_and_is_none_of_its_own() -> None:
    cards = [device(f"0000:{bus}:00.0", "0x1002", driver="amdgpu") for bus in ("03", "23")]
    answer = {"card0": {"Card Series": "AMD Instinct MI210", "PCI Bus": "0000:03:00.0"}, "card1": "Unable to get"}
    facts = host(*cards, tools={"rocm-smi": output(json.dumps(answer))})
    assert [gpu.pci for gpu in facts.gpus] == ["0000:03:00.0"]
    assert any("0000:23:00.0" in said for said in facts.warnings)


def test_what_amd_smi_tells_of_a_gpu_without_an_address_is_kept() -> None:
    entry = {"gpu": 0, "asic": {"market_name": "AMD Instinct MI210"}, "vram": {"size": {"value": 65520, "unit": "MB"}}}
    [gpu] = host(tools={"amd-smi static": output(json.dumps({"gpu_data": [entry]}))}).gpus
    assert (gpu.name, gpu.pci, gpu.memory_total_bytes) == ("AMD Instinct MI210", None, 65520 * 2**20)


def test_a_name_that_ends_in_a_bracket_is_whole() -> None:
    assert [told(word) for word in ("Navi 22 [Radeon RX 6700 XT]", "[N/A]", "[N/A", "[Unknown Error]", "<a>")] == [
        *("Navi 22 [Radeon RX 6700 XT]", None, None, None, "a")
    ]


# --- failing tools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["", "WARNING: infoROM is corrupted at gpu 0000:9D:00.0\n"])
def test_a_whole_answer_of_a_tool_that_failed_is_read_and_that_is_said(after: str) -> None:
    """Exit code 14 is "infoROM is corrupted" (NVIDIA/gpu-operator#20, pytorch PR 87464)."""
    facts = smi(H200 + after, 14)
    gpu = next(g for g in facts.gpus if g.pci == "0000:9d:00.0")
    assert (gpu.memory_total_bytes, gpu.problem) == (143771 * 2**20, None)
    assert "nvidia-smi failed (exit code 14), but its answer is whole" in facts.warnings


def test_half_an_answer_of_a_tool_that_failed_is_none() -> None:
    facts = smi(H200[: len(H200) // 2], 255)
    assert [g.memory_total_bytes for g in facts.gpus] == [None, None]
    assert facts.warnings[0].startswith("nvidia-smi gave no answer: ")


@pytest.mark.parametrize(
    ("said", "code", "reason"),
    [
        # anderskm/gputil#55
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161\n",
            18,
            "Failed to initialize NVML: Driver/library version mismatch",
        ),
        ("Failed to initialize NVML: Insufficient Permissions\n", 4, "Insufficient Permissions"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n",
            9,
            "couldn't communicate with the NVIDIA driver",
        ),
        ("No devices were found\n", 6, "No devices were found"),
    ],
)
def test_where_the_driver_cannot_be_talked_to_no_gpu_is_usable(said: str, code: int, reason: str) -> None:
    for facts in (smi(said, code), smi("", code, stderr=said)):
        assert [reason in (g.problem or "") for g in facts.gpus] == [True, True]
        cluster = build([Report("a", Access("a"), facts)])
        assert not any(host.devices for host in cluster.cluster.hosts)
        assert any(reason in note.sentence for note in cluster.notes)
        [finding] = judge(CheckedCluster((Report("a", Access("a"), facts),), cluster.cluster), [BY_ID["gpu.usable"]])
        assert (finding.state, reason in finding.reason, bool(finding.fix)) == ("fail", True, True)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        # AlexeyAB/darknet#86, JosephKJ/OWOD#81
        (
            "Unable to determine the device handle for GPU 0000:1B:00.0: GPU is lost.  Reboot\n"
            " the system to recover this GPU\n",
            "GPU is lost",
        ),
        # NVIDIA/open-gpu-kernel-modules#387, pdbear/syno_nvidia_gpu_driver#22
        ("Unable to determine the device handle for GPU 0000:1B:00.0: Unknown Error\n", "Unknown Error"),
        ("Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error\n", "Unknown Error"),
        # drivers from 550 on name the index too
        ("Unable to determine the device handle for GPU0: 0000:1B:00.0: Unknown Error\n", "Unknown Error"),
        ("Unable to determine the device handle for GPU0: Unknown Error\n", "Unknown Error"),
        # NVIDIA/dcgm-exporter#604: no such address is on the bus
        ("Unable to determine the device handle for GPU 000:1B:80.0: Unknown Error\n", "Unknown Error"),
        ("Unable to determine the device handle for gpu 0000:1B:00.0: GPU requires reset\n", "GPU requires reset"),
    ],
)
def test_a_gpu_without_a_handle_is_unusable_and_the_others_are_not(said: str, reason: str) -> None:
    for facts in (smi(said + H200, 15), smi(H200, 15, stderr=said), smi(said, 15)):
        first, second = facts.gpus
        assert (first.pci, first.problem, first.name) == ("0000:1b:00.0", reason, "NVIDIA H200")
        assert (second.pci, second.problem) == ("0000:9d:00.0", None)
        [one] = build([Report("a", Access("a"), facts)]).cluster.hosts
        assert [(d.index, d.pci) for d in one.devices] == [(1, "0000:9d:00.0")]


@pytest.mark.parametrize("said", ["Failed to initialize NVML: GPU access blocked by the operating system", "Segfault"])
def test_what_nvidia_smi_says_is_said_where_nothing_else_tells_of_a_gpu(said: str) -> None:
    """Under WSL and in containers there is neither a PCI bus with the GPU nor the driver's /proc."""
    facts = host(tools={XML: ToolOutput(exit_code=9, stdout=said)})
    assert facts.warnings == (f"nvidia-smi gave no answer: {said}",)
    assert host(tools={XML: ToolOutput(problem="not installed")}).warnings == ()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"/proc/modules": "nvgpu 2654208 20 - Live 0x0\nnvmap 1 0 - Live 0x0\n"}, "a Jetson's GPU"),
        (lent("0x008e"), "a GPU of Windows'"),
        (lent("0x5353"), ""),  # Hyper-V's screen
    ],
)
def test_gpus_that_only_the_kernel_tells_of_are_said(files: dict[str, str], said: str) -> None:
    warnings = host((files, {})).warnings
    assert len(warnings) == bool(said)
    assert said in "".join(warnings)
    seen = {XML: output(H200.replace("0000:9D:00.0", "5582:01:00.0"))}
    assert host((files, {}), tools=seen).warnings == ()


@pytest.mark.parametrize("name", ["GRID A100D-40C", "NVIDIA A16-8C", "NVIDIA A100-1-5CME", "GRID RTX6000-24Q"])
def test_a_part_of_a_gpu_that_is_lent_to_a_guest_is_said(name: str) -> None:
    """Names as NVIDIA's vGPU documentation lists them; NVIDIA A100-SXM4-80GB and the like are whole."""
    guest = H200.replace("NVIDIA H200", name)
    says = f"GPU nvidia:0 ({name}) is a vGPU: it shares a GPU's time and memory with other guests, and is slower"
    assert host(GREEN[1], tools={XML: output(guest)}).warnings == (says,)
    assert host(GREEN[1], tools={XML: output(H200)}).warnings == ()


@pytest.mark.parametrize("word", ["GPU requires reset", "[GPU requires reset]", "GPU is lost", "ERR!"])
def test_what_stands_in_place_of_a_value_makes_a_gpu_unusable(word: str) -> None:
    for place in ("gpu_temp", "uuid", "serial"):
        [gpu] = parse_xml(with_value(place, word)).gpus
        assert (gpu.problem or "").endswith(f"'{word.strip('[]')}' of it")
        assert word.strip("[]") not in (gpu.uuid, gpu.serial, gpu.name)


def with_value(place: str, value: str) -> str:
    """The recorded answer with another value in an element."""
    begin = H200.index(f"<{place}>") + len(place) + 2
    return H200[:begin] + value + H200[H200.index(f"</{place}>") :]


def test_an_unknown_error_in_what_every_gpu_tells_is_a_broken_one_elsewhere_only_unknown() -> None:
    assert parse_xml(with_value("uuid", "[Unknown Error]")).gpus[0].problem
    [gpu] = parse_xml(with_value("gpu_temp", "Unknown Error")).gpus
    assert (gpu.problem, gpu.health.temperature_c) == (None, None)


@pytest.mark.parametrize("word", ["0", "0000000000000", "N/A", "[Unknown Error]", ""])
def test_these_are_no_serial_numbers(word: str) -> None:
    assert parse_xml(with_value("serial", word)).gpus[0].serial is None
    entry = {"gpu": 0, "bus": {"bdf": "0000:05:00.0"}, "board": {"product_serial": word}}
    assert parse_static(json.dumps([entry]))[0].serial is None


# --- links, partitions, GIDs, other drivers --------------------------------------------------------------------------


def test_where_all_links_are_inactive_none_is_up() -> None:
    """leptonai/gpud#1085: nvidia-smi counts no link then."""
    said = "NVML: Unable to retrieve NVLink information as all links are inActive"
    text = f"GPU 0: NVIDIA H200 (UUID: GPU-a)\n{said}\nGPU 1: NVIDIA H200 (UUID: GPU-b)\n\t Link 0: 50 GB/s\n"
    assert parse_nvlink(text) == {"GPU-a": (0, None), "GPU-b": (1, 0)}
    assert parse_nvlink("GPU 0: X (UUID: GPU-a)\n\t Link 0: <inactive>\n\t Link 1: <inactive>\n") == {"GPU-a": (0, 2)}


@pytest.mark.parametrize("shift", [0, 28])
def test_partitions_keep_the_address_of_their_package(shift: int) -> None:
    """amdgpu writes a partition's number over the PCI function, since Linux 6.9 into bits 31:28 (kfd_topology.c)."""
    nodes = "/sys/class/kfd/kfd/topology/nodes/"
    files = {}
    for part in range(3):
        location = 0x0500 | part << shift
        files[f"{nodes}{part + 2}/gpu_id"] = str(100 + part)
        files[f"{nodes}{part + 2}/properties"] = f"simd_count 304\nlocation_id {location}\ndomain 1\nunique_id 77\n"
    sysfs, links = device("0001:05:00.0", "0x1002", driver="amdgpu", parent="pci0001:00")
    entries = [
        {"gpu": p, "bus": {"bdf": f"0001:05:00.{p}"}, "board": {"product_serial": f"69000{p}"}} for p in range(3)
    ]
    tools = {"amd-smi static": output(json.dumps({"gpu_data": entries}))}
    facts = parse(Raw(1, files={**files, **sysfs}, links=links, tools=tools))
    assert [g.pci for g in facts.gpus] == ["0001:05:00.0"] * 3
    assert [g.numa_node for g in facts.gpus] == [1, 1, 1]
    assert [g.serial for g in facts.gpus] == ["690000", "690001", "690002"]


def test_a_place_that_is_no_pci_address_is_unknown() -> None:
    base = "/sys/class/kfd/kfd/topology/nodes/1/"
    files = {base + "gpu_id": "9", base + "properties": f"simd_count 4\nlocation_id {1 << 20}\ndomain 0\n"}
    assert kfd_nodes(Raw(1, files=files))[0].pci is None


def test_a_prefix_without_an_address_is_no_gid() -> None:
    raw = load(recorded("rdma/mlx5-infiniband/raw.json").encode())
    slot = "/sys/class/infiniband/mlx5_0/ports/1/gids/1"
    found = nics(replace(raw, files={**raw.files, slot: "fe80:0000:0000:0000:0000:0000:0000:0000\n"}), Notes())
    assert [g.index for g in found[0].gids] == [0]


@pytest.mark.parametrize("driver", ["vfio-pci", None])
def test_gpus_of_another_driver_beside_working_ones_are_said(driver: str | None) -> None:
    facts = host(GREEN[1], device("0000:1b:00.0", "0x10de", driver=driver), tools={XML: output(H200)})
    assert facts.vendors["nvidia"] == "present"
    assert [g.pci for g in facts.gpus] == ["0000:9d:00.0"]
    says = f"nvidia: 1 GPU(s) beside these cannot be used: bound to {driver or 'no driver'} (0000:1b:00.0)"
    assert says in facts.warnings
    report = Report("a", Access("a"), facts)
    [finding] = judge(CheckedCluster((report,), build([report]).cluster), [BY_ID["gpu.count"]])
    assert (finding.state, finding.reason) == ("warn", says)
    assert "lspci" in finding.fix


def test_amd_gpus_that_kfd_does_not_list_are_said() -> None:
    nodes = "/sys/class/kfd/kfd/topology/nodes/1/"
    files = {nodes + "gpu_id": "9", nodes + "properties": "simd_count 4\nlocation_id 1280\ndomain 0\n"}
    found = host((files, {}), *(device(f"0000:{bus}:00.0", "0x1002", driver="amdgpu") for bus in ("05", "15")))
    assert [g.pci for g in found.gpus] == ["0000:05:00.0"]
    assert found.warnings[-1].startswith("sysfs shows 1 GPU(s) that KFD does not (0000:15:00.0)")


def test_amd_gpus_that_this_user_may_not_use_are_unusable() -> None:
    files, links = device("0000:05:00.0", "0x1002", driver="amdgpu")
    for opens in (True, False):
        [gpu] = parse(Raw(1, files=files, links=links, values={"openable": {"/dev/kfd": opens}})).gpus
        assert gpu.problem == (None if opens else "this user has no permission to open /dev/kfd")


def test_no_link_up_is_a_warning_not_unknown() -> None:
    [gpu] = host(GREEN[1], tools={XML: output(H200)}).gpus
    dead = replace(gpu, health=replace(gpu.health, links_up=0, links_down=18))
    report = Report("a", Access("a"), HostFacts(gpus=(dead,)))
    [finding] = judge(CheckedCluster((report,), build([report]).cluster), [BY_ID["gpu.fabric"]])
    assert (finding.state, finding.reason.split(":")[0]) == ("warn", "nvidia")
