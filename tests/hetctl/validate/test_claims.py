"""The claims are those that the documentation makes, and each rule judges rightly on records."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.emulate import Machine, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError, Unreachable, WorkFailed
from hetctl.comm.contract.facts import HostFacts
from hetctl.console import Sink
from hetctl.probe import Options, Raw, parse
from hetctl.probe import remote as program
from hetctl.probe.raw import ToolOutput, load
from hetctl.probe.vendors import amd, nvidia
from hetctl.probe.vendors.nvidia_smi import QUERY_FIELDS
from hetctl.probe.wanted import request
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.validate.bench import judge_bridge, judge_parity, judge_pipeline
from hetctl.validate.claims import Judgement, Result, could_not_tell, exit_code, holds
from hetctl.validate.discovery import IBV, gpu_rows, nic_rows
from hetctl.validate.ground import ClaimHosts
from hetctl.validate.table import BY_ID, CLAIMS, choose
from tests.rigs import recordings
from tests.rigs.dress import Costume, dress_host, rdma_name, slot

ROOT = Path(__file__).resolve().parents[3]


def test_every_claim_stands_in_the_documentation_and_every_listed_one_in_the_code() -> None:
    rows = re.findall(r"^\| ([a-z]+\.[a-z-]+) \| (.*?) \| (.*?) \|$", (ROOT / "docs/validate.md").read_text(), re.M)
    assert rows == [(c.id, c.sentence, c.needs) for c in CLAIMS]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_the_words_of_a_claim_are_still_where_it_is_made(claim: Any) -> None:
    file, words = claim.made
    text = " ".join((ROOT / file).read_text().split())
    assert words in text, f"{file} no longer says '{words}': is the claim still made, and still unverified?"


def test_choosing() -> None:
    assert [c.id for c in choose(["bridge.tcp"])] == ["bridge.tcp"]
    assert [c.id for c in choose(["parity"])] == ["parity.pipeline", "parity.data"]
    assert choose() == CLAIMS
    assert len(BY_ID) == len(CLAIMS)
    with pytest.raises(ConfigError, match=r"bridge\.tpc"):
        choose(["bridge.tpc"])


def emulated(spec: str, native: str = "nccl", *, quick: bool = True) -> ClaimHosts:
    """One machine whose devices are labelled as islands."""
    parsed = parse_spec(spec, CLASSES)
    cluster = label_machine(parsed, Machine("here", native, (1 << 30,) * 2))
    return ClaimHosts(cluster, (), {}, {}, quick=quick, timeout_s=60)


def test_a_peer_copy_between_emulated_islands_says_nothing_of_nics() -> None:
    ground = emulated("h200:1,mi325x:1")
    assert ground.lacking("direct") == ""  # it may be asked for
    assert "no RDMA NIC" in BY_ID["bridge.direct"].lacking(ground)


def judged(error: Exception, folder: Path) -> Judgement:
    def measure(*_: object) -> object:
        raise error

    return replace(CLAIMS[0], measure=measure).check(emulated("cpu:1,cpu:1", "gloo"), folder, Sink(as_json=True))


def test_work_that_failed_speaks_against_a_claim_and_everything_else_against_knowing(tmp_path: Path) -> None:
    assert judged(WorkFailed("no"), tmp_path).verdict == "does not hold"
    assert judged(Unreachable("away"), tmp_path).verdict == "could not tell"
    assert "ZeroDivisionError" in judged(ZeroDivisionError("x"), tmp_path).says


def test_exit_codes() -> None:
    def results(*outcomes: Judgement) -> list[Result]:
        return [Result(CLAIMS[0], outcome) for outcome in outcomes]

    wrong = Judgement("does not hold", "")
    assert exit_code(results(holds(""), Judgement("not applicable", ""))) == 0
    assert exit_code(results(holds(""), could_not_tell(""))) == 3
    assert exit_code(results(could_not_tell(""), wrong)) == 1


# --- discovery against further tools -------------------------------------------------------------------------------


def dressed(folder: Path, vendor: str, **tools: str) -> tuple[HostFacts, Raw]:
    costume = Costume("here", 1, vendor, gpus=2, nics=2, tool_delay_s=0)  # type: ignore[arg-type]
    dress = dress_host(folder, costume)
    raw = load(program.collect(request(Options(root=str(dress.root), path=str(dress.tools), opinions=True))))
    raw = replace(raw, tools={**raw.tools, **{n: ToolOutput((n,), 0, stdout=text) for n, text in tools.items()}})
    return parse(raw), raw


def query(**changed: str) -> str:
    """nvidia-smi's query of the two dressed GPUs."""
    lines = []
    for i in (0, 1):
        row = {
            "index": str(i),
            "name": "NVIDIA H200",
            "uuid": recordings.nvidia_uuid(1, i),
            "pci.bus_id": "0000" + slot(i)[0].rpartition("/")[2].upper(),
            "driver_version": "570.124.06",
            "memory.total": "143771 MiB",
            "memory.free": "143158 MiB",
            "pcie.link.width.max": "16",
            "vbios_version": "96.00.99.00.01",
            "serial": f"16500240{i:05d}",
        }
        lines.append(", ".join((row | changed)[field] for field in QUERY_FIELDS))
    return "\n".join(lines) + "\n"


