"""The program that runs on a host: standard library only, Python >= 3.8, collects raw material, prints one document.

It interprets nothing: what to read comes in as data (`wanted.py` and the vendor files), and what it read is parsed
where hetctl runs, so that it can be tested from recordings. It is never imported on a host: `program()` sends its text.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import itertools
import json
import os
import re
import resource
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

FILE_BYTES, LARGE_FILE_BYTES, TOOL_BYTES = 64 * 1024, 4 * 1024 * 1024, 2 * 1024 * 1024
EXTRA_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
ABOUT = (
    "import json,sys;print(json.dumps([sys.executable,'.'.join(map(str,sys.version_info[:3])),sys.prefix,sys.path]))"
)


def main(request: str) -> None:
    """Collect until done or until the deadline, print the document, and leave without waiting for stuck threads."""
    left = memoryview(b"\n=====hetctl-probe-begin=====" + collect(request) + b"=====hetctl-probe-end=====\n")
    sys.stdout.flush()
    while left:
        left = left[os.write(1, left) :]
    os._exit(0)


def collect(request: str) -> bytes:
    """The document for a request (JSON of options and wants), as ASCII JSON."""
    return Probe(json.loads(request)).run().encode("ascii")


class Probe:
    """One collection: every part runs in its own thread, so that what hangs costs only itself."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.options, self.want = request["options"], request["want"]
        self.started = time.monotonic()
        self.end = self.started + self.options["deadline_s"]
        self.root = os.path.realpath(self.options["root"]) if self.options["root"] else ""
        self.path = self.options["path"] or ":".join([os.environ.get("PATH", ""), EXTRA_PATH, *self.want["tool_path"]])
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.listings: dict[str, list[str]] = {}
        self.failed: dict[str, str] = {}
        self.tools: dict[str, dict[str, Any]] = {}
        self.values: dict[str, Any] = {}
        self.interpreters: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def run(self) -> str:
        """The document's text. Parts that miss the deadline are named in its `problems`."""
        parts = {"files": self.read_files, "values": self.read_values, "own name": self.resolve_own_name}
        parts["ipv4"] = self.read_ipv4
        parts["clock"] = self.read_clock
        parts["counters"] = self.read_counters_again
        parts.update((f"folder {path}", partial(self.try_folder, path)) for path in self.options["folders"])
        parts.update(
            (" ".join([t["folder"], *t["only"][:1], *t["non_zero"][:1]]), partial(self.tree, **t))
            for t in self.want["trees"]
        )
        self.want["tools"] = self.every(self.want["tools"])
        first = {name: tool for name, tool in self.want["tools"].items() if not tool["instead_of"]}
        parts.update((name, partial(self.tool, name, tool)) for name, tool in first.items())
        pythons = [sys.executable, *self.options["interpreters"]] if self.options.get("describe", True) else []
        for path in dict.fromkeys(pythons):
            parts["interpreter " + path] = partial(self.interpreter, path)
        threads = {n: threading.Thread(target=self.guard, args=(n, part), daemon=True) for n, part in parts.items()}
        for thread in threads.values():
            thread.start()
        for name, thread in threads.items():
            thread.join(max(0.0, self.end - time.monotonic()))
            if thread.is_alive():
                self.problems.append(name + ": did not finish before the probe's deadline")
        return self.document()

    def guard(self, name: str, part: Any) -> None:
        try:
            part()
        except Exception as error:
            self.problems.append(f"{name}: {type(error).__name__}: {error}")

    def document(self) -> str:
        """The JSON text; the largest outputs and files are dropped, aloud, until it is within its size."""
        self.values["clock_s"] = time.time()
        self.values["probe_seconds"] = round(time.monotonic() - self.started, 3)
        text = self.dump()
        while len(text) > self.options["max_bytes"] and (self.tools or self.files):
            tool = max(self.tools, key=lambda n: len(self.tools[n]["stdout"]), default="")
            size = len(self.tools[tool]["stdout"]) if tool else 0
            path = max(self.files, key=lambda p: len(self.files[p]), default="")
            if size and size >= len(self.files.get(path, "")):
                self.tools[tool].update(stdout="", stderr="", problem="its output was too large for the answer")
            elif path:
                del self.files[path]
                self.failed[path] = "too large for the answer"
            else:
                break
            text = self.dump()
        return text

    def dump(self) -> str:
        names = ("files", "links", "listings", "failed", "tools", "values", "interpreters", "problems")
        found = {name: getattr(self, name).copy() for name in names}  # copies: a late thread may still write
        return json.dumps({"schema": 1, "python": "{}.{}.{}".format(*sys.version_info), **found})

    # --- files -------------------------------------------------------------------------------------------------

    def read(self, path: str, limit: int = FILE_BYTES) -> str:
        """The content of a host's file, kept under its path; why it cannot be read is kept too."""
        try:
            with open(self.root + path, "rb") as file:
                text = file.read(limit).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return ""
        except OSError as error:
            self.failed[path] = error.strerror or str(error)
            return ""
        self.files[path] = text
        return text

    def link(self, path: str) -> None:
        if os.path.islink(self.root + path):
            self.links[path] = os.path.realpath(self.root + path)[len(self.root) :] or "/"

    def names(self, folder: str, cap: int = 1024) -> list[str]:
        try:
            return sorted(os.listdir(self.root + folder))[:cap]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.failed[folder] = error.strerror or str(error)
            return []

    def matching(self, pattern: str) -> list[str]:
        if "*" not in pattern:
            return [pattern]
        found = itertools.islice(glob.iglob(glob.escape(self.root) + pattern), 1024)
        return sorted(path[len(self.root) :] for path in found)

    def read_files(self) -> None:
        for pattern in self.want["files"]:
            for path in self.matching(pattern):
                self.read(path)
        release = self.files.get("/proc/sys/kernel/osrelease", "").strip()
        for path, lines in self.want["filtered"].items():
            path = path.replace("{release}", release)
            kept = [line for line in self.read(path, LARGE_FILE_BYTES).splitlines() if re.match(lines, line)]
            if path in self.files:
                self.files[path] = "\n".join(kept)[:TOOL_BYTES]
        for folder in self.want["folders"]:
            if os.path.isdir(self.root + folder):
                self.listings[folder] = self.names(folder)

    def tree(
        self, folder: str, files: list[str], links: list[str], folders: list[str], only: list[str], non_zero: list[str]
    ) -> None:
        """Of every entry of `folder` (a pattern) some files, links and listings.

        `only`: a file and the beginnings its content must have. `non_zero`: a folder whose empty entries are skipped,
        and the files that go with each entry that is not (GID tables have hundreds of empty slots).
        """
        for base in self.matching(folder):
            if not os.path.isdir(self.root + base):
                continue
            names = self.names(base, 8192)
            if not only:
                self.listings[base] = names
            for name in names:
                entry = base + "/" + name
                if only and not self.read(entry + "/" + only[0]).startswith(tuple(only[1:])):
                    self.files.pop(entry + "/" + only[0], None)
                    continue
                for link in links:
                    for path in self.matching((entry + "/" + link).rstrip("/")):
                        self.link(path)
                for file in files:
                    for path in self.matching(entry + "/" + file):
                        self.read(path)
                for inner in folders:
                    if os.path.isdir(self.root + entry + "/" + inner):
                        self.listings[entry + "/" + inner] = self.names(entry + "/" + inner)
                if non_zero:
                    self.table(entry, non_zero[0], non_zero[1:])

    def table(self, entry: str, folder: str, companions: list[str]) -> None:
        for index in self.names(entry + "/" + folder):
            path = entry + "/" + folder + "/" + index
            if self.read(path).strip().strip("0x:"):
                for companion in companions:
                    self.read(entry + "/" + companion + "/" + index)
            else:
                self.files.pop(path, None)

    # --- what calls tell ---------------------------------------------------------------------------------------

    def read_values(self) -> None:
        named = {n[7:].lower(): getattr(resource, n) for n in dir(resource) if n.startswith("RLIMIT_")}
        limits = {name: [plain_limit(v) for v in resource.getrlimit(kind)] for name, kind in named.items()}
        self.values.update(limits=limits, machine=os.uname().machine, affinity=len(os.sched_getaffinity(0)))
        self.values.update(uid=os.getuid(), user=os.environ.get("USER") or os.environ.get("LOGNAME"))
        wanted = "|".join([self.want["environment"], *map(re.escape, self.options["environment"])])
        self.values["environment"] = {
            name: re.sub(self.want["login"], "***", value[:4096])
            for name, value in os.environ.items()
            if re.fullmatch(wanted, name) and not re.search(self.want["secret"], name)
        }
        paths = [path for pattern in self.want["openable"] for path in self.matching(pattern)]
        there = [path for path in paths if os.path.exists(self.root + path)]
        self.values["openable"] = {path: os.access(self.root + path, os.R_OK | os.W_OK) for path in there}
        with contextlib.suppress(OSError):
            shm = os.statvfs("/dev/shm")
            self.values["shm"] = [shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail]

    def read_ipv4(self) -> None:
        """Each interface's first IPv4 address, from the kernel: minimal hosts have no `ip`."""
        if self.root:
            return  # a dressed host shows what its tools and files show
        found = {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):
                    address, mask = (fcntl.ioctl(asker, number, request)[20:24] for number in (0x8915, 0x891B))
                    prefix = bin(int.from_bytes(mask, "big")).count("1")
                    found[name] = f"{socket.inet_ntoa(address)}/{prefix}"
        self.values["ipv4"] = found

    def read_clock(self) -> None:
        """Whether the kernel believes that its clock is kept in time: adjtimex says TIME_ERROR (5) when not."""
        with contextlib.suppress(OSError, AttributeError):
            state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # modes 0: only asks
            if state >= 0:
                self.values["clock_synchronized"] = state != 5

    def read_counters_again(self) -> None:
        """Counters, and the same a while later: what grows is happening now."""
        if not self.options["again_s"]:
            return
        began, before = time.monotonic(), self.counters()
        if before:
            time.sleep(min(self.options["again_s"], max(0.0, self.end - time.monotonic() - 1.0)))
            self.values["counters_s"], after = time.monotonic() - began, self.counters()
            self.values["counters"] = {path: [text, after.get(path, "")] for path, text in before.items()}

    def counters(self) -> dict[str, str]:
        """Each counter's file as it is now, then what each counting tool prints."""
        found = {path: self.now(path) for pattern in self.want["counters"] for path in self.matching(pattern)}
        for name, tool in self.every(self.want["counting_tools"]).items():
            result = self.kept(tool, self.execute(tool["argv"], self.options["tool_timeout_s"]))
            if result["exit_code"] == 0:
                found[name] = result["stdout"]
        return found

    def now(self, path: str) -> str:
        with contextlib.suppress(OSError), open(self.root + path, encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
        return ""

    def try_folder(self, wanted: str) -> None:
        """Whether files can be written in a folder, or in the nearest one above it that is there."""
        path = os.path.abspath(os.path.expanduser(wanted))
        while not os.path.isdir(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        found: dict[str, Any] = {"asked": wanted, "path": path}
        self.values.setdefault("folders", {})[wanted] = found
        room = os.statvfs(path)
        found["bytes"] = [room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail]
        found["files"] = [room.f_files, room.f_favail]
        began, name = time.monotonic(), os.path.join(path, f".hetctl-doctor-{os.getpid()}-{time.time_ns()}")
        try:
            with open(name, "xb") as file:
                file.write(b"hetctl")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, name + ".moved")
            name += ".moved"
        except OSError as error:
            found["problem"] = error.strerror or str(error)
        with contextlib.suppress(OSError):
            os.unlink(name)
        found["seconds"] = round(time.monotonic() - began, 4)

    def resolve_own_name(self) -> None:
        try:
            found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            self.values["own_addresses"] = sorted({str(entry[4][0]) for entry in found})
        except OSError as error:
            self.failed["own name"] = str(error)

    # --- tools -------------------------------------------------------------------------------------------------

    def every(self, tools: dict[str, Any], cap: int = 32) -> dict[str, Any]:
        """The tools, those with `each` once for every port or interface: `name words` -> tool."""
        found = {}
        for name, tool in tools.items():
            pattern, start = tool["each"] or ("", "")
            paths = [path for path in self.matching(pattern) if self.now(path).startswith(start)] if pattern else []
            for words in [path.split("/") for path in paths[:cap]]:
                argv = [word.format(*words) for word in tool["argv"]]
                about = " ".join(word.format(*words) for word in tool["argv"] if "{" in word)
                other = tool["instead_of"] and tool["instead_of"] + " " + about
                found[name + " " + about] = dict(tool, argv=argv, instead_of=other)
            found.update({} if pattern else {name: tool})
        return found

    def kept(self, tool: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        if tool["keep"]:
            kept = [line for line in result["stdout"].splitlines() if re.search(tool["keep"], line)]
            result["stdout"] = "\n".join(kept)
        return result

    def tool(self, name: str, tool: dict[str, Any]) -> None:
        result = self.execute(tool["argv"], self.options["tool_timeout_s"])
        refused = re.search(r"unrecognized arguments: (.+)", result["stderr"])
        if refused and result["exit_code"]:  # an older one: asked for what it has
            known = [word for word in tool["argv"] if word not in refused.group(1).split()]
            result = self.execute(known, self.options["tool_timeout_s"])
        self.tools[name] = self.kept(tool, result)
        if result["problem"] or result["exit_code"] != 0:
            others = [(n, t) for n, t in self.want["tools"].items() if t["instead_of"] == name]
            threads = [threading.Thread(target=self.tool, args=other, daemon=True) for other in others]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, self.end - time.monotonic()))

    def execute(self, argv: list[str], timeout: float) -> dict[str, Any]:
        """Run one tool in a clean environment and its own process group; kill the group at the timeout or the cap."""
        result = {"argv": argv, "exit_code": None, "seconds": 0.0, "stdout": "", "stderr": "", "problem": ""}
        found = shutil.which(argv[0], path=self.path)
        if found is None:
            result["problem"] = "not installed"
            return result
        kept = {k: os.environ[k] for k in ("HOME", "USER", "LD_LIBRARY_PATH") if k in os.environ}
        clean = dict(kept, PATH=self.path, LC_ALL="C", PYTHONNOUSERSITE="1", PYTHONPATH="")
        began = time.monotonic()
        try:
            child = subprocess.Popen(
                [found, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=clean,
                start_new_session=True,
            )
        except OSError as error:
            result["problem"] = f"cannot be started: {error}"
            return result
        drain(child, result, began, min(timeout, self.end - began - 0.5))
        result["seconds"] = round(time.monotonic() - began, 3)
        return result

    # --- interpreters ------------------------------------------------------------------------------------------

    def interpreter(self, path: str) -> None:
        """What a Python and its packages' own metadata claim: nothing of them is imported."""
        about: dict[str, Any] = {"path": path, "packages": {}, "files": {}, "libraries": []}
        about["running"] = path == sys.executable
        self.interpreters.append(about)
        result = self.execute([os.path.expanduser(path), "-c", ABOUT], self.options["tool_timeout_s"])
        try:
            line = result["stdout"].strip().splitlines()[-1]
            about["executable"], about["version"], about["prefix"], folders = json.loads(line)
        except (ValueError, IndexError, TypeError):
            said = result["problem"] or result["stderr"].strip()[-200:] or "it printed nothing that was asked"
            about["problem"] = said
            return
        for folder in folders:
            if folder and os.path.isdir(folder):
                self.packages(folder, about)

    def packages(self, folder: str, about: dict[str, Any]) -> None:
        for entry in sorted(os.listdir(folder)):
            match = re.match(r"(.+?)-(.+?)(?:-py\d.*)?\.(?:dist-info|egg-info)$", entry)
            name = re.sub(r"[-.]+", "_", match.group(1)).lower() if match else ""
            if match and name in self.want["packages"]:
                about["packages"].setdefault(name, match.group(2))
        for name, lines in self.want["package_files"].items():
            path = os.path.join(folder, name)
            if name not in about["files"] and os.path.isfile(path):
                with open(path, "rb") as file:
                    text = file.read(LARGE_FILE_BYTES).decode("utf-8", "replace")
                about["files"][name] = "\n".join(line for line in text.splitlines() if re.match(lines, line))[:8192]
        for pattern in self.want["package_libraries"]:
            about["libraries"] += [os.path.realpath(p) for p in glob.glob(os.path.join(glob.escape(folder), pattern))]


def drain(child: subprocess.Popen[bytes], result: dict[str, Any], began: float, timeout: float) -> None:
    """Read a child's pipes into `result` until both close or the timeout.

    A wedged driver tool may leave a grandchild holding the pipe, or not die at all: neither is waited for.
    """
    chunks = {"stdout": bytearray(), "stderr": bytearray()}
    exited_at = 0.0
    with selectors.DefaultSelector() as selector:
        for name in chunks:
            selector.register(getattr(child, name), selectors.EVENT_READ, name)
        while selector.get_map() and not result["problem"]:
            for key, _ in selector.select(0.05 if exited_at else 0.2):
                data = os.read(key.fd, 65536)
                chunks[key.data] += data
                if not data:
                    selector.unregister(key.fileobj)
            if max(map(len, chunks.values())) > TOOL_BYTES:
                result["problem"] = f"printed more than {TOOL_BYTES} bytes"
            elif time.monotonic() > began + timeout:
                result["problem"] = f"timed out after {max(timeout, 0.0):.1f} s"
            elif child.poll() is not None:
                exited_at = exited_at or time.monotonic()
                if time.monotonic() - exited_at > 0.5:
                    break  # it ended; somebody else still holds its pipe
    wait(child, 0.05 if result["problem"] else 2.0)
    if child.returncode is None and not result["problem"]:
        result["problem"] = "closed its output but did not end"
    result["exit_code"] = None if result["problem"] else child.returncode
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    wait(child, 0.5)
    for name, raw in chunks.items():
        result[name] = bytes(raw[:TOOL_BYTES]).decode("utf-8", "replace")
        getattr(child, name).close()


def wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)


def plain_limit(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value
