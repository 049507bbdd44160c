"""Values of a Hugging Face `config.json`, each of its type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from hetctl.comm.contract.errors import ConfigError


@dataclass(frozen=True)
class ConfigReader:
    """A config, read by Llama's keys. Absent and null are the same. Everything raises ConfigError."""

    config: Mapping[str, Any]
    where: str
    keys: Mapping[str, str] = field(default_factory=dict)  # Llama's -> the family's

    def whole(self, key: str, default: int | None = None) -> int:
        key, value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: '{key}' must be a whole number, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        key, value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{self.where}: '{key}' must be a number, found {value!r}")
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{self.where}: '{key}' is too large a number") from None

    def positive(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if not 0 < value < inf:
            raise ConfigError(f"{self.where}: '{key}' must be finite and positive, found {value}")
        return value

    def flag(self, key: str) -> bool:
        """False where the key is absent. Raises ConfigError for words that look like one: "false" is not false."""
        key, value = self._value(key, None)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.where}: '{key}' must be true or false, found {value!r}")
        return bool(value)

    def listed(self, key: str, kind: type, fewest: int) -> tuple[Any, ...]:
        """Values of a kind, at least so many; empty where the key is absent."""
        key, value = self._value(key, None)
        if value is None:
            return ()
        kinds = (float, int) if kind is float else (kind,)
        if not isinstance(value, list) or len(value) < fewest or not all(type(v) in kinds for v in value):
            raise ConfigError(f"{self.where}: '{key}' must be a list of at least {fewest} {kind.__name__} values")
        return tuple(kind(v) for v in value)

    def _value(self, key: str, default: float | None) -> tuple[str, Any]:
        """The family's own key, and what stands there."""
        key = self.keys.get(key, key)
        value = self.config.get(key)
        return key, default if value is None else value
