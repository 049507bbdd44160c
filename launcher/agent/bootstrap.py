"""The small program that is first on a host: it travels as text over stdin, takes in the code, and becomes the agent.

Standard library only. Strictly question and answer, so that nothing of the agent's input is read too early.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import select
import shutil
import signal
import socket
import struct
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from typing import Any

MIN_PYTHON = (3, 11)
BOOT = "import sys;sys.path.insert(0,sys.argv[1]);from hetctl.launcher.agent.agent import main;main()"  # given the code
KEEP_BUNDLES = 6  # unused ones beyond these are removed, oldest first, but for what programs wrote there
PATIENCE_S = 15.0  # without a byte from the launcher: it is gone, or the way to it is cut
PARTING_S = 5.0  # that an agent may take from its last word to its end
FRESH_S = 86400.0  # one that was used within a day is never removed
SENT_AT = 320000000.0  # in 1980, the date of all files that were sent: others beside them were written here


def main(request: str) -> None:
    """Do what the request (JSON) asks for: "enter" (become an agent), "attach" to one, "clean" up after one, ..."""
    asked = json.loads(request)
    ways = {"enter": enter, "tell": tell, "attach": attach, "clean": clean, "read": read, "take": take, "lend": lend}
    try:
        ways[asked["do"]](asked)
    except OSError as error:
        say({"event": "failed", "reason": f"{error.filename or ''} {error.strerror or error}".strip()})
        sys.exit(1)


def say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def tell(asked: dict[str, Any]) -> None:
    """Say what this host has, as this Python finds it."""
    say({"event": "host", **look(asked)})


def enter(asked: dict[str, Any]) -> None:
    """Say what this host has, take in the bundles it lacks, then become the agent from one of them."""
    tell(asked)
    for step in steps():
        if step["do"] == "bundle":
            unpack(base64.b64decode(step["zip"]), step["digest"])
            say({"event": "unpacked", "digest": step["digest"]})
        elif step["do"] == "become":
            code = place(step["digest"])
            os.environ["HETCTL_RUN"] = asked["run"]  # by which `clean` finds an agent, too
            os.execv(sys.executable, [sys.executable, "-I", "-c", BOOT, code])
    sys.exit(1)  # whoever asked went away


def steps() -> Iterator[dict[str, Any]]:
    """What the launcher asks for, until it goes away or falls silent (a cut network closes no connection)."""
    pending = b""
    while select.select([0], [], [], PATIENCE_S)[0] and (data := os.read(0, 1 << 20)):
        *lines, pending = (pending + data).split(b"\n")
        yield from map(json.loads, lines)


def look(asked: dict[str, Any]) -> dict[str, Any]:
    """What this host has of what a run needs, by metadata and files; nothing is imported, nothing is written."""
    state, token = run_folder(asked), asked.get("token")
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "supported": sys.version_info >= MIN_PYTHON,
        "executable": sys.executable,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: version(name) for name in asked.get("packages", ())},
        "have": [digest for digest in asked.get("digests", ()) if have(digest)],
        "code": place(""),
        "shared": token is not None and read_small(token["path"]) == token["text"],
        "folder": state,
        "paths": {path: os.path.exists(path) and os.access(path, os.R_OK) for path in asked.get("paths", ())},
        "checkpoints": checkpoints(os.path.join(state, "checkpoints")),
    }


def run_folder(asked: dict[str, Any]) -> str:
    """Where this host keeps its files of a run whose folder it does not share."""
    return os.path.join(state_home(), "hetctl", "runs", asked["run"], asked["host"])


def version(name: str) -> str | None:
    """The version of an installed package, '?' where it is there without metadata, None where it is not."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "?" if importlib.util.find_spec(name) else None


def checkpoints(folder: str) -> list[str]:
    """The names of whole checkpoints in a folder; that of step 0 where a run began that has not named one yet."""
    try:
        names = [n for n in os.listdir(folder) if n.startswith("step-") and n[len("step-") :].isdigit()]
    except OSError:
        return []
    whole = sorted(n for n in names if os.path.isfile(os.path.join(folder, n, "manifest.json")))
    begun = os.path.isfile(os.path.join(folder, ".begun"))
    return ["step-00000000"] if begun and not whole else whole


