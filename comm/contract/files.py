"""Files in and out: YAML and JSON read with caps and clear errors, everything written atomically."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.units import MiB, show_bytes
from hetctl.comm.contract.values import encode

MAX_PLAIN_KEY = 1000  # YAML readers take keys of up to 1,024 characters without a question mark
MAX_YAML_BYTES = 64 * MiB
MOST_NESTED = 64  # levels
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./+#-]*")
_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


def read_yaml(path: Path, *, what: str) -> Any:
    """The plain data of one YAML document (safe loader, size-capped). Raises ConfigError."""
    import yaml  # 30 ms that `hetctl --help` need not pay

    text = read_text(path, what=what, max_bytes=MAX_YAML_BYTES)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _flat_enough(yaml.load(text, Loader=loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"{path}{place} is not the plain YAML {_a(what)} is made of: {problem}",
            hint="only plain values are read: no tags, no code",
        ) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be {_a(what)}") from None
    except ValueError as error:  # a number of over 4,300 digits, a 13th month
        raise ConfigError(f"{path} is not the plain YAML {_a(what)} is made of: {error}") from None


def read_text(path: Path, *, what: str, max_bytes: int) -> str:
    """The text of a file people wrote. Raises ConfigError when absent, too large, or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ConfigError(f"{path} is {show_bytes(size)}: too large to be {_a(what)}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} at {path}", hint="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as {_a(what)}: {error}") from None


def _flat_enough(data: Any) -> Any:
    """The data itself. Raises RecursionError where it is nested so deeply that what walks through it might, or in a
    circle of YAML's aliases."""
    level = [data]
    for _ in range(MOST_NESTED):
        held = (v for d in level for v in (d.values() if isinstance(d, dict) else d if isinstance(d, list) else ()))
        level = list({id(v): v for v in held if isinstance(v, (dict, list))}.values())  # aliases once a level
        if not level:
            return data
    raise RecursionError


def _a(what: str) -> str:
    return f"an {what}" if what[0] in "aeiou" else f"a {what}"


def write_yaml(path: Path, data: Any, *, header: str = "") -> None:
    """Plain data, or a dataclass', as YAML, atomically, keys in the order given; `header` becomes comment lines.

    A list of mappings has one line per entry: a plan of ten thousand ranks is written in a moment, and read by eye.
    """
    write_atomically(path, as_yaml(data, header=header))


def as_yaml(data: Any, *, header: str = "") -> str:
    """What `write_yaml` writes."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return comment + "".join(_block(encode(data), ""))


def _block(data: Any, indent: str) -> Iterator[str]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            if len(_flow(key)) > MAX_PLAIN_KEY:
                yield f"{indent}? {_flow(key)}\n{indent}: {_flow(value)}\n"
            elif _nested(value) and len(value):
                yield f"{indent}{_flow(key)}:\n"
                yield from _block(value, indent + "  ")
            else:
                yield f"{indent}{_flow(key)}: {_flow(value)}\n"
    elif isinstance(data, (list, tuple)) and data:
        for item in data:
            yield f"{indent}- {_flow(item)}\n"
    else:
        yield f"{indent}{_flow(data)}\n"


def _nested(value: Any) -> bool:
    """Whether a value reads better in lines of its own: mappings, lists that hold more than scalars, sentences."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, (dict, list, tuple)) or (isinstance(v, str) and " " in v) for v in value)
    return isinstance(value, dict)


def _flow(data: Any) -> str:
    """One value on one line: YAML's flow style, strings quoted as JSON does wherever they need it."""
    if isinstance(data, str):
        return _text(data)
    if data is None:
        return "null"
    if isinstance(data, bool):
        return "true" if data else "false"
    if isinstance(data, float):
        return _number(data)
    if isinstance(data, int):
        return str(data)
    if isinstance(data, dict):
        return "{" + ", ".join([f"{_flow_key(k)}: {_flow(v)}" for k, v in data.items()]) + "}"
    whole = set(map(type, data)) == {int}  # ranks, in lists of thousands
    return "[" + ", ".join(map(str if whole else _flow, data)) + "]"


@functools.lru_cache(maxsize=1024, typed=True)  # 1 and True are equal, and written differently
def _flow_key(key: Any) -> str:
    text = _flow(key)
    return text if len(text) <= MAX_PLAIN_KEY else f"? {text} "


@functools.lru_cache(maxsize=1024)  # names of ports and hosts, thousands of times
def _text(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else _quoted(text)


def _quoted(text: str) -> str:
    if text.isascii():
        return json.dumps(text) if "\x7f" not in text else json.dumps(text).replace("\x7f", "\\x7f")
    # JSON escapes beyond the first 65,536 characters as pairs, which YAML would read as two characters
    return "".join(json.dumps(c)[1:-1] if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in text).join('""')


def _number(value: float) -> str:
    if value != value:
        return ".nan"
    if abs(value) == float("inf"):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    # YAML 1.1 wants a point and a sign: 1e16 would be read as text
    sign = "" if exponent.startswith(("+", "-")) else "+"
    return (mantissa if "." in mantissa else mantissa + ".0") + "e" + sign + exponent


def parse_json(text: str | bytes) -> Any:
    """JSON's plain data, as `finite` has it. Raises ValueError, also where it is nested too deeply."""
    try:
        return finite(_flat_enough(json.loads(text)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """A file's. Raises OSError and ValueError."""
    return parse_json(path.read_bytes())


def write_json(path: Path, data: Any, *, private: bool = False) -> None:
    """Plain data as indented JSON, atomically. NaN and infinity become null: JSON has no word for them."""
    write_atomically(path, json.dumps(finite(data), indent=2, allow_nan=False) + "\n", private=private)


def finite(data: Any) -> Any:
    """`data` with NaN and infinities replaced by None, halves of characters by `?`: any JSON reader can read it."""
    if isinstance(data, float):
        return data if data == data and abs(data) != float("inf") else None
    if isinstance(data, str):
        return data if data.isascii() else data.encode("utf-8", "replace").decode()
    if isinstance(data, dict):
        return {finite(k): finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(v) for v in data]
    return data


def refuse_unwritable(path: Path) -> None:
    """Raise OSError that names `path` where no file could be written: before what takes long, not behind it."""
    try:
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While no other process is, that asks so: what is read there is still true when it is written again."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write beside `path`, sync, rename: readers see the old file or the new one, never a part. `private`: for its
    owner only, from its first byte.

    Raises OSError that names `path`.
    """
    payload = content.encode("utf-8", "replace") if isinstance(content, str) else content  # halves of characters: `?`
    try:
        _replace(path, payload, 0o600 if private else 0o666)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # else the temporary file's, and of a full disk none
        raise


def _replace(path: Path, payload: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)  # and as the umask has it
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
