"""One host as a run finds it: its interpreter, its code, its view of the run folder, the address where ranks talk."""

from __future__ import annotations

from dataclasses import dataclass

from hetctl.launcher.run_folder.folder import RunFolder


@dataclass(frozen=True)
class Site:
    """Where the ranks of one host live."""

    name: str
    python: str
    code_path: str  # PYTHONPATH that finds hetctl and its entry point
    folder: RunFolder  # the run's files as this host sees them
    shared: bool  # whether that is the launcher's own folder
    cores: int
    data_address: str
    interface: str | None  # that holds the data address; None: unknown
    program: str | None = None  # where a shipped program folder is
    checkpoints: tuple[str, ...] = ()  # names of the whole checkpoints it holds
