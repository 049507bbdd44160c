"""What `import torch` runs of hetctl: it makes the word `het` known, lazily, and never lets an error out."""

from __future__ import annotations

import os
from typing import Any


def load() -> None:
    """Register a creator that imports the back end when a group is first made (entry point `torch.backends`)."""
    try:
        from torch.distributed import Backend

        if "HET" not in Backend._plugins:
            from hetctl.comm.contract.natives import device_types

            Backend.register_backend("het", _create, extended_api=True, devices=device_types())
        if os.environ.get("HETCTL_AS_NCCL") == "1":
            from hetctl.comm.group.as_nccl import redirect

            redirect()
    except Exception:  # an entry point that raises breaks every `import torch` on the machine
        return


def _create(options: Any, backend_options: Any = None) -> Any:
    from hetctl.comm.group.backend import create

    return create(options, backend_options)
