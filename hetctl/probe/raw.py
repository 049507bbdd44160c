"""The raw material of one host: what is asked for, how it travels, and how an answer is taken apart safely."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetctl.comm.contract.errors import ConfigError, HetctlError, Undetermined
from hetctl.comm.contract.units import MiB, show_bytes
from hetctl.comm.contract.values import decode

SCHEMA = 1
MAX_DOCUMENT_BYTES = 8 * MiB
MAX_STDOUT_BYTES = MAX_DOCUMENT_BYTES + MiB  # a reader may stop here: banners are small
BEGIN, END = b"=====hetctl-probe-begin=====", b"=====hetctl-probe-end====="
UNSUPPORTED = b"hetctl-probe: python "  # what the program prints when the host's Python is too old


@dataclass(frozen=True)
class Options:
    """What one host's probe is asked for. `root` and `path` dress a host for tests."""

    interpreters: tuple[str, ...] = ()  # Python executables to describe beside the one that runs the probe
    environment: tuple[str, ...] = ()  # names of variables to report (added to the probe's own list)
    deadline_s: float = 30.0  # for the whole probe on the host
    tool_timeout_s: float = 15.0  # for one tool
    max_bytes: int = MAX_DOCUMENT_BYTES
    thorough: bool = False  # also what only a check-up reads: kernel log, policy routing, PCIe access control
    opinions: bool = False  # also a second tool of each vendor, to compare with what is believed
    again_s: float = 0.0  # read error counters a second time after so long; 0: once
    folders: tuple[str, ...] = ()  # try whether files can be written there
    root: str = ""  # prefix of every sysfs, procfs and file path
    path: str = ""  # replaces PATH for finding tools


@dataclass(frozen=True)
class ToolOutput:
    """One tool as it ran: its exit code (None when it did not end) and what it printed, capped."""

    argv: tuple[str, ...] = ()
    exit_code: int | None = None
    seconds: float = 0.0
    stdout: str = ""
    stderr: str = ""
    problem: str = ""  # 'not installed', 'timed out after 15 s' ...; empty when it ran

    @property
    def ok(self) -> bool:
        return not self.problem and self.exit_code == 0


@dataclass(frozen=True)
class Raw:
    """Everything the program brought back, uninterpreted. Paths are the host's own, the fake root removed."""

    schema: int
    python: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)  # symbolic link -> absolute target
    listings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)  # path -> why it could not be read
    tools: Mapping[str, ToolOutput] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)  # limits, user, clock, sizes: read by calls, not files
    interpreters: tuple[Mapping[str, Any], ...] = ()
    problems: tuple[str, ...] = ()  # what the program itself could not do

    def text(self, path: str) -> str | None:
        """The content of a file without surrounding white space, None when it was not read."""
        content = self.files.get(path)
        return None if content is None else content.strip()

    def children(self, folder: str) -> tuple[str, ...]:
        """The names in a listed folder, in the host's sorted order; empty when it was not there."""
        names = self.listings.get(folder.rstrip("/"), ())
        return tuple(dict.fromkeys(name for name in names if name and "/" not in name))

    def tool(self, name: str) -> ToolOutput:
        return self.tools.get(name) or ToolOutput(problem="not run")


def extract(stdout: bytes) -> Raw:
    """The raw material in what a host printed, whatever banners surround it.

    Raises HetctlError (Undetermined) that says what came instead: nothing, an old Python, a cut or foreign document.
    """
    begin = stdout.rfind(BEGIN)
    if begin < 0:
        raise _no_document(stdout)
    if len(stdout) - begin > MAX_STDOUT_BYTES:
        raise Undetermined(f"the host answered with {show_bytes(len(stdout))}, more than a probe ever prints")
    end = stdout.find(END, begin)
    if end < 0:
        raise Undetermined("the probe's answer is cut off: its end never arrived", hint="raise --timeout and retry")
    return load(stdout[begin + len(BEGIN) : end])


def load(document: bytes) -> Raw:
    """One raw document (JSON) as Raw. Raises HetctlError for anything else."""
    try:
        data = json.loads(document.decode("utf-8", "strict"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Undetermined("the probe's answer is not the JSON document it should be") from None
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        raise Undetermined("the probe's answer is of another version of hetctl")
    try:
        return decode(Raw, data, where="probe answer")
    except RecursionError:
        raise Undetermined("the probe's answer is nested too deeply") from None
    except ConfigError as error:
        raise Undetermined(error.message) from None


def _refuse(word: str) -> float:
    raise ValueError(word)


def _no_document(stdout: bytes) -> HetctlError:
    at = stdout.find(UNSUPPORTED)
    if at >= 0:
        version = printable(stdout[at + len(UNSUPPORTED) : at + len(UNSUPPORTED) + 20].split(b"\n")[0])
        return Undetermined(
            f"Python {version} on the host is too old for the probe",
            hint="name a Python >= 3.8 of that host as `python` in the inventory",
        )
    if len(stdout) > MAX_STDOUT_BYTES:
        return Undetermined(f"the host answered with {show_bytes(len(stdout))} of something else than a probe's answer")
    if not stdout.strip():
        return Undetermined("the host answered nothing", hint="is the configured `python` there, and >= 3.8?")
    lines = [line for line in stdout[-2000:].splitlines() if line.strip()]
    return Undetermined(f"no probe answer, but: {printable(lines[-1])}", hint="is the remote shell POSIX and quiet?")


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202f\u2066-\u2069\ufeff]")


def printable(text: bytes | str, *, limit: int = 200) -> str:
    """One line safe to show on a terminal: escapes and control characters removed, length capped."""
    decoded = text[: 4 * limit].decode("utf-8", "replace") if isinstance(text, bytes) else text[: 4 * limit]
    clean = " ".join(_CONTROL.sub(" ", decoded).split()).encode("utf-8", "replace").decode()  # no lone surrogates
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def printable_lines(text: bytes) -> str:
    """Lines safe to show on a terminal, their columns kept; of a line that was written over, what it became."""
    lines = text.decode("utf-8", "replace").replace("\r\n", "\n").rstrip().split("\n")
    return "\n".join(_CONTROL.sub("", line.rsplit("\r", 1)[-1].expandtabs()).rstrip() for line in lines)
