"""What stands around an RDMA port: its subnet's managers, partitions, flow control, and what its counters did.

What only the management network tells needs /dev/infiniband/umad*, which is root's on most hosts: `unasked` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hetctl.comm.contract.fabric_facts import FabricReport, PortFabric, SubnetManager
from hetctl.comm.contract.facts import NicFacts
from hetctl.probe.raw import Raw, ToolOutput
from hetctl.probe.vendors.base import Tool
from hetctl.probe.words import count, integer, items, key_values, mapping

RDMA = "/sys/class/infiniband/"
PORT_FILES = ("lid_mask_count",)
REPORTS = ("/var/tmp/ibdiagnet2/ibdiagnet2.log", "/var/log/ibdiagnet2/ibdiagnet2.log")
REPORT_LINES = r"-I- .*\s\d+\s+\d+\b|.*[Tt]imestamp"
_OF_PORT = (RDMA + "*/ports/*/link_layer", "InfiniBand")  # words 4 and 6 of such a path are the device and the port
_OF_INTERFACE = (RDMA + "*/device/net/*/type", "1")  # ARPHRD_ETHER; word 7 is an Ethernet interface
TOOLS = {
    "sminfo": Tool(("sminfo", "-C", "{4}", "-P", "{6}"), each=_OF_PORT),
    "saquery": Tool(("saquery", "-C", "{4}", "-P", "{6}", "SMIR"), each=_OF_PORT, keep="dump|LID|GUID|Prio|State"),
    "dcb": Tool(("dcb", "pfc", "show", "dev", "{7}"), each=_OF_INTERFACE),
    "mlnx_qos": Tool(("mlnx_qos", "-i", "{7}"), each=_OF_INTERFACE, instead_of="dcb", keep="^PFC|priority|enabled"),
}
COUNTING_TOOLS = {"ethtool": Tool(("ethtool", "-S", "{7}"), each=_OF_INTERFACE, keep="pause|pfc|discard|xoff")}
_STATES = ("not active", "discovering", "standby", "master")


Devinfo = Mapping[tuple[str, int], Mapping[str, str]]  # (device, port) -> what `ibv_devinfo` says of it


def with_fabric(raw: Raw, nic: NicFacts, devinfo: Devinfo) -> NicFacts:
    """An RDMA port with its fabric, and with its interface's pauses and discards among what grew."""
    if not nic.rdma_device:
        return nic
    base = f"{RDMA}{nic.rdma_device}/ports/{nic.rdma_port}"
    said = devinfo.get((nic.rdma_device, nic.rdma_port or 0), {})
    fabric = PortFabric(enabled_mtu=mtu_in(said, "max_mtu"), watched_s=_seconds(raw.values.get("counters_s")))
    if nic.link_layer == "infiniband":
        lmc = integer(raw.text(base + "/lid_mask_count"))
        lmc = integer(said.get("port_lmc")) if lmc is None else lmc
        managers, why = _managers(raw, f"{nic.rdma_device} {nic.rdma_port}")
        fabric = replace(fabric, lmc=lmc, pkeys=parse_pkeys(raw, base), managers=managers, unasked=why)
        return replace(nic, fabric=fabric)
    grown, totals, unasked = _of_interfaces(raw, nic)
    pfc, no_pfc = _flow_control(raw, nic)
    fabric = replace(fabric, pfc=pfc, unasked={**unasked, **no_pfc})
    return replace(nic, fabric=fabric, growing={**nic.growing, **grown}, counters={**nic.counters, **totals})


def mtu_in(said: Mapping[str, str], name: str) -> int | None:
    """Bytes of `4096 (5)`, as `ibv_devinfo` writes an MTU."""
    return count(said.get(name, "").partition("(")[0]) or None


def parse_pkeys(raw: Raw, base: str) -> tuple[int, ...] | None:
    """The partition table by index; the probe leaves empty entries out."""
    found = {}
    for path, text in raw.files.items():
        folder, _, index = path.rpartition("/")
        key = integer(text.strip()) if folder == base + "/pkeys" and index.isdecimal() else None
        if key is not None and 0 < key < 0x10000 and len(index) < 5:
            found[int(index)] = key
    return tuple(found.get(i, 0) for i in range(max(found) + 1)) if found else None


def parse_sminfo(text: str) -> SubnetManager | None:
    """`sminfo: sm lid 1 sm guid 0x2c90..., activity count 506 priority 14 state 3 SMINFO_MASTER`; once on two lines."""
    match = re.search(
        r"sm lid (\d{1,5}) sm guid (0x[0-9a-fA-F]{1,16}),.*?priority (\d{1,2}),?\s+state (\d)", text, re.DOTALL
    )
    return _manager(match[1], match[2], match[3], match[4]) if match else None


def parse_sm_records(text: str) -> tuple[SubnetManager, ...]:
    """The SMInfoRecords of `saquery SMIR`: a line `Name......value` for each field."""
    found = []
    for block in text.split("SMInfoRecord dump:")[1:]:
        fields = dict(re.findall(r"^\s*(\w+)\.{2,}\s*(\S+)", block, re.MULTILINE))
        found.append(_manager(*(fields.get(name) for name in ("LID", "GUID", "Priority", "SMState"))))
    return tuple(one for one in found if one)


