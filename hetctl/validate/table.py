"""The table of claims in the order in which they are judged: reading, computing, talking, training."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.doctor.registry import pick
from hetctl.validate import bench
from hetctl.validate.claims import Claim
from hetctl.validate.discovery import COMPARED, IBV, agreement, compared, gpu_rows, lacks_gpus, lacks_rdma, nic_rows
from hetctl.validate.doctor import examined, judge_numerics, judge_rdma

_README, _BENCHMARKS = "README.md", "docs/benchmarks.md"
_PORTS = (_README, "AMD, Hygon and Moore Threads GPUs; InfiniBand, RoCE, EFA and Slingshot NICs")
_SPEED = (_README, "bridge and pipeline speed")
_AS_ONE = (_README, "training across islands equals one process")

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "discovery.gpus",
        "What `discover` says of each GPU is what a further tool of its vendor says.",
        _PORTS,
        "a GPU, and nvidia-smi or rocm-smi",
        "each value that both know: product, UUID, serial, memory, driver, firmware, PCIe width, NUMA node, partition",
        lacks_gpus,
        compared(gpu_rows),
        agreement("GPUs", "the vendor's second tool gave no answer"),
        COMPARED,
        every_host=True,
    ),
    Claim(
        "discovery.nics",
        "What `discover` says of each RDMA port is what ibv_devinfo says.",
        _PORTS,
        "an RDMA port, and ibv_devinfo",
        "each value that both know: state, link layer, firmware, node GUID, on InfiniBand the lids",
        lacks_rdma,
        compared(nic_rows),
        agreement("RDMA ports", f"{IBV} gave no answer (package ibverbs-utils)"),
        COMPARED,
        every_host=True,
    ),
    Claim(
        "doctor.rdma",
        "The doctor's RDMA checks read real ports: none of their findings is unknown.",
        (_README, "the doctor's RDMA checks"),
        "an RDMA port",
        "`hetctl doctor --only rdma,roce` on every host",
        lacks_rdma,
        examined("quick", "rdma", "roce", most_s=60.0),
        judge_rdma,
        "findings.json",
        every_host=True,
    ),
    Claim(
        "numerics.gate",  # wrong numbers would explain what follows
        "Six operations, forward and backward, are right within rounding on every device.",
        (_BENCHMARKS, "The numerics gate on H200s"),
        "torch on the host; a CPU counts as a device where there is no GPU",
        "`hetctl doctor --only perf.numerics`: bf16 and fp32 against fp64, then device classes with each other",
        lambda ground: "",
        examined("perf", "perf.numerics", most_s=300.0),
        judge_numerics,
        "gate.json",
        every_host=True,
    ),
    Claim(
        "native.islands",
        "Each island's native library (NCCL, RCCL; gloo on CPUs) comes up and sums exactly.",
        (_README, "library (NCCL, RCCL) inside its **islands**"),
        "an island of two devices or more",
        "sums of whole numbers over each island, in fp32 and fp64; the library that really ran says its version",
        bench.lacks_group,
        bench.measure_islands,
        bench.judge_islands,
        "islands.json",
    ),
    Claim(
        "bridge.shm",
        "The shared-memory bridge between two islands of one host is exact; its rates are given.",
        _SPEED,
        "two islands on one host",
        "`hetctl bench bridge --bridge shm`, with sums and messages of whole numbers before",
        lambda ground: ground.lacking("shm"),
        *bench.over("shm"),
    ),
    Claim(
        "bridge.tcp",
        "The forwarded bridge over TCP is exact; its rates are given.",
        _SPEED,
        "two islands that an IP network joins",
        "`hetctl bench bridge --bridge tcp`, with sums and messages of whole numbers before",
        lambda ground: ground.lacking("tcp"),
        *bench.over("tcp"),
    ),
    Claim(
        "engine.self-test",
        "An engine of the direct bridge registers memory with the NIC, and a transfer to itself arrives.",
        ("docs/bridge.md", "memory is registered and a transfer to itself must arrive"),
        "two hosts on one RDMA network, nixl or mooncake in their Python",
        "each engine in a process of its own on every host; host memory must, device memory is told",
        lambda ground: ground.lacking("rdma"),
        bench.measure_engines,
        bench.judge_engines,
        "engines.json",
    ),
    Claim(
        "bridge.rdma",
        "The bridge over host-memory RDMA is exact, and an engine carried it.",
        (_README, "bridge over host-memory RDMA"),
        "two islands on one RDMA network, an engine on both",
        "`hetctl bench bridge --bridge rdma`; the engines' evidence and the ports' counters are kept",
        lambda ground: ground.lacking("rdma"),
        *bench.over("rdma"),
    ),
    Claim(
        "bridge.direct",
        "The device-direct bridge is exact, and nothing of it is staged in host memory.",
        (_README, "device-direct bridge"),
        "the same, and device memory that NICs can register",
        "`hetctl bench bridge --bridge direct`; refused is not wrong, but then nobody can tell",
        bench.lacks_device_ground,
        *bench.over("direct"),
    ),
    Claim(
        "parity.pipeline",
        "In fp64 a pipeline across islands trains as one process does, within 1e-10 in every loss and gradient norm.",
        _AS_ONE,
        "two islands",
        "a tiny model, one stage per island, samples of uneven length; the same on one device alone",
        bench.lacks_islands,
        bench.parity("pipeline"),
        bench.judge_parity,
        "parity.json",
    ),
    Claim(
        "parity.data",
        "In fp64 replicas on several islands train as one process does, within 1e-10 in every loss and gradient norm.",
        _AS_ONE,
        "two islands",
        "a tiny model, gradients summed over the bridge, samples of uneven length; the same on one device alone",
        bench.lacks_islands,
        bench.parity("data"),
        bench.judge_parity,
        "parity.json",
    ),
    Claim(
        "pipeline.ratio",
        "A pipeline loses no time to the bridge: at least 0.95 of all-native, or, across vendors, of naive copies 1.",
        (_BENCHMARKS, "A pipeline across islands, against all-native"),
        "GPUs in two islands",
        "`hetctl bench pipeline` with a Llama of 1.2 billion parameters, the one device an island, five rounds",
        bench.lacks_islands,
        bench.measure_pipeline,
        bench.judge_pipeline,
        "pipeline.json",
    ),
)
BY_ID = {claim.id: claim for claim in CLAIMS}


def choose(only: Sequence[str] = ()) -> tuple[Claim, ...]:
    """All claims, or those of these ids or themes. Raises ConfigError."""
    return pick("claim", CLAIMS, only) if only else CLAIMS
