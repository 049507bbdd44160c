"""Recorded outputs and what they mean: `tests/facts/<tool>/<case>/` holds an output and the expected record.

A new case is a folder with an `output.*` (or `raw.json`); run `REWRITE=1 pytest` on it, and read what it wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.values import encode
from hetctl.probe.nics import nics
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw, load
from hetctl.probe.vendors import amd_smi, hygon, intel, mthreads, nvidia_smi

FACTS = Path(__file__).resolve().parents[2] / "facts"


def matrix(text: str) -> object:
    found = nvidia_smi.parse_topology(text)
    cells = {f"{a} {b}": f"{path}{lanes or ''}" for (a, b), (path, lanes) in found.cells.items()}
    return {"cells": cells, "nics": dict(found.nics)}


def pairs(text: str) -> object:
    return {f"{a} {b}": kind for (a, b), kind in amd_smi.parse_topology(text).items()}


def raw_of(text: str) -> Raw:
    return load(text.encode())


PARSERS: dict[str, Callable[[str], Any]] = {
    "nvidia-smi": nvidia_smi.parse_xml,
    "nvidia-smi-topo": matrix,
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
}
CASES = sorted(path for path in FACTS.glob("*/*") if path.is_dir())


def plain(value: object) -> object:
    """Plain data without what is unknown, so that an expectation says what is known (known to be empty, too)."""
    return bare(json.loads(json.dumps(encode(value))))


def bare(data: Any) -> Any:
    if isinstance(data, dict):
        kept = {k: bare(v) for k, v in data.items()}
        return {k: v for k, v in kept.items() if v is not None and v != {}}
    return [bare(v) for v in data] if isinstance(data, list) else data


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_recording(case: Path) -> None:
    source = next(p for p in case.iterdir() if p.name.startswith(("output.", "raw.")))
    found = plain(PARSERS[case.parent.name](source.read_bytes().decode()))
    expected = case / "expected.json"
    if os.environ.get("REWRITE"):
        expected.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(expected.read_text())


def test_every_tool_has_its_generations() -> None:
    counts = {tool: sum(case.parent.name == tool for case in CASES) for tool in PARSERS}
    least = {"nvidia-smi": 4, "nvidia-smi-topo": 6, "amd-smi-static": 3, "rocm-smi": 3, "kfd": 3, "rdma": 8}
    assert {tool: counts[tool] for tool in least if counts[tool] < least[tool]} == {}
