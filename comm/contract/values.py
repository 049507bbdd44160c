"""Frozen dataclasses from plain data and back, strictly: the one decoder behind every file and slice.

It stands in for pydantic because ranks read the same values on hosts that have only Python and torch.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from hetctl.comm.contract.errors import ConfigError, nearest

T = TypeVar("T")
MOST_WHOLE = 2**64
_SCALARS = frozenset((str, int, float, bool, type(None)))


def decode(cls: type[T], data: object, *, where: str) -> T:
    """`data` (dicts, lists, scalars) as `cls`, a frozen dataclass. Unknown keys name their nearest match.

    Raises ConfigError naming the place (`where` and the path below it) for anything that does not fit.
    """
    result = _decode(cls, data, where)
    return typing.cast(T, result)


def encode(value: Any) -> Any:
    """The plain data of a value: dataclasses to dicts in field order, tuples to lists."""
    kind: type = type(value)
    if names := _names(kind):
        return {n: v if type(v := getattr(value, n)) in _SCALARS else encode(v) for n in names}
    if isinstance(value, (list, tuple)):
        return list(value) if set(map(type, value)) <= _SCALARS else [encode(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    return value


def show(data: object) -> str:
    """A value as an error says it: in a few words however long it is."""
    if data is None:
        return "nothing"
    try:
        text = repr(data[:64] if isinstance(data, (str, bytes)) else data)
    except (ValueError, RecursionError):  # a number of over 4,300 digits
        return "a long value"
    return text if len(text) <= 60 else text[:57] + "..."


def _decode(kind: Any, data: object, where: str) -> object:
    origin = typing.get_origin(kind)
    if kind is Any or kind is object:
        return data
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), data, where)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(kind), data, where)
    if origin is typing.Literal:
        return _literal(typing.get_args(kind), data, where)
    if origin is tuple:
        return _tuple(typing.get_args(kind), data, where)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _mapping(typing.get_args(kind), data, where)
    return _scalar(kind, data, where)


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
    """A dataclass' fields; of other classes none."""
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


@functools.cache
def _hints(cls: type) -> tuple[dict[str, Any], frozenset[str]]:
    hints = typing.get_type_hints(cls)
    names = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
    required = frozenset(
        f.name
        for f in dataclasses.fields(cls)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    return names, required


def _dataclass(cls: type, data: object, where: str) -> object:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected keys and values, found {show(data)}")
    hints, required = _hints(cls)
    if getattr(cls, "OPEN", False):
        data = {key: data[key] for key in data if key in hints}
    for key in data:
        if key not in hints:
            raise ConfigError(f"{where}: unknown key '{key}'", hint=nearest(str(key), hints))
    for key in required:
        if key not in data:
            raise ConfigError(f"{where}: the key '{key}' is missing", hint="keys: " + ", ".join(hints))
    return cls(**{k: _decode(hints[k], v, f"{where}.{k}") for k, v in data.items()})


def _union(kinds: tuple[Any, ...], data: object, where: str) -> object:
    if data is None and type(None) in kinds:
        return None
    rest = [k for k in kinds if k is not type(None)]
    if len(rest) == 1:
        return _decode(rest[0], data, where)
    for kind in rest:
        try:
            return _decode(kind, data, where)
        except ConfigError:
            continue
    words = tuple(word for k in rest if typing.get_origin(k) is typing.Literal for word in typing.get_args(k))
    others = [_named(k) for k in rest if typing.get_origin(k) is not typing.Literal]
    if not others:
        return _literal(words, data, where)
    expected = " or ".join([*others, *map(str, words)])
    raise ConfigError(f"{where}: expected {expected}, found {show(data)}")


def _named(kind: Any) -> str:
    shapes: dict[Any, str] = {tuple: "a list", Mapping: "keys and values"}
    return shapes.get(typing.get_origin(kind)) or _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _literal(words: tuple[Any, ...], data: object, where: str) -> object:
    if data in words and not isinstance(data, bool) | (data is None):
        return data
    hint = nearest(data, map(str, words)) if isinstance(data, str) else "one of: " + ", ".join(map(str, words))
    raise ConfigError(f"{where}: {show(data)} is not one of the known words", hint=hint)


def _tuple(kinds: tuple[Any, ...], data: object, where: str) -> object:
    if not isinstance(data, (list, tuple)):
        raise ConfigError(f"{where}: expected a list, found {show(data)}")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_decode(kinds[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if len(data) != len(kinds):
        raise ConfigError(f"{where}: expected {len(kinds)} entries, found {len(data)}")
    return tuple(_decode(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, data, strict=True)))


def _mapping(kinds: tuple[Any, ...], data: object, where: str) -> object:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected keys and values, found {show(data)}")
    key_kind, value_kind = kinds or (Any, Any)
    return {_decode(key_kind, k, where): _decode(value_kind, v, f"{where}.{k}") for k, v in data.items()}


def _scalar(kind: Any, data: object, where: str) -> object:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return _float(data, where)
    if isinstance(data, kind) and not (kind in (int, float) and isinstance(data, bool)):
        if kind is float and data != data:
            raise ConfigError(f"{where}: not a number (nan) says nothing")
        return _whole(data, where) if kind is int else data
    if kind is float and isinstance(data, str):
        try:
            return _scalar(float, float(data), where)  # YAML 1.1 reads 1e-4 as text
        except ValueError:
            pass
    raise ConfigError(f"{where}: expected {_NAMES.get(kind, kind.__name__)}, found {show(data)}")


def _float(number: int, where: str) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ConfigError(f"{where}: {show(number)} is too large a number") from None


def _whole(number: Any, where: str) -> int:
    if abs(number) > MOST_WHOLE:  # beyond what floats and formats take
        raise ConfigError(f"{where}: {show(number)} is too large a number")
    return int(number)


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
