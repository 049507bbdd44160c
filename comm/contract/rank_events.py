"""What a rank tells the launcher: JSON lines on the file descriptor it was given, or nothing."""

from __future__ import annotations

import json
import os
from typing import Any

from hetctl.comm.contract.files import finite

VARIABLE = "HETCTL_EVENTS_FD"


class Reporter:
    """Writes events; silent where no launcher listens. Only rank 0 reports figures."""

    def __init__(self, *, active: bool) -> None:
        descriptor = os.environ.get(VARIABLE)
        self._fd = int(descriptor) if descriptor and active else None

    def emit(self, event: str, **about: Any) -> None:
        """One event. A launcher that went away is not this rank's concern: the agent ends ranks."""
        if self._fd is None:
            return
        line = json.dumps(finite({"event": event, **about}), allow_nan=False) + "\n"
        try:
            os.write(self._fd, line.encode())
        except BrokenPipeError:
            self._fd = None
