"""docs/cluster-yaml.md from the values that the file is decoded into: `python -m tests.bench.file_reference`."""

from __future__ import annotations

import dataclasses
import inspect
import io
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetctl.comm.contract.cluster import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "cluster-yaml.md"
HEAD = """# cluster.yaml

Written by `hetctl discover`, read by every command that takes `--cluster` or `--emulate FILE`. It may be written or
edited by hand: a cluster that nobody owns yet, a link that you know better. Unknown keys are errors that name the
nearest one. A key with a default may be left out; what is absent is unknown, never zero. This page is made from the
code: `make reference`.

A small one:

```yaml
schema_version: 1
hosts:
- name: node1
  data_address: 10.0.0.1
  devices: [{index: 0, vendor: nvidia, device_class: h100, nics: [eth0]}]
  nics: [{name: eth0, rate_bytes_per_s: 3.125e+9, network: net0, address: 10.0.0.1}]
- name: node2
  data_address: 10.0.0.2
  devices: [{index: 0, vendor: amd, device_class: mi300x, nics: [eth0]}]
  nics: [{name: eth0, rate_bytes_per_s: 3.125e+9, network: net0, address: 10.0.0.2}]
islands:
- {name: h100, vendor: nvidia, fabric: host, members: [{host: node1, device: 0}]}
- {name: mi300x, vendor: amd, fabric: host, members: [{host: node2, device: 0}]}
networks: [{name: net0, kind: ethernet, hosts: [node1, node2]}]
links:
- islands: [h100, mi300x]
  transports: [{kind: tcp, usable: true, reason: they share net0}]
```
"""


def made() -> str:
    """The page as the code would have it."""
    return HEAD + "".join(map(_section, _values(Cluster)))


def _values(cls: type) -> Iterator[type]:
    """The dataclass and those below it, each once, in the order in which a reader meets them."""
    found: dict[type, None] = {cls: None}
    waiting = [cls]
    while waiting:
        hints = typing.get_type_hints(waiting.pop(0))
        for one in (part for hint in hints.values() for part in _inside(hint) if dataclasses.is_dataclass(part)):
            if one not in found:
                found[one] = None
                waiting.append(one)
    return iter(found)


def _inside(hint: Any) -> Iterator[Any]:
    yield hint
    for part in typing.get_args(hint):
        yield from _inside(part)


def _section(cls: type) -> str:
    hints, comments = typing.get_type_hints(cls), _comments(cls)
    rows = [
        f"| `{f.name}` | {_kind(hints[f.name])} | {_default(f)} | {comments.get(f.name, '')} |"
        for f in dataclasses.fields(cls)
    ]
    says = " ".join((inspect.getdoc(cls) or "").split())
    head = "| key | value | if left out | |\n|---|---|---|---|\n"
    return f"\n## {cls.__name__}\n\n{says}\n\n{head}" + "\n".join(rows) + "\n"


def _comments(cls: type) -> dict[str, str]:
    """Field -> the comment behind it."""
    found: dict[str, str] = {}
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        if token.type == tokenize.NAME and token.start[1] <= 4 and token.line.strip().startswith(f"{token.string}:"):
            name = token.string
        if token.type == tokenize.COMMENT and name:
            found.setdefault(name, token.string.lstrip("# ").replace("|", "or"))
        if token.type == tokenize.NEWLINE:
            name = ""
    return found


def _kind(hint: Any) -> str:
    """A type in the words of someone who writes YAML."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(p) for p in parts if p is not type(None))
    if origin is typing.Literal:
        return " or ".join(f"`{p}`" for p in parts)
    if origin is tuple:
        return f"list of {_kind(parts[0])}" if parts[-1] is Ellipsis else f"{len(parts)} of {_kind(parts[0])}"
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return f"keys to {_kind(parts[1])}"
    if dataclasses.is_dataclass(hint):
        name: str = hint.__name__  # type: ignore[union-attr]
        return f"[{name}](#{name.lower()})"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(hint, "anything")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "**needed**" if field.default_factory is dataclasses.MISSING else "empty"
    if field.default is None:
        return "unknown"
    plain = str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"
    return "empty" if field.default in ((), "") else f"`{plain}`"


if __name__ == "__main__":
    PAGE.write_text(made())