def cache_home() -> str:
    return _base("XDG_CACHE_HOME", ".cache")


def state_home() -> str:
    return _base("XDG_STATE_HOME", ".local", "state")


def _base(name: str, *otherwise: str) -> str:
    """A base folder of the XDG's, which says that relative ones are to be ignored: agents stand in `/`."""
    told = os.environ.get(name, "")
    return told if os.path.isabs(told) else os.path.join(os.path.expanduser("~"), *otherwise)


def place(digest: str) -> str:
    """Where a bundle is or would be."""
    return os.path.join(cache_home(), "hetctl", "code", digest)


def have(digest: str) -> bool:
    """Whether a bundle is here; using it keeps it young."""
    try:
        os.utime(place(digest))
        return True
    except OSError:
        return False


def unpack(packed: bytes, digest: str) -> None:
    """Take in a bundle: checked against its name, unpacked beside its place, renamed into it."""
    if hashlib.sha256(packed).hexdigest()[: len(digest)] != digest:
        raise OSError(None, "the code arrived damaged")
    os.makedirs(place(""), mode=0o700, exist_ok=True)
    sweep(place(""))
    temporary = half_made(place(""))
    try:
        zipfile.ZipFile(io.BytesIO(packed)).extractall(temporary)
        for file in files_in(temporary):
            os.utime(file, (SENT_AT, SENT_AT))
        try:
            os.rename(temporary, place(digest))
        except OSError:
            if not have(digest):  # otherwise another launcher was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    prune(digest)


def prune(keep: str) -> None:
    """Remove old bundles that nobody used lately, and in which nothing was written: a program stands in its own."""
    ages = []
    for entry in os.scandir(place("")):
        with contextlib.suppress(FileNotFoundError):  # other hosts of the same home may be at it, too
            ages.append((time.time() - entry.stat().st_mtime, entry.name))
    for number, (age, name) in enumerate(sorted(ages)):
        if age > FRESH_S and name != keep and number >= KEEP_BUNDLES:
            with contextlib.suppress(FileNotFoundError):
                dates = {os.lstat(file).st_mtime for file in files_in(place(name))}
                if SENT_AT not in dates or len(dates) == 1:  # of an older hetctl no file has that date
                    shutil.rmtree(place(name), ignore_errors=True)


def files_in(folder: str) -> Iterator[str]:
    """All files below a folder, but for what Python makes of its source."""
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (os.path.join(where, name) for name in names)


def half_made(home: str) -> str:
    """A new folder to fill before it is renamed; its name says of which host, PID namespace and process."""
    return tempfile.mkdtemp(dir=home, prefix=f".new-{_here()}-{os.getpid()}-")


def sweep(home: str) -> None:
    """Remove half-made folders whose maker is gone: killed here, or of a day ago on another host of the same home."""
    for entry in os.scandir(home):
        with contextlib.suppress(FileNotFoundError):  # others may be at it, too
            maker, _, process = entry.name.removeprefix(".new-").rpartition("-")[0].rpartition("-")
            killed = maker == _here() and not os.path.exists(f"/proc/{process}")
            if entry.name.startswith(".new-") and (killed or time.time() - entry.stat().st_mtime > FRESH_S):
                shutil.rmtree(entry.path, ignore_errors=True)


def _here() -> str:
    """Where process numbers are this host's: containers may share its name."""
    return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"


def take(asked: dict[str, Any]) -> None:
    """Say in which folder these files lie here, by their digest; otherwise take them in, their bytes in a row."""
    home = os.path.join(cache_home(), "hetctl", "data")
    files, there = asked["files"], os.path.join(home, asked["digest"])
    os.makedirs(home, mode=0o700, exist_ok=True)
    folder = there if os.path.isdir(there) else asked["path"] if is_copy(asked["path"], asked) else None
    needed = 0 if folder else sum(size for _, size in files)
    if needed > shutil.disk_usage(home).free:
        raise OSError(None, f"{needed / 1e6:,.0f} MB are needed in {home}, which has no such room")
    say({"event": "data", "folder": folder})
    if folder is None:
        receive(home, there, asked)
        kept = sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(home) for name in names)
        say({"event": "data", "folder": there, "kept_bytes": kept})


