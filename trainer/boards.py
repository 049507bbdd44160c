"""Figures for TensorBoard, where that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Board:
    """Scalars of every step in an event file; does nothing where TensorBoard is missing, and says so once."""

    def __init__(self, folder: Path, *, active: bool) -> None:
        self._writer: Any = None
        if not active:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print("TensorBoard is not installed: figures are in metrics.jsonl only", flush=True)
            return
        self._writer = SummaryWriter(log_dir=str(folder))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """One point per figure."""
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._writer.close()
