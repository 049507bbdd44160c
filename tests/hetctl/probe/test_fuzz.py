"""Any input gives a record or a HetctlError, and what is absent never becomes zero."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hetctl.comm.contract.errors import HetctlError
from hetctl.comm.contract.facts import HostFacts, facts_from_data, facts_to_data
from hetctl.probe import extract, parse
from hetctl.probe.nics import parse_ibv_ports, parse_if_inet6, parse_ip_json, parse_ip_text, parse_rate
from hetctl.probe.raw import BEGIN, END, Raw, ToolOutput, load
from hetctl.probe.rdma import parse_fi_info, parse_ldconfig
from hetctl.probe.software import parse_header, parse_torch_version
from hetctl.probe.vendors import amd_smi, hygon, intel, mthreads, nvidia_smi
from hetctl.probe.words import gt_per_s, integer, json_documents, node, number, pci_address, size, told

FACTS = Path(__file__).resolve().parents[2] / "facts"
ABSENT = ["N/A", "[N/A]", "[Not Supported]", "[Insufficient Permissions]", "[Unknown Error]", "", "None", "unknown"]
ABSENT += ["Requested functionality has been deprecated", "[GPU access blocked by the operating system]"]

TEXT_PARSERS: list[Callable[[str], Any]] = [
    nvidia_smi.parse_xml,
    nvidia_smi.parse_topology,
    nvidia_smi.parse_nvlink,
    nvidia_smi.parse_instances,
    nvidia_smi.parse_compute_capabilities,
    amd_smi.parse_static,
    amd_smi.parse_metric,
    amd_smi.parse_processes,
    amd_smi.parse_topology,
    amd_smi.parse_rocm_smi,
    amd_smi.parse_ras,
    intel.parse_dump,
    hygon.parse_smi,
    mthreads.parse_table,
    parse_ibv_ports,
    parse_if_inet6,
    parse_ip_json,
    parse_ip_text,
    parse_rate,
    parse_ldconfig,
    parse_fi_info,
    parse_header,
    parse_torch_version,
    json_documents,
    lambda text: extract(text.encode("utf-8", "replace")),
    lambda text: extract(BEGIN + text.encode("utf-8", "replace") + END),
]
SEEDS = [
    *sorted(p.read_bytes().decode() for p in FACTS.glob("*/*/output.*")),
    "GPU 0: NVIDIA A100 (UUID: GPU-a)\n  MIG 3g.40gb     Device  0: (UUID: MIG-b)\n\t Link 0: <inactive>\n",
    "GPU-11111111-2222-3333-4444-555555555555, 9.0\n",
    "hca_id:\tmlx5_0\n\t\tport:\t1\n\t\t\tactive_mtu:\t\t4096 (5)\n",
    "fe800000000000000a3f72fffe010203 02 40 20 80 eth0\n",
    "2: eth0    inet 10.0.0.1/24 brd 10.0.0.255 scope global eth0\n",
    '[{"ifname": "eth0", "addr_info": [{"local": "10.0.0.1", "prefixlen": 24, "scope": "global"}]}]',
    "\tlibibverbs.so.1 (libc6,x86-64) => /lib/libibverbs.so.1.14.39\n",
    "__version__ = '2.11.0'\ncuda: Optional[str] = '12.8'\n#define NCCL_MAJOR 2\nue: 0\nce: 3\n",
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(ABSENT)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner))


@st.composite
def mutated(draw: st.DrawFn, seeds: list[str] = SEEDS) -> str:
    """A recorded output with pieces cut out, doubled, or replaced by noise."""
    text = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 60)))
        noise = draw(
            st.sampled_from(["", "<", ">", "-1", "9" * 30, "\x00", "é", "{", "NaN", "1e999", *ABSENT]) | st.text()
        )
        text = text[:start] + noise + text[draw(st.sampled_from([start, end])) :]
    return text


@given(text=st.text() | mutated())
@example(text="<nvidia_smi_log><gpu/></nvidia_smi_log>")
@example(text='<!DOCTYPE a [<!ENTITY b "c">]><nvidia_smi_log>&b;</nvidia_smi_log>')
@example(text="[" * 5000)
@example(text='[{"gpu": ' + "9" * 5000 + "}]")
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_text_is_a_record_or_a_named_error(text: str) -> None:
    for parser in TEXT_PARSERS:
        with suppress(HetctlError):
            parser(text)


@given(value=JSON)
@settings(max_examples=50, deadline=None)
def test_any_json_is_a_record_or_a_named_error(value: object) -> None:
    for document in (value, [{"gpu": 0, "bus": value, "ecc": value}], {"gpu_data": [value]}, {"card0": value}):
        text = json.dumps(document)
        for parser in TEXT_PARSERS[5:10]:
            with suppress(HetctlError):
                parser(text)


RAW_SEEDS = [json.loads(path.read_text()) for path in sorted(FACTS.glob("*/*/raw.json"))]
TOOLS = [
    *("nvidia-smi -q -x", "nvidia-smi topo -m", "nvidia-smi nvlink -s", "nvidia-smi -L", "nvidia-smi --query-gpu"),
    *(
        "amd-smi static",
        "amd-smi metric",
        "amd-smi process",
        "amd-smi topology",
        "rocm-smi",
        "xpu-smi discovery",
        "ip",
        "ip text",
    ),
    *("ibv_devinfo", "ldconfig", "docker"),
]
PATHS = [
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/modules", "/proc/uptime", "/proc/swaps", "/etc/os-release"),
    *("/proc/driver/nvidia/version", "/proc/driver/nvidia/gpus/0000:3b:00.0/information", "/sys/module/amdgpu/version"),
    *("/sys/bus/pci/devices/0000:3b:00.0/vendor", "/sys/bus/pci/devices/0000:3b:00.0/class", "/proc/net/if_inet6"),
    *("/sys/bus/pci/devices/0000:3b:00.0/numa_node", "/sys/bus/pci/devices/0000:3b:00.0/current_link_width"),
    *("/sys/class/kfd/kfd/topology/nodes/3/properties", "/sys/class/net/eth0/mtu", "/sys/class/net/eth0/flags"),
    *("/sys/class/infiniband/m/ports/1/gids/0", "/sys/class/infiniband/m/ports/1/rate", "/proc/sys/kernel/osrelease"),
    *("/sys/devices/system/node/node0/meminfo", "/sys/class/infiniband/m/ports/1/state", "/dev/null"),
]


@st.composite
def raws(draw: st.DrawFn) -> Raw:
    """Raw material of the right types and any content, often beginning from a recording."""
    data = dict(draw(st.sampled_from([{"schema": 1}, *RAW_SEEDS])))
    noise = (
        st.text(max_size=60)
        | mutated()
        | st.sampled_from(["0x10de", "0x1002", "0x8086", "0x030200", "-1", "4294967295"])
    )
    data["files"] = {**data.get("files", {}), **draw(st.dictionaries(st.sampled_from(PATHS), noise, max_size=6))}
    outputs = st.builds(
        ToolOutput, exit_code=st.sampled_from([0, 1, None]), stdout=mutated(), stderr=st.text(max_size=9)
    )
    tools = draw(st.dictionaries(st.sampled_from(TOOLS), outputs, max_size=5))
    values = draw(
        st.dictionaries(st.sampled_from(["limits", "shm", "environment", "openable", "clock_s", "user"]), JSON)
    )
    names = st.sampled_from(["eth0", "lo", "m", "1", "0", "²", "9" * 30, "\ud800"])
    folders = st.sampled_from(["/sys/class/net", "/sys/class/infiniband", "/sys/class/infiniband/m/ports"])
    lists = {**data.get("listings", {}), **draw(st.dictionaries(folders, st.lists(names, max_size=3)))}
    links = {**data.get("links", {}), **draw(st.dictionaries(st.sampled_from(PATHS), st.text(max_size=30), max_size=3))}
    pythons = draw(
        st.lists(st.dictionaries(st.sampled_from(["path", "packages", "files", "libraries"]), JSON), max_size=2)
    )
    return Raw(
        1,
        files=data["files"],
        links=links,
        listings={k: tuple(v) for k, v in lists.items()},
        tools=tools,
        values=values,
        interpreters=tuple(pythons),
    )


@given(raw=raws())
@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
def test_any_raw_material_gives_facts(raw: Raw) -> None:
    facts = parse(raw)
    again = facts_from_data(json.loads(json.dumps(facts_to_data(facts))), where="facts")
    assert again == facts
    assert len({g.id for g in facts.gpus}) == len(facts.gpus)
    assert len({n.name for n in facts.nics}) == len(facts.nics)
    known = {g.id for g in facts.gpus} | {n.name for n in facts.nics}
    assert all(reach.to in known for g in facts.gpus for reach in (*g.gpus, *g.nics))


@pytest.mark.parametrize("absent", ABSENT)
def test_absent_is_never_zero(absent: str) -> None:
    """Every number of a recorded GPU replaced by a way of saying nothing: nothing is what must come out."""
    text = (FACTS / "nvidia-smi/r570-h200/output.xml").read_text()
    numberless = re.sub(r">[^<>]*\d[^<>]*<", f">{absent}<", text)
    (gpu,) = nvidia_smi.parse_xml(numberless.replace("<gpu id=", '<gpu gone="" id=')).gpus
    assert zeros(facts_to_data(HostFacts(gpus=(gpu,)))["gpus"][0]) == ["index"]
    for parser in (told, size, node, pci_address, gt_per_s, integer, number):
        assert parser(absent) is None
    for case in ("amd-smi-static/rocm7.0-gpu-data-after-warning", "amd-smi-metric/rocm7.0-gpu-data"):
        text = (FACTS / case / "output.json").read_text()
        numberless = re.sub(r'(": )(?:"[^"]*\d[^"]*"|\d+)', rf'\1"{absent}"', text)
        parser_ = amd_smi.parse_static if "static" in case else amd_smi.parse_metric
        (record,) = parser_(numberless)
        assert zeros(json.loads(json.dumps(record, default=vars))) == ["index"]


def zeros(data: Any, name: str = "") -> list[str]:
    """The names of all numbers that are zero."""
    if isinstance(data, dict):
        return [z for key, value in data.items() for z in zeros(value, key)]
    if isinstance(data, list):
        return [z for value in data for z in zeros(value, name)]
    return [name] if data == 0 and not isinstance(data, bool) and data is not None else []


@pytest.mark.parametrize("raw", RAW_SEEDS, ids=range(len(RAW_SEEDS)))
def test_recorded_hosts_give_facts(raw: dict[str, Any]) -> None:
    assert parse(load(json.dumps(raw).encode())).vendors["nvidia"] == "absent"