def rocm(**changed: str) -> str:
    """rocm-smi's cards of the two dressed GPUs."""
    import json

    cards = {}
    for i in (0, 1):
        card = {
            "Card Series": "AMD Instinct MI325X",
            "Unique ID": f"0x{recordings.amd_unique(1, i):x}",
            "Serial Number": f"6925240{i:05d}",
            "PCI Bus": slot(i)[0].rpartition("/")[2],
            "VRAM Total Memory (B)": str(recordings.AMD_MEMORY_BYTES),
            "VBIOS version": "113-M3250101-102",
        }
        cards[f"card{i}"] = card | changed
    return json.dumps(cards | {"system": {"Driver version": "6.12.12"}})


CASES = {"nvidia": (nvidia.OPINION, query), "amd": (amd.OPINION, rocm)}


@pytest.mark.parametrize("vendor", CASES)
def test_a_second_tool_agrees_with_discovery(tmp_path: Path, vendor: str) -> None:
    tool, says = CASES[vendor]
    rows = gpu_rows("here", *dressed(tmp_path, vendor, **{tool: says()}))
    told = [r for r in rows if r["agrees"] is not None]
    assert len(told) >= 12
    assert [r for r in told if not r["agrees"]] == []


@pytest.mark.parametrize(
    ("vendor", "changed", "what"),
    [
        ("nvidia", {"serial": "1"}, "serial"),
        ("nvidia", {"memory.total": "81559 MiB"}, "memory"),
        ("nvidia", {"vbios_version": "96.00.99.00.02"}, "firmware"),
        ("amd", {"Unique ID": "0xa000000000000999"}, "uuid"),
        ("amd", {"Card Series": "AMD Instinct MI300X"}, "name"),
        ("amd", {"VRAM Total Memory (B)": "206141652992"}, "memory"),
    ],
)
def test_what_disagrees_is_seen(tmp_path: Path, vendor: str, changed: dict[str, str], what: str) -> None:
    tool, says = CASES[vendor]
    rows = gpu_rows("here", *dressed(tmp_path, vendor, **{tool: says(**changed)}))
    assert {r["what"] for r in rows if r["agrees"] is False} == {what}


def test_a_gpu_that_only_one_of_them_knows_is_seen(tmp_path: Path) -> None:
    rows = gpu_rows("here", *dressed(tmp_path, "nvidia", **{nvidia.OPINION: query().splitlines()[0]}))
    assert [r["what"] for r in rows if r["agrees"] is False] == ["is a GPU"]


def test_a_tool_that_is_not_there_compares_nothing(tmp_path: Path) -> None:
    assert gpu_rows("here", *dressed(tmp_path, "nvidia")) == []


def devinfo(state: str = "PORT_ACTIVE", lid: int = 65) -> str:
    blocks = [
        f"hca_id:\t{rdma_name(Costume(), i)}\n\tfw_ver:\t\t28.39.3004\n\tnode_guid:\t0200:0000:0000:{65 + i:04x}\n"
        f"\t\tport:\t1\n\t\t\tstate:\t\t{state} (4)\n\t\t\tsm_lid:\t\t1\n\t\t\tport_lid:\t{lid + i}\n"
        "\t\t\tlink_layer:\tInfiniBand\n\t\t\tactive_mtu:\t4096 (5)\n"
        for i in (0, 1)
    ]
    return "\n".join(blocks)


