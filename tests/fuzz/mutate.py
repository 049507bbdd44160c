"""Inputs made of good ones: bytes changed anywhere, or one value inside of JSON, JSON lines or YAML."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import yaml

Case = dict[str, bytes]  # the files of one input, by name
SCRIPT = "<script>alert(1)</script>'\"><img src=x onerror=alert(2)>"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 10**400, 0.0, -0.0, 1e-320, 1e308, -1e308),
    *(math.nan, math.inf, -math.inf, "", " ", "0", "-1", "1e-4", "nan", SCRIPT, "x" * 5000, "\ud800", "\x1b[31m\x00"),
    *("[red]", "../../etc/passwd", "n[1-9/2/3]", "n[1-[1-3]]", "'", '"', [], {}, [[]], [None], {"": ""}, [0] * 300),
)
TOKENS = tuple(
    t.encode("utf-8", "replace")
    for t in (*(str(v)[:5000] for v in VALUES), "[", "]", "{", "}", "[" * 3000, "1." * 3000, "-" * 6000, "&a [*a]")
)


def mutated(case: Case, rng: random.Random) -> Case:
    """One file of a case changed, once to three times."""
    name = rng.choice(sorted(case))
    data = case[name]
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = _value_changed(data, rng) if rng.random() < 0.6 else _bytes_changed(data, rng)
    return {**case, name: data}


def _value_changed(data: bytes, rng: random.Random) -> bytes:
    """A value replaced, removed or doubled where the text holds some; bytes otherwise."""
    text = data.decode("utf-8", "replace")
    head, lines = text.split("\n", 1)[0], text.splitlines()
    if head.startswith("{") and len(lines) > 1 and head.endswith("}"):  # JSON lines
        at = rng.randrange(len(lines))
        lines[at] = _value_changed(lines[at].encode(), rng).decode("utf-8", "replace")
        return "\n".join([*lines, ""]).encode("utf-8", "replace")
    try:
        value = json.loads(text)
        return json.dumps(_changed(value, rng)).encode()
    except (ValueError, RecursionError):  # another change before this one may have nested it too deeply
        pass
    try:
        value = yaml.load(text, Loader=yaml.CSafeLoader)
        return yaml.dump(_changed(value, rng), Dumper=yaml.CSafeDumper, sort_keys=False).encode("utf-8", "replace")
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return _bytes_changed(data, rng)


def _changed(value: Any, rng: random.Random) -> Any:
    places = list(_places(value))
    if not places:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    how = rng.random()
    if how < 0.15:
        del holder[key]
    elif how < 0.25 and isinstance(holder, dict):
        holder[str(rng.choice(VALUES))[:99]] = holder.pop(key)
    elif how < 0.35 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = rng.choice(VALUES)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(inner)


def _bytes_changed(data: bytes, rng: random.Random) -> bytes:
    at, past = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[min(past, at + 40) :]
    if kind == 2:
        return data[:at] + rng.choice(TOKENS) + data[at:]
    if kind == 3:
        return data[:at] + rng.randbytes(rng.choice((1, 2, 8))) + data[at + 1 :]
    if kind == 4:
        return data[:at] + data[at:past][:200] * rng.choice((2, 20)) + data[at:]
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if at < len(data) else data