def parse_pfc(text: str) -> tuple[int, ...] | None:
    """Priorities that are on: `prio-pfc 0:off ... 3:on` of dcb, the row `enabled 0 0 0 1 ...` of mlnx_qos."""
    pairs = re.search(r"prio-pfc((?: +\d:(?:on|off)\b){8})", text)
    if pairs:
        return tuple(int(word[0]) for word in pairs[1].split() if word.endswith(":on"))
    row = re.search(r"^\s*enabled:?((?:\s+[01]){8})\s*$", text, re.MULTILINE)
    return tuple(i for i, word in enumerate(row[1].split()) if word == "1") if row else None


def parse_statistics(text: str) -> dict[str, int]:
    """`name: value` lines of `ethtool -S`."""
    values = {name: count(value) for name, value in key_values(text).items()}
    return {name: value for name, value in values.items() if value is not None}


def fabric_report(raw: Raw) -> FabricReport | None:
    """The table of stages at the end of an ibdiagnet2.log: `-I- Links Check   0   0`."""
    for path in REPORTS:
        text = raw.files.get(path, "")
        rows = re.findall(r"^-I- (\S.*?)\s{2,}(\d{1,9})\s+(\d{1,9})\b", text, re.MULTILINE)
        if rows:
            when = re.search(r"[Tt]imestamp\W*(\d.{8,40})", text)
            return FabricReport(path, when[1].strip() if when else None, {n: (int(w), int(e)) for n, w, e in rows})
    return None


# --- who was asked -------------------------------------------------------------------------------------------------


def _managers(raw: Raw, port: str) -> tuple[tuple[SubnetManager, ...] | None, dict[str, str]]:
    """All managers where the subnet's administration answers, else the one that the port itself knows."""
    answers = raw.tool(f"saquery {port}"), raw.tool(f"sminfo {port}")
    one = parse_sminfo(answers[1].stdout)
    found = parse_sm_records(answers[0].stdout) or ((one,) if one else ())
    return (found, {}) if found else (None, _reason("managers", _why_not(raw, answers[1], "sminfo")))


def _manager(lid: str | None, guid: str | None, priority: str | None, state: str | None) -> SubnetManager | None:
    number, code = count(lid), count(state)
    if number is None or code is None or code >= len(_STATES):
        return None  # a record that is cut off says less than it seems to
    value = integer(guid)
    return SubnetManager(number, None if value is None else f"0x{value:016x}", count(priority), _STATES[code])


def _reason(what: str, why: str) -> dict[str, str]:
    return {} if why.endswith("not run") else {what: why}


def _why_not(raw: Raw, output: ToolOutput, name: str) -> str:
    if output.problem:
        return f"{name} is {output.problem}" if output.problem.startswith("not ") else f"{name} {output.problem}"
    files = {f: ours for f, ours in mapping(raw.values.get("openable")).items() if "/umad" in str(f)}
    if not files:
        return f"{name}: there is no /dev/infiniband/umad* here"
    refused = re.search(r"ermission|open UMAD port|umad_open_port", output.stderr)  # sminfo does not say why
    if refused or not any(files.values()):
        return f"{name} needs permission for /dev/infiniband/umad*"
    return f"{name} gave no answer: {' '.join(output.stderr.split())[-160:] or f'exit code {output.exit_code}'}"


def _interfaces(raw: Raw, nic: NicFacts) -> tuple[str, ...]:
    """The interfaces of a port that tools are asked about: its own, and below a bond all of its function."""
    names = raw.children(f"{RDMA}{nic.rdma_device}/device/net")
    return (nic.netdev,) if nic.netdev in names else names


def _flow_control(raw: Raw, nic: NicFacts) -> tuple[tuple[int, ...] | None, dict[str, str]]:
    for name in _interfaces(raw, nic):
        for tool in ("dcb", "mlnx_qos"):
            found = parse_pfc(raw.tool(f"{tool} {name}").stdout)
            if found is not None:
                return found, {}
    asked = raw.tool(f"dcb {next(iter(_interfaces(raw, nic)), '')}")
    said = "not supported" if "not supported" in asked.stderr else f"exit code {asked.exit_code}"
    return None, _reason("pfc", f"dcb is {asked.problem}" if asked.problem else f"dcb: {said}")


def _of_interfaces(raw: Raw, nic: NicFacts) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    """(what grew, totals, why there is nothing) of the interfaces' own statistics, read twice."""
    pairs = mapping(raw.values.get("counters"))
    grown, totals = dict[str, int](), dict[str, int]()
    for name in _interfaces(raw, nic):
        texts = [t for t in items(pairs.get(f"ethtool {name}")) if isinstance(t, str)]
        if len(texts) == 2:
            before, after = map(parse_statistics, texts)
            for key, value in after.items():
                totals[key] = totals.get(key, 0) + value
                grown[key] = grown.get(key, 0) + max(0, value - before.get(key, value))
    unasked = {"pauses": "ethtool -S shows no pauses"} if pairs and not totals else {}
    return {k: v for k, v in grown.items() if v}, totals, unasked


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 < value < 3600 else None
