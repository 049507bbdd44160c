"""What a validation found: lines and tables for people, and the documents of its bundle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hetctl import __version__
from hetctl.comm.contract.facts import HostFacts, facts_to_data
from hetctl.comm.contract.units import count_of, show_bytes, show_seconds
from hetctl.console import Sink
from hetctl.validate.claims import Claim, Result, exit_code
from hetctl.validate.ground import ClaimHosts

SCHEMA_VERSION = 1
MARKS = {"holds": "✓", "does not hold": "x", "not applicable": "-", "could not tell": "?"}
_COLOURS = {"holds": "green", "does not hold": "red", "not applicable": "dim", "could not tell": "cyan"}
_MOST_FILES = 40


def claim_line(result: Result) -> str:
    """`✓ bridge.tcp  holds: ...  (12 s)`."""
    outcome = result.outcome
    mark = f"[{_COLOURS[outcome.verdict]}]{MARKS[outcome.verdict]}[/]"
    took = f" ({show_seconds(result.seconds)})" if result.seconds >= 0.1 else ""
    return f"{mark} {result.claim.id:<18} {outcome.verdict}: {escape(outcome.says)}{took}"


def results_table(results: Sequence[Result]) -> Table:
    """One row a claim."""
    table = Table("", "claim", "what it says", box=None, pad_edge=False, title_justify="left")
    for result in results:
        outcome = result.outcome
        mark = f"[{_COLOURS[outcome.verdict]}]{MARKS[outcome.verdict]}[/]"
        table.add_row(mark, result.claim.id, escape(outcome.says))
    table.caption = "✓ holds, x does not hold, - not applicable, ? could not tell"
    return table


def claims_table(claims: Sequence[Claim]) -> Table:
    """What can be validated."""
    table = Table("claim", "sentence", "needs", box=None, pad_edge=False)
    for claim in claims:
        table.add_row(claim.id, escape(claim.sentence), escape(claim.needs))
    return table


def show_contents(sink: Sink, path: Path, files: Mapping[str, bytes], masked: Mapping[str, int]) -> None:
    """What is about to be packed, and where it will lie."""
    total = sum(len(content) for content in files.values())
    sink.say(f"packing {count_of(len(files), 'file')} ({show_bytes(total)}) into {path.absolute()}:")
    for name in list(files)[:_MOST_FILES]:
        sink.say(f"  {name}  {show_bytes(len(files[name]))}")
    if len(files) > _MOST_FILES:
        sink.say(f"  and {len(files) - _MOST_FILES} more")
    words = ", ".join(f"{count} {kind}" for kind, count in sorted(masked.items())) or "nothing was found to mask"
    sink.say(f"placeholders stand for: {words}; what they stand for is kept nowhere")


def document(results: list[Result], ground: ClaimHosts) -> dict[str, Any]:
    """report.json: every claim with its verdict, and what it was judged on."""
    return {
        "schema_version": SCHEMA_VERSION,
        "hetctl": __version__,
        "quick": ground.quick,
        "islands": [
            {"name": i.name, "vendor": i.vendor, "fabric": i.fabric, "ranks": len(i.members)}
            for i in ground.cluster.islands
        ],
        "source": ground.cluster.source,
        "ranks_run_on": ground.kind,
        "hosts": list(ground.facts),
        "hosts_that_did_not_answer": dict(ground.silent),
        "claims": [_entry(result) for result in results],
        "counts": dict(Counter(r.outcome.verdict for r in results)),
        "exit_code": exit_code(results),
    }


def _entry(result: Result) -> dict[str, Any]:
    claim, outcome = result.claim, result.outcome
    return {
        "id": claim.id,
        "claim": claim.sentence,
        "made_in": {"file": claim.made[0], "words": claim.made[1]},
        "needs": claim.needs,
        "how": claim.how,
        "verdict": outcome.verdict,
        "says": outcome.says,
        "figures": dict(outcome.figures),
        "seconds": round(result.seconds, 1),
        "evidence": [f"evidence/{name}" for name in result.evidence],
    }


def versions(ground: ClaimHosts) -> dict[str, Any]:
    """Host -> what runs there: Python, torch, libraries, drivers, kernel, firmware."""
    return {name: _versions(facts) for name, facts in ground.facts.items()}


def _versions(facts: HostFacts) -> dict[str, Any]:
    pythons = [
        {k: getattr(p, k) for k in ("path", "version", "torch", "cuda", "hip", "nccl", "rccl", "packages", "problem")}
        for p in facts.interpreters
    ]
    devices = Counter((g.vendor, g.name, g.architecture, g.driver, g.firmware) for g in facts.gpus)
    ports = Counter((n.rdma_device, n.driver, n.firmware, n.rate_text) for n in facts.nics if n.rdma_device)
    return {
        "os": facts.system.os,
        "kernel": facts.system.kernel,
        "container": facts.system.container,
        "interpreters": pythons,
        "gpus": [dict(zip(_GPU, key, strict=True)) | {"count": n} for key, n in devices.items()],
        "rdma_ports": [dict(zip(_PORT, key, strict=True)) | {"count": n} for key, n in ports.items()],
        "vendor_software": {k: v for k, v in facts.system.settings.items() if k == "rocm"},
        "modules": dict(facts.system.modules),
        "libraries": [f"{lib.name} {lib.version or ''}".strip() for lib in facts.rdma.libraries or ()],
    }


_BOOT = re.compile(r"(\w*iommu|pci|pcie_\w+|numa\w*|hugepages\w*|mitigations|amdgpu\.\w+|nvidia\S*)=")
_GPU = ("vendor", "name", "architecture", "driver", "firmware")
_PORT = ("device", "driver", "firmware", "rate")


def inventory(ground: ClaimHosts) -> dict[str, Any]:
    """Host -> everything discovery says of it, without what other people run there."""
    return {name: facts_to_data(_without_strangers(facts)) for name, facts in ground.facts.items()}


def _without_strangers(facts: HostFacts) -> HostFacts:
    """Facts without other people's processes and without the boot options that are nobody's business."""
    settings = dict(facts.system.settings)
    settings["cmdline"] = " ".join(w for w in settings.get("cmdline", "").split() if _BOOT.match(w))
    gpus = tuple(replace(g, processes=None) for g in facts.gpus)
    return replace(facts, gpus=gpus, system=replace(facts.system, settings=settings))


def markdown(results: Sequence[Result], ground: ClaimHosts) -> str:
    """report.md: for people."""
    islands = ", ".join(
        f"{i.name} ({i.vendor}, {count_of(len(i.members), 'rank')}, {i.fabric})" for i in ground.cluster.islands
    )
    lines = [
        "# hetctl: what holds on these machines",
        "",
        f"hetctl {__version__}; hosts that answered: {len(ground.facts)}; islands: {islands}; ranks on {ground.kind}"
        + ("; emulated: the islands are labels on one machine's devices" if ground.cluster.runs else "")
        + ("; --quick: tiny sizes" if ground.quick else ""),
        "",
        *(f"- {name} did not answer: {why}" for name, why in ground.silent.items()),
        "| | claim | verdict | what it says |",
        "|---|---|---|---|",
        *(_row(result) for result in results),
        "",
        "## Each claim",
        "",
        *(line for result in results for line in _section(result)),
        "## What to do with this",
        "",
        "Attach the archive to an issue of hetctl's repository, or send it to whoever asked for it. Say what the",
        "machines are, and for each x or ? whether you know why. Everything that names machines, people, addresses or",
        "devices is a placeholder (`host-1`, `ip-3`), the same one in every file; what it stands for is kept nowhere.",
        "Look through it before you send it.",
        "",
    ]
    return "\n".join(lines)


def _row(result: Result) -> str:
    outcome = result.outcome
    return f"| {MARKS[outcome.verdict]} | {result.claim.id} | {outcome.verdict} | {_cell(outcome.says)} |"


def _section(result: Result) -> list[str]:
    claim, outcome = result.claim, result.outcome
    return [
        f"### {claim.id}: {outcome.verdict}",
        "",
        f"{claim.sentence} Claimed in {claim.made[0]} ({_cell(claim.made[1])!r}). Needs {claim.needs}.",
        f"Checked by: {claim.how}." + (f" Took {show_seconds(result.seconds)}." if result.seconds >= 0.1 else ""),
        "",
        f"> {_cell(outcome.says)}",
        "",
        *(f"- `evidence/{name}`" for name in result.evidence),
        "",
    ]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:600]
