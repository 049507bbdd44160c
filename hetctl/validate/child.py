"""One claim in a process of its own: `python -m hetctl.validate.child CLAIM GROUND FOLDER OUTCOME`.

What it prints is the claim's log. A crash, a hang or a library that ends its process ends this claim and no other.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hetctl.comm.contract.files import write_json
from hetctl.comm.contract.values import encode
from hetctl.console import Sink
from hetctl.validate.claims import judged
from hetctl.validate.ground import load_ground
from hetctl.validate.registry import BY_ID


def main(identity: str, ground: str, folder: str, outcome: str) -> None:
    """Judge the claim and write its outcome."""
    claim, sink = BY_ID[identity], Sink(as_json=True)  # people's words to stderr, as they come
    found = judged(lambda: claim.check(load_ground(Path(ground)), Path(folder), sink))
    write_json(Path(outcome), encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
