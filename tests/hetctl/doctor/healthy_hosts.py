"""Healthy hosts of both vendors as parsed facts, and ways to make them ill."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hetctl.comm.contract.cluster import Access, Measured
from hetctl.comm.contract.facts import Folder, HostFacts, Interpreter, Limit, Process, ToolRun
from hetctl.discovery.fabric import Report, build
from hetctl.doctor.check import Check, CheckedCluster, FabricPath, ReachAttempt
from hetctl.probe import Options, parse
from hetctl.probe import remote as program
from hetctl.probe.raw import load
from hetctl.probe.wanted import request
from tests.rigs.dress import Costume, dress_host
from tests.rigs.dress_fabric import dress_fabric

GiB = 2**30
Edit = Callable[[HostFacts], HostFacts]


@cache
def _dressed(number: int) -> HostFacts:
    """Hosts 0 and 1 are NVIDIA on InfiniBand, 2 and 3 AMD on RoCE; all on one management network."""
    management = {"eno1": f"192.168.0.{number + 1}"}
    costume = Costume(f"node{number}", number, gpus=2, nics=2, management=management, tool_delay_s=0.0)
    if number > 1:
        costume = replace(costume, vendor="amd", fabric="roce", nic_driver="bnxt_en")
    with tempfile.TemporaryDirectory() as folder:
        dress = dress_host(Path(folder), costume)
        dress_fabric(dress, costume)
        options = Options(root=str(dress.root), path=str(dress.tools), thorough=True, again_s=0.01)
        facts = parse(load(program.collect(request(options))))
    return _healthy(facts, number)


def _healthy(facts: HostFacts, number: int) -> HostFacts:
    """What the machine under the dress showed, replaced by what a well-kept host shows."""
    nvidia = number < 2
    settings = {
        **facts.system.settings,
        "ip_local_port_range": "32768\t60999",
        "acs": "off",
        "scaling_governor": "performance",
        "transparent_hugepage": "always [madvise] never",
        "swaps": "none",
    }
    system = replace(
        facts.system,
        addresses=(f"192.168.0.{number + 1}",),
        environment={},
        settings=settings,
        shm_total_bytes=64 * GiB,
        clock_s=1_000.0,
        clock_synchronized=True,
        policy_rules=0,
        kernel_log=(),
        tools={"smi": ToolRun(0.2)},
        folders=(Folder("/tmp", "/tmp", 100 * GiB, 50 * GiB, 1000, 500, 0.01),),
    )
    python = Interpreter(
        "python3",
        executable="/usr/bin/python3",
        version="3.11.9",
        torch="2.13.0+cu128" if nvidia else "2.13.0+rocm6.4",
        cuda="12.8" if nvidia else None,
        hip=None if nvidia else "6.4",
        nccl="2.27.3" if nvidia else None,
        rccl=None if nvidia else "2.26.6",
    )
    nics = tuple(replace(n, carrier_changes=2, counters={**n.counters, "np_cnp_sent": 5}) for n in facts.nics)
    plain = replace(nics[-1], pci="0000:00:1f.0", pci_id="8086:159b", virtual=False)
    nics = (*nics[:-1], plain)
    gpus = tuple(
        replace(
            g,
            processes=(),
            health=replace(
                g.health,
                ecc_corrected=0,
                ecc_uncorrected=0,
                recovery_action="none",
                throttle_reasons=(),
                links_up=18,
                links_down=0,
                power_limit_w=700.0,
            ),
        )
        for g in facts.gpus
    )
    many = Limit("unlimited", "unlimited")
    rdma = replace(facts.rdma, memlock_bytes="unlimited", providers=("mlx5", "bnxt_re"), peer_memory_modules=("peer",))
    return replace(
        facts,
        system=system,
        nics=nics,
        gpus=gpus,
        rdma=rdma,
        interpreters=(python,),
        limits={"memlock": many, "nofile": many, "nproc": many},
        warnings=(),
    )


def reports(count: int = 4, **ill: Edit) -> list[Report]:
    """Reports of node0 ... ; `node1=edit` makes that one ill."""
    found = []
    for number in range(count):
        name = f"node{number}"
        facts = ill[name](_dressed(number)) if name in ill else _dressed(number)
        access = Access(address=f"192.168.0.{number + 1}")
        found.append(Report(name, access, facts, seconds=0.3, clock_ahead_s=(-0.01, 0.02)))
    return found


def checked(found: list[Report], **more: Any) -> CheckedCluster:
    """Everything a rule can ask about, tried and measured without a fault."""
    cluster = replace(build(found).cluster, measured=tuple(measured(1e9 for _ in range(3))))
    names = [r.name for r in found if r.ok]
    tried = tuple(
        ReachAttempt(a, b, f"192.168.0.{b[-1]}", 29_500, largest_packet=True) for a in names for b in names if a != b
    )
    ways = (FabricPath("node0", "node1", "LID 1 to 65", ("leaf",), 4096, 50e9, 4096, 50e9),)
    performance = {name: computed(found[i].facts) for i, name in enumerate(names)}
    return replace(
        CheckedCluster(
            *(tuple(found), cluster, tried, ways),
            performance=performance,
            shared={"/data": dict.fromkeys(names, "")},
        ),
        **more,
    )


def measured(rates: Iterable[float]) -> list[Measured]:
    """One rail per neighbouring pair of hosts at these rates in bytes per second."""
    return [Measured((f"node{i}", f"node{i + 1}"), ("eno1", "eno1"), "tcp", 1e-4, rate) for i, rate in enumerate(rates)]


def computed(facts: HostFacts | None) -> Mapping[str, Any]:
    """What a healthy host's devices answer."""
    exact = {"max_eps": 2.0, "mean_eps": 0.2, "scale_eps": 0.0, "cosine": 1.0}
    row = {"forward": exact, "backward": exact, "sample": [1.0, -2.0]}
    rows = [{"operation": "matmul", "dtype": dtype, **row} for dtype in ("bfloat16", "float32")]
    device = {"alive_s": 2.0, "finite": True, "gemm_flops": 6e14, "memory_bytes_per_s": 4.2e12, "numerics": rows}
    count = len(facts.gpus) if facts else 0
    return {"devices": [{**device, "index": i} for i in range(count)], "allreduce_bytes_per_s": 2e11}


