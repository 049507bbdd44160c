"""What a launch needs of whoever shows people what goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Console(Protocol):
    """Where a launch says what goes on: to people, what they should not overlook, and how far something long is."""

    def say(self, content: Any = "") -> None: ...
    def warn(self, message: str) -> None: ...
    def trying(self, what: str) -> AbstractContextManager[Callable[[str], None]]: ...
