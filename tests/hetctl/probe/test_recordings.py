"""Recorded outputs and what they mean, without a line of Python for each: tests/facts/README.md.

`REWRITE=1 pytest` writes what is `parsed` today into every case that has such a part: read what it wrote.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetctl.comm.contract.facts import HostFacts, facts_to_data
from hetctl.comm.contract.values import encode
from hetctl.doctor.paths import parse_record, parse_route
from hetctl.probe import parse
from hetctl.probe import remote as program
from hetctl.probe.capture import Recording, write_capture
from hetctl.probe.nics import nics
from hetctl.probe.notes import Notes
from hetctl.probe.port_fabric import REPORTS, fabric_report, parse_pfc, parse_sm_records, parse_sminfo, parse_statistics
from hetctl.probe.raw import Options, Raw, load
from hetctl.probe.vendors import amd_smi, hygon, intel, mthreads, nvidia_smi
from hetctl.probe.wanted import request
from tests.hetctl.probe.recordings import Recorded, lspci, missing, read, recordings
from tests.reference.recordings import projects
from tests.rigs.dress import Costume, dress_host


def matrix(text: str) -> object:
    """The matrix a row a line, columns in the order of their labels."""
    found = nvidia_smi.parse_topology(text)
    rows: dict[str, dict[str, str]] = {}
    for (row, column), (path, lanes) in found.cells.items():
        rows.setdefault(row, {})[column] = f"{path}{lanes or ''}"
    return {
        "cells": {row: " ".join(f"{to}:{cell}" for to, cell in cells.items()) for row, cells in rows.items()},
        "nics": dict(found.nics),
    }


def pairs(text: str) -> object:
    return {f"{a} {b}": kind for (a, b), kind in amd_smi.parse_topology(text).items()}


def raw_of(text: str) -> Raw:
    return load(text.encode())


PARSERS: dict[str, Callable[[str], Any]] = {
    "nvidia-smi": nvidia_smi.parse_xml,
    "nvidia-smi-query": nvidia_smi.parse_query,
    "nvidia-smi-topo": matrix,
    "nvidia-smi-nvlink": nvidia_smi.parse_nvlink,
    "nvidia-smi-list": nvidia_smi.parse_instances,
    "amd-smi-static": amd_smi.parse_static,
    "amd-smi-metric": amd_smi.parse_metric,
    "amd-smi-process": amd_smi.parse_processes,
    "amd-smi-topology": pairs,
    "rocm-smi": amd_smi.parse_rocm_smi,
    "xpu-smi": intel.parse_dump,
    "hy-smi": hygon.parse_smi,
    "mthreads-gmi": mthreads.parse_table,
    "kfd": lambda text: amd_smi.kfd_nodes(raw_of(text)),
    "rdma": lambda text: nics(raw_of(text), Notes()),
    "sminfo": parse_sminfo,
    "saquery": parse_sm_records,
    "saquery-path": parse_record,
    "ibtracert": parse_route,
    "pfc": parse_pfc,
    "ethtool": parse_statistics,
    "ibdiagnet": lambda text: fabric_report(Raw(1, files={REPORTS[0]: text})),
}
NOTHING = "nothing"  # `parsed` of an output that tells nothing
CASES = recordings()


def plain(value: object) -> object:
    """Plain data without what is unknown, so that an expectation says what is known (known to be empty, too)."""
    return bare(json.loads(json.dumps(encode(value))))


def bare(data: Any) -> Any:
    if isinstance(data, dict):
        kept = {k: bare(v) for k, v in data.items()}
        return {k: v for k, v in kept.items() if v is not None and v != {}}
    return [bare(v) for v in data] if isinstance(data, list) else data


@pytest.mark.parametrize("case", [c for c in CASES if c.expected.parsed is not None], ids=lambda case: case.name)
def test_what_the_parser_makes_of_it(case: Recorded) -> None:
    found = plain(PARSERS[case.tool](case.text()))
    if os.environ.get("REWRITE"):
        rewrite(case.folder / "expected.yaml", found)
        case = read(case.folder)
    assert found == (None if case.expected.parsed == NOTHING else case.expected.parsed)


def rewrite(path: Path, parsed: object) -> None:
    """Put `parsed`, the last part of the file, anew."""
    head = re.split(r"^parsed:", path.read_text(), flags=re.MULTILINE)[0]
    part = {"parsed": NOTHING if parsed is None else parsed}
    flow = None if isinstance(parsed, (dict, list)) else False  # `{parsed: nothing}` cannot follow the parts before it
    path.write_text(head + yaml.safe_dump(part, sort_keys=False, width=118, default_flow_style=flow))


@pytest.mark.parametrize("parsed", [None, "a word", 3, [], [{"a": 1}], {"a": {"b": [1, 2]}}])
def test_what_is_rewritten_is_read_again(tmp_path: Path, parsed: object) -> None:
    path = tmp_path / "expected.yaml"
    path.write_text("version: '1'\nparsed: old\n")
    rewrite(path, parsed)
    assert yaml.safe_load(path.read_text()) == {"version": "1", "parsed": NOTHING if parsed is None else parsed}


@pytest.mark.parametrize("case", [c for c in CASES if c.expected.facts or c.expected.says], ids=lambda case: case.name)
def test_what_the_host_is(case: Recorded) -> None:
    assert lacking(parse(case.raw()), case.expected.facts, case.expected.says) == []


NOT_YET = [
    pytest.param(case, wish, marks=pytest.mark.xfail(strict=True, reason=wish.reason), id=f"{case.name}-{number}")
    for case in CASES
    for number, wish in enumerate(case.expected.not_yet)
]


@pytest.mark.parametrize(("case", "wish"), NOT_YET)
def test_what_is_not_read_yet(case: Recorded, wish: Any) -> None:
    assert lacking(parse(case.raw()), wish.facts, wish.says) == []


def lacking(facts: HostFacts, expected: object, says: tuple[str, ...]) -> list[str]:
    """What is expected of a host and not there."""
    data = facts_to_data(facts)
    problems = [gpu["problem"] for gpu in data.get("gpus", ()) if gpu.get("problem")]
    told = "\n".join([*facts.warnings, *facts.vendors.values(), *facts.unknown.values(), *problems])
    unsaid = [f"nothing says {pattern!r} in: {told}" for pattern in says if not re.search(pattern, told)]
    return missing(data, expected) + unsaid


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_recording_says_what_is_expected(case: Recorded) -> None:
    expected = case.expected
    assert expected.parsed is not None or expected.facts or expected.says or expected.not_yet
    assert expected.products
    uuids = re.findall(r"[0-9a-f]{8}-([0-9a-f-]{14})-[0-9a-f]{12}", "".join(case.outputs.values()))
    assert set(uuids) <= {"0000-1111-2222", "2222-3333-4444", "0000-0000-0000"}, "make up the UUIDs of real devices"


def test_a_capture_is_dropped_in(tmp_path: Path) -> None:
    dress = dress_host(tmp_path / "dress", Costume(name="box", vendor="amd", gpus=2, nics=1, tool_delay_s=0))
    raw = load(program.collect(request(Options(root=str(dress.root), path=str(dress.tools)))))
    case = tmp_path / "host" / "two-gpus"
    case.mkdir(parents=True)
    write_capture(case / "capture.tgz", [Recording("box", raw)])
    wanted = {"gpus": {"count": 2, "each": {"name": "AMD Instinct MI325X", "vendor": "amd"}}}
    (case / "expected.yaml").write_text(yaml.safe_dump({**HEAD, "facts": wanted}))
    dropped = read(case)
    assert lacking(parse(dropped.raw()), dropped.expected.facts, ()) == []
    assert lacking(parse(dropped.raw()), {"gpus": {"count": 3}}, ()) == ["facts.gpus: 2 instead of 3"]


HEAD = {"version": "7.0", "products": ["MI325X"], "source": "ours", "licence": "ours", "kept": "whole"}
HEAD["seen"] = "real hardware"


def test_expectations_fail_where_they_should() -> None:
    assert missing({"gpus": [{"a": 1}, {"a": 2}]}, {"gpus": {"count": 3, "each": {"a": 1}}}) == [
        "facts.gpus: 2 instead of 3",
        "facts.gpus[1].a: 2 instead of 1",
    ]
    assert missing({"a": 1024, "b": None}, {"a": "1 KiB", "b": None}) == []
    assert missing({"a": 1024, "b": 0}, {"a": "2 KiB", "b": None}) == [
        "facts.a: 1024 instead of '2 KiB'",
        "facts.b: 0 instead of None",
    ]
    assert missing([1], [1, 2]) == ["facts: [1] instead of [1, 2]"]
    assert missing(0, False) == []


def test_lspci_is_read_as_sysfs() -> None:
    text = (
        "01:00.0 3D controller [0302]: NVIDIA Corporation GA100 [A100] [10de:20b0] (rev a1)\n"
        "\tSubsystem: NVIDIA Corporation Device [10de:134f]\n\tKernel driver in use: nvidia\n"
        "0001:c1:00.0 Processing accelerators [1200]: Huawei Device [19e5:d802]\n"
    )
    assert lspci(text) == {"0000:01:00.0": "0302 10de:20b0 nvidia", "0001:c1:00.0": "1200 19e5:d802"}


def test_every_tool_has_its_generations() -> None:
    counts = {tool: sum(case.tool == tool for case in CASES) for tool in PARSERS}
    least = {"nvidia-smi": 4, "nvidia-smi-topo": 6, "amd-smi-static": 3, "rocm-smi": 3, "kfd": 3, "rdma": 8}
    assert {tool: counts[tool] for tool in least if counts[tool] < least[tool]} == {}


def test_most_were_seen_elsewhere_and_in_many_projects() -> None:
    elsewhere = [case for case in CASES if case.expected.seen == "recorded elsewhere" and projects([case])]
    assert len(elsewhere) >= 100
    assert len(projects(elsewhere)) >= 15


WHOLE_OR_NOTHING = [case for case in CASES if case.tool in ("sminfo", "saquery", "saquery-path", "pfc", "ibtracert")]


@pytest.mark.parametrize("case", WHOLE_OR_NOTHING, ids=lambda case: case.name)
def test_an_output_that_is_cut_off_tells_less_and_nothing_else(case: Recorded) -> None:
    """Any beginning of it: what it tells of a whole output, or what is not known."""
    text, parse = case.text(), PARSERS[case.tool]
    whole = plain(parse(text))
    for end in range(len(text)):
        found = plain(parse(text[:end]))
        if case.tool == "saquery-path":
            assert all(part in (None, of) for part, of in zip(found, whole, strict=True)), text[:end]  # type: ignore[call-overload]
        else:
            assert found in (None, whole) or found == whole[: len(found)], text[:end]  # type: ignore[index, arg-type]