def system(**values: Any) -> Edit:
    return lambda facts: replace(facts, system=replace(facts.system, **values))


def setting(name: str, value: str | None) -> Edit:
    def edit(facts: HostFacts) -> HostFacts:
        settings = {k: v for k, v in facts.system.settings.items() if k != name}
        return system(settings=settings if value is None else {**settings, name: value})(facts)

    return edit


def variable(name: str, value: str) -> Edit:
    return system(environment={name: value})


def rdma(**values: Any) -> Edit:
    return lambda facts: replace(facts, rdma=replace(facts.rdma, **values))


def nic(position: int, **values: Any) -> Edit:
    """Change one port; the management port is the last."""
    return lambda facts: replace(
        facts,
        nics=tuple(replace(n, **values) if i == position % len(facts.nics) else n for i, n in enumerate(facts.nics)),
    )


def port(position: int, **values: Any) -> Edit:
    """Change what the fabric says of one port."""
    return lambda facts: nic(position, fabric=replace(facts.nics[position].fabric, **values))(facts)


def every_port(**values: Any) -> Edit:
    return lambda facts: replace(facts, nics=tuple(replace(n, fabric=replace(n.fabric, **values)) for n in facts.nics))


def every_nic(**values: Any) -> Edit:
    return lambda facts: replace(facts, nics=tuple(replace(n, **values) if n.rdma_device else n for n in facts.nics))


def gpu(**values: Any) -> Edit:
    return lambda facts: replace(facts, gpus=(replace(facts.gpus[0], **values), *facts.gpus[1:]))


def health(**values: Any) -> Edit:
    return lambda facts: gpu(health=replace(facts.gpus[0].health, **values))(facts)


def python(**values: Any) -> Edit:
    return lambda facts: replace(facts, interpreters=(replace(facts.interpreters[0], **values),))


def limit(name: str, soft: Any) -> Edit:
    return lambda facts: replace(facts, limits={**facts.limits, name: Limit(soft, soft)})


def all_of(*edits: Edit) -> Edit:
    def edit(facts: HostFacts) -> HostFacts:
        for one in edits:
            facts = one(facts)
        return facts

    return edit


def process(gigabytes: int) -> Edit:
    return gpu(processes=(Process(4711, "python", gigabytes * GiB),))


def silent(name: str, status: str, found: list[Report]) -> list[Report]:
    """The same reports with one host that gave no facts."""
    return [replace(r, facts=None, status=status, reason="because", hint="") if r.name == name else r for r in found]


def ids(checks: tuple[Check, ...]) -> set[str]:
    return {check.id for check in checks}
