"""What a rank computes with: its Python, torch, what torch was built for, and the driver that is loaded."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import torch

from hetctl.comm.contract.natives import NATIVES

MODULES = Path("/sys/module")


def versions_here(device: torch.device) -> dict[str, str]:
    """By name; what is unknown is left out: drivers that are part of the kernel have no version of their own."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type != "cpu":
        found |= {name: v for name in ("cuda", "hip", "xpu") if (v := getattr(torch.version, name, None))}
        for row in NATIVES.values():
            if row.device_type == device.type and row.driver_module:
                with suppress(OSError):
                    found["driver"] = (MODULES / row.driver_module / "version").read_text().strip()
    return found
