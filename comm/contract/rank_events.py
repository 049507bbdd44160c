"""What a rank tells the launcher: see `events.py`."""

from hetctl.comm.contract.events import VARIABLE, Reporter

__all__ = ["VARIABLE", "Reporter"]
