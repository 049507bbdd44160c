"""Where every value came from and why it is missing: the order of trust is the order in which offers are made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Notes:
    """Collected while parsing; `at` gives a view below a path that writes into the same collection."""

    prefix: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def at(self, path: str) -> Notes:
        return Notes(self._full(path) + ".", self.sources, self.unknown, self.warnings)

    def pick(self, name: str, *offers: tuple[T | None, str], why: str = "") -> T | None:
        """The first value offered, most trusted source first; None, with the reason kept, when there is none."""
        for value, source in offers:
            if value is not None:
                self.sources[self._full(name)] = source
                return value
        asked = ", ".join(dict.fromkeys(source for _, source in offers))
        self.unknown[self._full(name)] = why or f"not told by {asked}"
        return None

    def pick_each(self, names: Iterable[str], *offers: tuple[Any, str]) -> dict[str, Any]:
        """Of records that several sources filled, each of the named fields: `pick` for all of them."""
        return {
            name: self.pick(name, *((getattr(record, name), source) for record, source in offers)) for name in names
        }

    def source(self, name: str, source: str) -> None:
        self.sources[self._full(name)] = source

    def why(self, name: str, reason: str) -> None:
        self.unknown[self._full(name)] = reason

    def warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def _full(self, name: str) -> str:
        return self.prefix + name


_ENTRY = re.compile(r"^(\w+)\[(\d+)\]\.(.+)$")


def compact(notes: Mapping[str, str], lengths: Mapping[str, int]) -> dict[str, str]:
    """`gpus[0].uuid` ... `gpus[7].uuid` with one text as `gpus[*].uuid`. `lengths`: how many entries each list has."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    short: dict[str, str] = {}
    for path, text in notes.items():
        match = _ENTRY.match(path)
        if match:
            groups.setdefault((match.group(1), match.group(3)), {})[path] = text
        else:
            short[path] = text
    for (name, rest), entries in groups.items():
        texts = set(entries.values())
        if len(texts) == 1 and len(entries) == lengths.get(name) and len(entries) > 1:
            short[f"{name}[*].{rest}"] = texts.pop()
        else:
            short.update(entries)
    return short
