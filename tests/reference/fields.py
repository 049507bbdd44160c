"""The keys of files, from the values that they are decoded into: types, defaults, and the comments beside fields."""

from __future__ import annotations

import dataclasses
import inspect
import io
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.plan import Plan
from hetctl.discovery.inventory_file import InventoryFile
from hetctl.trainer.recipe import RANGES, Recipe
from hetctl.trainer.schedule import SCHEDULES
from tests.reference.table import code, table

CLUSTER = """# cluster.yaml

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
RECIPE = """# recipe.yaml

What a person wants trained. Every key may be left out, and `--set section.key=value` sets any of them. The defaults are
the demo's. For a named model what is left out follows the model: `seq_len` is at most 4096, `global_batch` counts the
devices, `lr` is the usual one of its size, or to fine-tune; each is said when it is taken. This page is made from the
code: `make reference`.
"""
INVENTORY = """# inventory.yaml

The hosts that a person names, and how each is entered: [how it is used](../discover.md#inventoryyaml). Shorter forms
are read too: a group or `hosts` as a list or one range of names, `env` as a list of names whose values come from your
environment. This page is made from the code: `make reference`.
"""
PLAN = """# plan.yaml

Who does what, why, and how fast: written by `hetctl plan -o plan.yaml`, taken by `hetctl train --plan plan.yaml`. It
may be edited, and is validated when it is loaded. This page is made from the code: `make reference`.
"""


def cluster() -> str:
    return CLUSTER + "".join(map(_section, below(Cluster)))


def inventory() -> str:
    return INVENTORY + "".join(map(_section, below(InventoryFile)))


def plan() -> str:
    return PLAN + "".join(map(_section, below(Plan)))


def recipe() -> str:
    sections = "".join(_section(cls) for cls in below(Recipe) if cls is not Recipe)
    rows = [(code(s.name), s.automatic, s.reason) for s in SCHEDULES.values()]
    return f"{RECIPE}{sections}\n## Schedules\n\n" + table(
        ("schedule", "taken by itself", "what a plan says of it"), rows
    )


def below(cls: type) -> Iterator[type]:
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
    hints, comments = typing.get_type_hints(cls), comments_of(cls)
    says = " ".join((inspect.getdoc(cls) or "").split())
    rows = [
        (
            code(f.name),
            _kind(hints[f.name]),
            _default(f),
            "; ".join(filter(None, (comments.get(f.name), _range(cls, f)))),
        )
        for f in dataclasses.fields(cls)
        if f.name in inspect.get_annotations(cls)
    ]
    says += "".join(
        f" It has the keys of {_kind(base)} too." for base in cls.__bases__ if dataclasses.is_dataclass(base)
    )
    return f"\n## {_title(cls)}\n\n{says}\n\n" + table(("key", "value", "if left out", ""), rows)


def _title(cls: type) -> str:
    """A recipe's sections go by their keys."""
    name = cls.__name__
    return name.removesuffix("Section").lower() if name.endswith("Section") else name


def _range(cls: type, field: dataclasses.Field[Any]) -> str:
    return ", ".join(words for words, _, keys in RANGES if f"{_title(cls)}.{field.name}" in keys)


def comments_of(cls: type) -> dict[str, str]:
    """Field -> the comment behind it, or that above it."""
    found: dict[str, str] = {}
    name, above = "", ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        if token.type == tokenize.NAME and token.start[1] <= 4 and token.line.strip().startswith(f"{token.string}:"):
            name = token.string
            if above:
                found[name], above = above, ""
        elif token.type == tokenize.COMMENT and name:
            found.setdefault(name, token.string.lstrip("# "))
        elif token.type == tokenize.COMMENT:
            above = f"{above} {token.string.lstrip('# ')}".strip()
        elif token.type == tokenize.NEWLINE:
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
        name = _title(typing.cast(type, hint))
        return f"[{name}](#{name.lower()})"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(hint, "anything")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "**needed**" if field.default_factory is dataclasses.MISSING else "empty"
    if dataclasses.is_dataclass(field.default):
        return "empty"
    if field.default is None:
        return "`null`"
    plain = str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"
    return "empty" if field.default in ((), "") else f"`{plain}`"
