"""Every recording under tests/facts survives a capture, and means the same when it is read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.errors import Undetermined
from hetctl.comm.contract.values import encode
from hetctl.probe import Raw, parse
from hetctl.probe.capture import Recording, read_capture, write_capture
from hetctl.probe.masking import CaptureMasker, Masker, ReportMasker
from hetctl.probe.raw import SCHEMA, ToolOutput, load
from hetctl.probe.vendors import nvidia_smi
from tests.hetctl.probe.recordings import TOOLS, Recorded, recordings
from tests.hetctl.probe.test_recordings import PARSERS, plain
from tests.hetctl.probe.test_vendors import recorded

CASES = recordings()
IDENTITIES = ("uuid", "serial", "unique_id", "mac", "guid", "gid", "ip", "subnet_prefix", "machine_id", "boot_id")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_recording_survives_a_capture(tmp_path: Path, case: Recorded) -> None:
    """The host is the same, and so is what the tool's own parser makes of what it printed."""
    raw = case.raw()
    again = captured(tmp_path, raw)
    assert differing(encode(parse(raw)), encode(parse(again))) == []
    for name, output in raw.tools.items():
        masked = again.tool(name).stdout
        assert len(masked.splitlines()) == len(output.stdout.splitlines())
        if name == TOOLS.get(case.tool, case.tool) and case.tool in PARSERS:
            assert differing(meaning(case.tool, output.stdout), meaning(case.tool, masked)) == []


def meaning(tool: str, text: str) -> Any:
    """What the tool's parser makes of an output, or what it says of one that it cannot read."""
    try:
        return plain(PARSERS[tool](text))
    except Undetermined as error:
        return error.message


def captured(folder: Path, raw: Raw) -> Raw:
    """The raw material after it was written, masked, and read again."""
    write_capture(folder / "out.tgz", [Recording("a-host-of-somebody", raw)], salt=b"fixed")
    [again] = read_capture(folder / "out.tgz")
    assert again.raw is not None
    return again.raw