def test_ports_are_compared_with_ibv_devinfo(tmp_path: Path) -> None:
    rows = nic_rows("here", *dressed(tmp_path / "a", "amd", **{IBV: devinfo()}))
    assert len([r for r in rows if r["agrees"] is not None]) == 12
    assert [r for r in rows if r["agrees"] is False] == []
    rows = nic_rows("here", *dressed(tmp_path / "b", "amd", **{IBV: devinfo("PORT_DOWN", lid=7)}))
    assert {r["what"] for r in rows if r["agrees"] is False} == {"state", "lid"}


# --- measured things -----------------------------------------------------------------------------------------------


def bridge(transport: str, wrong: list[str], evidence: list[dict[str, Any]]) -> dict[str, Any]:
    way = {
        "exact": {"sums": 8, "messages": 8, "wrong": wrong},
        "message_bytes_per_s": {"1024": 1.0, "8192": 2e9},
        "all_reduce_bytes_per_s": {"1024": 1.0, "8192": 1e9},
        "latency_s": {"p50": 1e-5, "p99": 2e-5},
        "cpu_s_per_gb": 0.1,
    }
    return {"device": "cuda", "ways": {transport: way}, "raw_bytes_per_s": {}, "evidence": evidence}


@pytest.mark.parametrize(
    ("transport", "wrong", "evidence", "verdict"),
    [
        ("tcp", [], [], "holds"),
        ("tcp", ["rank 1: 3 of 1000 sums are wrong"], [], "does not hold"),
        ("rdma", [], [{"ways": ["rdma"], "staged_bytes": 8}], "holds"),
        ("rdma", [], [], "could not tell"),
        ("direct", [], [{"ways": ["direct"], "staged_bytes": 0}], "holds"),
        ("direct", [], [{"ways": ["direct"], "staged_bytes": 4096}], "does not hold"),
        ("direct", [], [{"ways": ["same-host peer copy"], "staged_bytes": 0}], "does not hold"),
    ],
)
def test_bridges(transport: str, wrong: list[str], evidence: list[dict[str, Any]], verdict: str) -> None:
    assert judge_bridge(transport, bridge(transport, wrong, evidence)).verdict == verdict


@pytest.mark.parametrize(
    ("deviation", "crossed", "verdict"),
    [(1e-13, 9, "holds"), (1e-9, 9, "does not hold"), (math.inf, 9, "does not hold"), (0.0, 0, "could not tell")],
)
def test_parity(deviation: float, crossed: int, verdict: str) -> None:
    found = {"layout": "1 | 1", "steps": 3, "worst_deviation": deviation, "bridge_bytes": crossed}
    assert judge_parity(found, emulated("cpu:1,cpu:1", "gloo")).verdict == verdict


@pytest.mark.parametrize(
    ("native", "bridged", "naive", "on_cpu", "verdict"),
    [
        (100.0, 98.0, 80.0, False, "holds"),
        (100.0, 90.0, 80.0, False, "does not hold"),
        (None, 98.0, 80.0, False, "holds"),
        (None, 70.0, 80.0, False, "does not hold"),
        (100.0, 50.0, 80.0, True, "not applicable"),
    ],
)
def test_pipelines(native: float | None, bridged: float, naive: float, on_cpu: bool, verdict: str) -> None:
    rates = {"bridged": [bridged], "naive": [naive]} | ({"native 1f1b": [native]} if native else {})
    best = "native 1f1b" if native else "bridged"
    ratios = {name: [r[0] / (native or bridged)] for name, r in rates.items() if name != best}  # type: ignore[operator]
    found = {"tokens_per_s": rates, "best_native": best, "ratios": ratios}
    ground = emulated("h200:1,mi325x:1", "gloo" if on_cpu else "nccl", quick=False)
    assert judge_pipeline(found, ground).verdict == verdict
