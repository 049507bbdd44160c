"""CPUs as an island beside a GPU: two device types, two native libraries, one run.

PYTHONPATH=. python3 tests/gpu/cpu_island_check.py [--gpus 1]

Training in fp64 across `h200:N,cpu:2` and `cpu:2,h200:N`, as a pipeline and as replicas, against one process on the
first island's first device: losses and norms of twelve steps within 1e-10. One line for each, with the layout. Then a
checkpoint that goes through pipelines, replicas and one process, its islands now on the GPU and now on CPUs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetctl.bench.parity import Across, compare
from hetctl.console import Sink
from hetctl.discovery.which_cluster import Where, running_cluster
from tests.trainer.loop.test_unlike_devices import CHAIN, off_along_the_chain

STEPS, TOLERANCE = 12, 1e-10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    gpus, failed = parser.parse_args().gpus, 0
    for spec in (f"h200:{gpus},cpu:2", f"cpu:2,h200:{gpus}"):
        cluster = running_cluster(Where(None, spec), Sink())
        for across in get_args(Across):
            found = compare(cluster, across, steps=STEPS, sink=Sink())
            off = found["worst_deviation"]
            failed += off > TOLERANCE
            print(f"{spec} {across}: off by {off:.1e}, {found['bridge_bytes']:,} bytes crossed; {found['layout']}")
    with tempfile.TemporaryDirectory() as folder:
        off = off_along_the_chain(Path(folder), ("nvidia", "nccl"))
    failed += off > TOLERANCE
    print(f"a checkpoint along {len(CHAIN)} layouts: off by {off:.1e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