def differing(before: Any, after: Any, key: str = "", masks: dict[str, str] | None = None) -> list[str]:
    """Where two records differ in more than identities, each of which must have one mask of its own."""
    masks = {} if masks is None else masks
    if isinstance(before, dict) and isinstance(after, dict) and key not in ("sources", "unknown"):
        if len(before) != len(after):
            return [f"{key}: {before} and {after}"]
        pairs = zip(before.items(), after.items(), strict=True)
        return [
            d for (k, v), (j, w) in pairs for d in differing(k, j, _kind(k), masks) + differing(v, w, str(k), masks)
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [d for v, w in zip(before, after, strict=True) for d in differing(v, w, key, masks)]
    if key in IDENTITIES and isinstance(before, str) and isinstance(after, str):
        same = masks.setdefault(before, after) == after and list(masks.values()).count(after) == 1
        return [] if same else [f"{key}: {before} has the masks {masks[before]} and {after}"]
    return [] if before == after or "/home/" in str(before) else [f"{key}: {before!r} became {after!r}"]


def _kind(key: str) -> str:
    return "uuid" if key.startswith("GPU-") else ""


def test_the_comparison_can_fail() -> None:
    assert differing({"serial": "a", "n": 1}, {"serial": "b", "n": 1}) == []
    assert differing({"n": 1}, {"n": 2}) == ["n: 1 became 2"]
    assert differing([{"serial": "a"}, {"serial": "c"}], [{"serial": "b"}, {"serial": "b"}]) != []
    assert differing([{"serial": "a"}, {"serial": "a"}], [{"serial": "b"}, {"serial": "d"}]) != []


# Firmware of cards that others published: GTX 1660 Ti (CPU-X#115), GTX 1080 (a0s/nvidia-smi-exporter#1), GeForce 410M
# (1Panel#9504); the last of a Broadcom NIC, which is a valid address.
VERSIONS = ("90.02.17.00.42", "90.02.17.00", "86.04.60.00.BD", "75.19.11.00.0F", "94.10.12.44.AB", "229.2.52.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_of_firmware_are_no_addresses(tmp_path: Path, version: str) -> None:
    xml = recorded("nvidia-smi/r570-h200/output.xml").replace("96.00.BC.00.02", version)
    assert version in xml
    files = {"/sys/class/infiniband/mlx5_0/fw_ver": version, "/sys/module/bnxt_en/version": f"1.10.3-{version}"}
    tools = {"nvidia-smi -q -x": xml, "ibv_devinfo": f"hca_id: mlx5_0\n\tfw_ver:\t\t\t\t{version}\n"}
    outputs = {name: ToolOutput(exit_code=0, stdout=text) for name, text in tools.items()}
    raw = Raw(SCHEMA, files={**files, "/proc/net/route": "10.20.30.40"}, tools=outputs)
    again = captured(tmp_path, raw)
    assert nvidia_smi.parse_xml(again.tool("nvidia-smi -q -x").stdout).gpus[0].firmware == version
    assert [again.files[path] for path in files] == list(files.values())
    assert version in again.tool("ibv_devinfo").stdout
    assert again.files["/proc/net/route"] != "10.20.30.40"


@pytest.mark.parametrize("masker", [CaptureMasker([], b"fixed"), ReportMasker()])
def test_both_masks_learn_versions_the_same_way(masker: Masker) -> None:
    masker.learn_texts([("tool", "Firmware version: 229.2.52.0\n")])
    masker.learn_facts({"nics": [{"firmware": "14.3.2.1/pkg 218.0.1.2", "addresses": [{"ip": "218.0.1.2"}]}]})
    assert masker.text("229.2.52.0 and 14.3.2.1") == "229.2.52.0 and 14.3.2.1"
    assert masker.text("218.0.1.2") != "218.0.1.2", "it is an address here as well"


@pytest.mark.parametrize("word", ["[Unknown Error]", "GPU requires reset", "[Insufficient Permissions]", "N/A", "0000"])
def test_what_stands_for_no_serial_number_is_learned_by_no_masker(word: str) -> None:
    text = recorded("nvidia-smi/r570-h200/output.xml")
    begin = text.index("<serial>") + len("<serial>")
    text = text[:begin] + word + text[text.index("</serial>") :] + f"\n{word}"
    for masker in (CaptureMasker([], b"fixed"), ReportMasker()):
        masker.learn_texts([("tool", text)])
        assert masker.text(word) == word


@pytest.mark.parametrize("unique", [0xABC000004, 0x3F1ABDD0CAEE7370])
def test_a_unique_id_has_one_mask_however_it_is_written(unique: int) -> None:
    """rocm-smi leaves out leading zeros, sysfs writes them, KFD writes decimals."""
    masker = CaptureMasker([], b"fixed")
    masker.learn_facts({"gpus": [{"uuid": f"GPU-{unique:016x}"}]})
    masker.learn_texts([("rocm-smi", f'"Unique ID": "{unique:#x}"'), ("properties", f"unique_id {unique}\n")])
    short, long, decimal = (masker.text(word) for word in (f"{unique:#x}", f"{unique:016x}", f"{unique}"))
    assert int(short, 16) == int(long, 16) == int(decimal) != unique


def test_serials_that_only_a_table_shows_are_hidden(tmp_path: Path) -> None:
    """xpu-smi prints columns: nothing beside a value says what it is, but discovery knows."""
    raw = load(recorded("rdma/mlx5-infiniband/raw.json").encode())
    card = "/sys/bus/pci/devices/0000:29:00.0"
    files = {f"{card}/vendor": "0x8086", f"{card}/class": "0x038000"}
    links = {card: "/sys/devices/pci0000:29/0000:29:00.0", f"{card}/driver": "/sys/bus/pci/drivers/xe"}
    tools = {"xpu-smi discovery": ToolOutput(exit_code=0, stdout=recorded("xpu-smi/v1.2-two-max-1100/output.csv"))}
    whole = replace(raw, files={**raw.files, **files}, links={**raw.links, **links}, tools=tools)
    serial = parse(whole).gpus[0].serial
    assert serial
    assert serial not in captured(tmp_path, whole).tool("xpu-smi discovery").stdout
