"""Keeps the host from running so far ahead of the device that the device's queue of launches is full.

A launch that waits for room there holds a lock of the driver, and every other thread's calls wait with it: those of the
bridge moved half as much beside backward, and steps whose gradients cross islands took 9 % longer.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

UNITS_AHEAD = 4  # of a model, each some 50 to 150 launches; the queue holds about a thousand


class LaunchLimit:
    """Called before each unit of work: waits until the device has begun the one so many before it.

    Weight gradients that a schedule puts off (`split_backward.py`) are no units: they are launched without it.
    """

    def __init__(self) -> None:
        self._begun: deque[Any] = deque()

    def __call__(self) -> None:
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._begun.append(event)
        if len(self._begun) > UNITS_AHEAD:
            self._begun.popleft().synchronize()