def receive(home: str, there: str, asked: dict[str, Any]) -> None:
    """Files from stdin into a folder beside their place, checked, renamed into it."""
    sweep(home)
    temporary = half_made(home)
    try:
        for name, size in asked["files"]:
            path = os.path.join(temporary, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                while size:
                    data = os.read(0, min(size, 1 << 20)) if select.select([0], [], [], PATIENCE_S)[0] else b""
                    if not data:
                        raise OSError(None, "the sender of the data went away")
                    size -= file.write(data)
        if not is_copy(temporary, asked):
            raise OSError(None, "the data arrived damaged")
        try:
            os.rename(temporary, there)
        except OSError:
            if not os.path.isdir(there):  # otherwise another launcher was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_copy(root: str, asked: dict[str, Any]) -> bool:
    """Whether a folder holds these very files."""
    try:
        sizes = [os.path.getsize(os.path.join(root, name)) for name, _ in asked["files"]]
        return sizes == [size for _, size in asked["files"]] and digest_of(root, asked["files"]) == asked["digest"]
    except OSError:
        return False


def digest_of(root: str, files: list[Any]) -> str:
    """Of the names, sizes and contents of files under `root`."""
    digest = hashlib.sha256(json.dumps(files).encode())
    for name, _ in files:
        with open(os.path.join(root, name), "rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
    return digest.hexdigest()[:24]


def attach(asked: dict[str, Any]) -> None:
    """Join stdin and stdout with the socket of a running agent, until either side ends; then until it is gone itself,
    as is known where they are its own: whoever hears that this has ended finds nothing of it."""
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent.connect(asked["socket"])
    pid, _, _ = struct.unpack("3i", agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    _, guardian = state_and_parent(pid)

    def inwards() -> None:
        with contextlib.suppress(OSError):  # it ended first, as the other side hears
            while data := sys.stdin.buffer.raw.read(65536):  # type: ignore[union-attr]
                agent.sendall(data)
            agent.shutdown(socket.SHUT_WR)
        time.sleep(PARTING_S)
        os._exit(0)

    threading.Thread(target=inwards, daemon=True).start()
    heard = False
    try:
        while data := agent.recv(65536):
            heard = True
            os.write(1, data)
    except ConnectionError:  # it ended before it had read all of ours
        if not heard:
            raise
    until = time.monotonic() + PARTING_S
    while not os.path.exists(asked["socket"]) and time.monotonic() < until:  # it goes on where its socket does
        if state_and_parent(guardian)[0] in ("Z", ""):
            break
        time.sleep(0.02)
    os._exit(0)


def state_and_parent(pid: int) -> tuple[str, int]:
    """Of a process; no state where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            return state, int(parent)
    except (OSError, ValueError):
        return "", 0


def clean(asked: dict[str, Any]) -> None:
    """Kill what still runs of a run whose supervisor is gone: processes of this user that carry its name. Say what."""
    found = marked(asked["run"])
    for number, pause in ((signal.SIGTERM, asked.get("grace_s", 2.0)), (signal.SIGKILL, 2.0)):
        for pid in marked(asked["run"]):
            try:
                os.kill(pid, number)
            except OSError:
                continue
        until = time.monotonic() + pause
        while marked(asked["run"]) and time.monotonic() < until:
            time.sleep(0.05)
    say({"event": "cleaned", "found": len(found), "left": len(marked(asked["run"]))})


def marked(run: str) -> list[int]:
    """Processes whose environment names the run, never this one."""
    mark = f"HETCTL_RUN={run}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found


def read(asked: dict[str, Any]) -> None:
    """The end of a file of a run, at most `most` bytes."""
    with open(asked["path"], "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - asked["most"]))
        say({"event": "file", "size": size, "data": base64.b64encode(file.read(asked["most"])).decode()})


def lend(asked: dict[str, Any]) -> None:
    """A run's job and what this host holds of a checkpoint, as a tar stream: the last thing that is said."""
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as stream:
        for name in ("launch/job.json", "checkpoints/" + asked["checkpoint"]):
            stream.add(os.path.join(run_folder(asked), name), name)


def read_small(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(4096)
    except (OSError, ValueError):
        return ""
