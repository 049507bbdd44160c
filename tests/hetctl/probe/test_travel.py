"""The program as it travels: it runs on a dressed machine, and hostile or broken answers are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetctl.comm.contract.errors import HetctlError, Undetermined
from hetctl.comm.contract.facts import HostFacts, facts_from_data, facts_to_data
from hetctl.probe import Options, Raw, extract, parse, program
from hetctl.probe.raw import BEGIN, END, MAX_STDOUT_BYTES, printable
from hetctl.probe.vendors import VENDORS
from tests.rigs.dress import Costume, dress_host, tool

NONE = {vendor.name: "absent" for vendor in VENDORS}
RAW = b'{"schema": 1, "python": "3.11.7"}'


def probe(options: Options, *, python: str = sys.executable) -> Raw:
    done = subprocess.run([python, "-I", "-S", "-"], input=program(options), capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr.decode()
    return extract(done.stdout)


def dressed(folder: Path, costume: Costume) -> HostFacts:
    dress = dress_host(folder, costume)
    return parse(probe(Options(root=str(dress.root), path=str(dress.tools))))


def test_a_dressed_nvidia_host(tmp_path: Path) -> None:
    facts = dressed(tmp_path, Costume(name="h200-7", number=7, tool_delay_s=0))
    assert facts.system.hostname == "h200-7"
    assert facts.vendors == {**NONE, "nvidia": "present"}
    assert [g.id for g in facts.gpus] == [f"nvidia:{i}" for i in range(8)]
    first = facts.gpus[0]
    assert (first.name, first.architecture, first.memory_total_bytes) == ("NVIDIA H200", "sm_90", 143771 * 2**20)
    assert (first.pci, first.numa_node, first.pcie.width) == ("0000:13:00.0", 0, 16)
    assert first.driver == "570.124.06"
    assert [(r.to, r.path, r.lanes) for r in first.gpus[:2]] == [("nvidia:1", "nvlink", 18), ("nvidia:2", "nvlink", 18)]
    assert [(r.to, r.path) for r in first.nics[:2]] == [("ib0", "pix"), ("ib1", "node")]
    nic = facts.nics[0]
    assert (nic.name, nic.rdma_device, nic.link_layer, nic.state) == ("ib0", "mlx5_0", "infiniband", "active")
    assert (nic.rate_bytes_per_s, nic.sm_lid, nic.subnet_prefix) == (50e9, 1, "fe80:0000:0000:0000")
    assert facts.rdma.dma_buf is True
    assert facts.rdma.peer_memory_modules == ("nvidia_peermem",)
    assert facts.sources["gpus[*].numa_node"] == "sysfs"


def test_a_dressed_amd_host(tmp_path: Path) -> None:
    costume = Costume(
        name="mi", number=3, vendor="amd", fabric="roce", nic_driver="bnxt_en", down=frozenset({2}), tool_delay_s=0
    )
    facts = dressed(tmp_path, costume)
    assert facts.vendors == {**NONE, "amd": "present"}
    first = facts.gpus[0]
    assert (first.name, first.architecture, first.uuid) == ("AMD Instinct MI325X", "gfx942", "GPU-a000000000000301")
    assert first.memory_total_bytes == 274861129728
    assert first.partition.mode == "spx"
    assert {r.path for r in first.gpus} == {"xgmi"}
    up, down = facts.nics[1], facts.nics[2]
    assert (up.rdma_device, up.link_layer, up.driver) == ("bnxt_re1", "ethernet", "bnxt_en")
    assert [(g.index, g.type, g.ipv4) for g in up.gids if g.routable] == [(3, "roce_v2", "10.1.0.4")]
    assert [a.ip for a in up.addresses] == ["10.1.0.4"]
    assert (down.state, down.rate_bytes_per_s) == ("down", None)
    assert facts.why_unknown("nics[2].rate_bytes_per_s") == "the port is down"


def test_facts_survive_a_file(tmp_path: Path) -> None:
    facts = dressed(tmp_path, Costume(gpus=2, nics=1, tool_delay_s=0))
    assert facts_from_data(json.loads(json.dumps(facts_to_data(facts))), where="t") == facts


def test_tools_run_side_by_side(tmp_path: Path) -> None:
    dress = dress_host(tmp_path, Costume(gpus=1, nics=0, tool_delay_s=1.5))
    raw = probe(Options(root=str(dress.root), path=str(dress.tools)))
    one_after_another = sum(t.seconds for t in raw.tools.values())
    assert one_after_another > 7.0  # five answers of nvidia-smi, long enough to outweigh a busy machine's starts
    assert raw.values["probe_seconds"] < 0.75 * one_after_another


def test_a_wedged_tool_costs_its_deadline_only(tmp_path: Path) -> None:
    dress = dress_host(tmp_path, Costume(gpus=1, nics=0, tool_delay_s=0))
    path = dress.tools / "nvidia-smi"
    path.write_text("#!/bin/sh\nPATH=/usr/bin:/bin\nsleep 60 &\necho $! >> " + str(tmp_path / "pids") + "\nwait\n")
    raw = probe(Options(root=str(dress.root), path=str(dress.tools), tool_timeout_s=0.5))
    assert raw.tool("nvidia-smi -q -x").problem == "timed out after 0.5 s"
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert gone(pid, within_s=30)  # a killed process ends when it is next run; this one would have slept for 60 s
    facts = parse(raw)
    gpu = facts.gpus[0]
    assert (gpu.name, gpu.memory_total_bytes) == ("NVIDIA H200", None)  # procfs still tells the name
    assert "nvidia-smi gave no answer: timed out after 0.5 s" in facts.warnings
    assert facts.why_unknown("gpus[0].memory_total_bytes")


def gone(pid: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_a_tool_that_floods(tmp_path: Path) -> None:
    dress = dress_host(tmp_path, Costume(gpus=1, nics=0, tool_delay_s=0))
    (dress.tools / "ip").write_text("#!/bin/sh\nPATH=/usr/bin:/bin\nyes flood\n")
    raw = probe(Options(root=str(dress.root), path=str(dress.tools)))
    assert raw.tool("ip").problem.startswith("printed more than")
    assert len(raw.tool("ip").stdout) <= 2 * 2**20


def test_the_document_keeps_its_size(tmp_path: Path) -> None:
    dress = dress_host(tmp_path, Costume(gpus=8, nics=0, tool_delay_s=0))
    raw = probe(Options(root=str(dress.root), path=str(dress.tools), max_bytes=30000))
    assert raw.tool("nvidia-smi -q -x").problem == "its output was too large for the answer"
    assert parse(raw).gpus[0].name == "NVIDIA H200"


def test_older_tool_replaces_the_one_that_fails(tmp_path: Path) -> None:
    dress = dress_host(tmp_path, Costume(vendor="amd", gpus=1, nics=0, tool_delay_s=0))
    (dress.tools / "amd-smi").write_text("#!/bin/sh\nexit 1\n")
    card = {"card0": {"PCI Bus": "0000:13:00.0", "Card Series": "AMD Instinct MI325X"}}
    words = " ".join(probe(Options(root=str(dress.root), path="/nowhere")).tool("rocm-smi").argv[1:])
    tool(dress.tools, "rocm-smi", {words: json.dumps(card)}, delay_s=0)
    facts = parse(probe(Options(root=str(dress.root), path=str(dress.tools))))
    assert facts.gpus[0].name == "AMD Instinct MI325X"
    assert facts.sources["gpus[0].name"] == "rocm-smi"


def test_no_secret_leaves_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_TOKEN", "hunter2")
    monkeypatch.setenv("MY_THING", "yes")
    monkeypatch.setenv("UNRELATED", "no")
    raw = probe(Options(root=str(tmp_path), path="/nowhere", environment=("MY_THING",)))
    assert raw.values["environment"].items() >= {"NCCL_DEBUG": "INFO", "MY_THING": "yes"}.items()
    assert "hunter2" not in json.dumps(dict(raw.values))
    assert "UNRELATED" not in raw.values["environment"]


def test_interpreters_are_described_without_importing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    lines = "__version__ = '2.11.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    (site / "torch" / "version.py").write_text(lines)
    (site / "nvidia_nccl_cu12-2.27.5.dist-info").mkdir()
    (site / "safetensors-0.5.3.dist-info").mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "broken").write_text("#!/bin/sh\necho no such thing >&2; exit 3\n")
    (tmp_path / "broken").chmod(0o755)
    missing, broken = str(tmp_path / "missing"), str(tmp_path / "broken")
    facts = parse(probe(Options(root=str(tmp_path), interpreters=(str(python), missing, broken))))
    found = {i.path: i for i in facts.interpreters}
    ours = found[str(python)]
    assert (ours.torch, ours.cuda, ours.hip, ours.nccl) == ("2.11.0+cu128", "12.8", None, "2.27.5")
    assert ours.packages["safetensors"] == "0.5.3"
    assert found[missing].problem == "not installed"
    assert "no such thing" in (found[broken].problem or "")


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.8", "3.13"])
def test_other_pythons(version: str, tmp_path: Path) -> None:
    roots = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    pythons = sorted(roots.glob(f"{version}.*/bin/python"))
    if not pythons:
        pytest.skip(f"no Python {version} here")
    options = Options(root=str(tmp_path), path="/nowhere")
    done = subprocess.run([pythons[0], "-"], input=program(options), capture_output=True, timeout=400)
    if version in ("2.7", "3.6"):
        with pytest.raises(Undetermined, match=rf"Python {version}\.\d+ on the host is too old"):
            extract(done.stdout)
        assert done.returncode == 3
    else:
        assert parse(extract(done.stdout)).gpus == ()


def test_banners_around_the_answer() -> None:
    assert extract(b"Welcome!\r\n\x1b[31m" + BEGIN + RAW + END + b"\nbye").python == "3.11.7"


def test_a_quoted_marker_in_a_banner() -> None:
    assert extract(BEGIN + b"{}" + END + b"\n" + BEGIN + RAW + END).python == "3.11.7"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "nothing"),
        (b"sh: python3: not found\n", "not found"),
        (b"\x1b]0;evil\x07\x1b[2Jboom", "boom"),
        (BEGIN + RAW, "cut off"),
        (BEGIN + RAW[:-1] + END, "not the JSON"),
        (BEGIN + b"[" * 100_000 + END, "not the JSON"),
        (BEGIN + b"[]" + END, "another version"),
        (BEGIN + b'{"schema": 2}' + END, "another version"),
        (BEGIN + b'{"schema": 1, "files": {"/a": 1}}' + END, "expected text"),
        (BEGIN + b'{"schema": 1, "python": NaN}' + END, "not the JSON"),
        (b"x" * (MAX_STDOUT_BYTES + 1), "something else"),
        (BEGIN + b"x" * MAX_STDOUT_BYTES, "more than a probe"),
        (b"hetctl-probe: python 3.6.15\n", "3.6.15"),
    ],
)
def test_hostile_answers_are_named(answer: bytes, says: str) -> None:
    with pytest.raises(HetctlError, match=says) as caught:
        extract(answer)
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 400


def test_text_of_a_host_cannot_drive_a_terminal(tmp_path: Path) -> None:
    costume = Costume(product="NVIDIA \x1b]0;pwned\x07H200\x1b[2J", gpus=1, nics=0, tool_delay_s=0)
    facts = dressed(tmp_path, costume)
    assert "\x1b" not in json.dumps(facts_to_data(facts))
    assert "H200" in (facts.gpus[0].name or "")
    assert printable("a\x1b[1mb\u202ec\nd") == "a b c d"
