"""What the Pythons of a host carry, read from package metadata and version files, and the container runtimes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hetctl.comm.contract.facts import Container, Interpreter
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw
from hetctl.probe.rdma import library_version, parse_ldconfig
from hetctl.probe.words import items, mapping, told

_LONGEST = 500  # characters of a line that is looked at
_ASSIGNMENT = re.compile(r"""(\w+)\s*(?::[^=]*)?=\s*(['"])([^'"]{1,100})\2""")
RUNTIMES = ("docker", "podman", "apptainer", "singularity")
_HEADERS = ("/opt/rocm/include/rccl/rccl.h", "/usr/include/rccl/rccl.h")


def interpreters(raw: Raw, notes: Notes) -> tuple[Interpreter, ...]:
    """The configured Pythons and the one that ran the probe, the configured ones first."""
    entries = sorted(raw.interpreters, key=lambda e: e.get("running") is True)
    return tuple(_interpreter(entry, raw, notes.at(f"interpreters[{i}]")) for i, entry in enumerate(entries))


def _interpreter(entry: Mapping[str, Any], raw: Raw, notes: Notes) -> Interpreter:
    packages = {str(k): v for k, v in mapping(entry.get("packages")).items() if isinstance(v, str)}
    files = mapping(entry.get("files"))
    version = parse_torch_version(_text(files.get("torch/version.py")))
    pick = notes.pick
    torch = pick("torch", (version.get("__version__"), "torch/version.py"), (packages.get("torch"), "dist-info"))
    return Interpreter(
        path=_text(entry.get("path")),
        executable=told(entry.get("executable")),
        version=told(entry.get("version")),
        prefix=told(entry.get("prefix")),
        torch=torch,
        cuda=pick("cuda", (version.get("cuda"), "torch/version.py"), why=_not_built(torch, "CUDA")),
        hip=pick("hip", (version.get("hip"), "torch/version.py"), why=_not_built(torch, "HIP")),
        nccl=_nccl(entry, packages, files, version, raw, notes),
        rccl=_rccl(version, raw, notes),
        packages={k: v for k, v in sorted(packages.items()) if k != "torch"},
        problem=told(entry.get("problem")),
    )


def parse_torch_version(text: str) -> dict[str, str]:
    """`name = 'value'` assignments of torch/version.py, annotated or not; None is left out."""
    lines = (line.strip() for line in text.splitlines() if len(line) < _LONGEST)
    found = (_ASSIGNMENT.fullmatch(line) for line in lines)
    return {match[1]: match[3] for match in found if match}


def parse_header(text: str) -> str | None:
    """2.21.5 of the NCCL_MAJOR, NCCL_MINOR and NCCL_PATCH lines of nccl.h or rccl.h."""
    found = dict(re.findall(r"#define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d{1,6})", text))
    return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}" if len(found) == 3 else None


def containers(raw: Raw, notes: Notes) -> tuple[Container, ...]:
    """The installed container runtimes; Docker is usable when its socket may be opened, the others need none."""
    openable = mapping(raw.values.get("openable"))
    found = []
    for name in RUNTIMES:
        output = raw.tool(name)
        if output.problem in ("not installed", "not run"):
            continue
        version = re.search(r"(?<!\d)(\d+\.\d+(?:\.\d+)?)", output.stdout)
        usable = openable.get("/var/run/docker.sock", False) is True if name == "docker" else output.ok
        found.append(Container(name, version=version.group(1) if version else None, usable=usable))
    notes.source("containers", "`--version` of each")
    return tuple(found)


def _not_built(torch: str | None, what: str) -> str:
    return f"torch {torch} is not built for {what}" if torch else "torch is not installed"


def _nccl(
    entry: Mapping[str, Any],
    packages: Mapping[str, str],
    files: Mapping[str, Any],
    version: Mapping[str, str],
    raw: Raw,
    notes: Notes,
) -> str | None:
    """The NCCL that torch would load: its wheel's, else one named in torch/lib, else the system's."""
    wheels = [v for k, v in packages.items() if k.startswith("nvidia_nccl_")]
    paths = [p for p in items(entry.get("libraries")) if isinstance(p, str) and "libnccl" in p]
    named = [v for v in map(library_version, paths) if v]
    system = [lib.version for lib in parse_ldconfig(raw.tool("ldconfig").stdout) if lib.name.startswith("libnccl.so")]
    applies = "cuda" in version
    return notes.pick(
        "nccl",
        (wheels[0] if wheels else None, "dist-info"),
        (parse_header(_text(files.get("nvidia/nccl/include/nccl.h"))), "nccl.h of the wheel"),
        (named[0] if named else None, "name of the library in torch"),
        (system[0] if applies and system else None, "ldconfig -p"),
        (parse_header(raw.files.get("/usr/include/nccl.h", "")) if applies else None, "/usr/include/nccl.h"),
        why="" if applies else "torch here is not built for it",
    )


def _rccl(version: Mapping[str, str], raw: Raw, notes: Notes) -> str | None:
    headers = [parse_header(raw.files.get(path, "")) for path in _HEADERS]
    if "hip" not in version:
        return notes.pick("rccl", (None, "torch/version.py"), why="torch here is not built for it")
    return notes.pick(
        "rccl",
        *((header, path) for header, path in zip(headers, _HEADERS, strict=True)),
        why="the library in torch's wheel carries no version file",
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
