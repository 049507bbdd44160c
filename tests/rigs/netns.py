"""Real hosts in one machine: network namespaces joined by bridges, a real sshd in each, throw-away keys.

Everything is named after this process, made by it and removed by it; nothing else is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs.dress import Dress

SSHD = "/usr/sbin/sshd"
PYTHON = os.path.realpath(sys.executable)  # of the hosts: whatever runs the tests, outside any virtual environment
_COUNTER = itertools.count()
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class HostSpec:
    """How one host should be.

    `name` is its alias in the rig's ssh config, made up where none is given. `tools` are executables (name -> script)
    that come first in its PATH; `force` is what its sshd runs instead of what is asked for (the question is
    in $SSH_ORIGINAL_COMMAND); `behind` is the number of the host that alone can reach it.
    """

    name: str = ""
    tools: Mapping[str, str] = field(default_factory=dict)
    force: str = ""
    banner: str = ""
    behind: int | None = None
    sshd: bool = True
    other_key: bool = False  # known_hosts holds another key than it shows
    known: bool = True  # known_hosts holds a key for it at all
    env: Mapping[str, str] = field(default_factory=dict)
    hide: tuple[str, ...] = ()  # folders of this machine that are empty there: nothing is shared through them
    home_mib: int = 0  # the size of its HOME's own file system; 0: a folder of this machine


@dataclass(frozen=True)
class RigHost:
    """A running host: `name` is an alias in the rig's ssh config."""

    name: str
    namespace: str
    address: str
    folder: Path
    log: Path
    rails: tuple[str, ...] = ()  # its addresses on the shaped rails

    def run(self, *argv: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command inside the host, without SSH."""
        command = ["ip", "netns", "exec", self.namespace, *argv]
        return subprocess.run(command, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload,no-any-return]

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a command inside the host; it is killed with the rig at the latest."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *argv], start_new_session=True)

    def pids(self) -> list[int]:
        """Every process that lives in the host's network namespace."""
        mine, found = os.stat(f"/run/netns/{self.namespace}").st_ino, []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.stat(f"/proc/{name}/ns/net").st_ino == mine:
                    found.append(int(name))
        return found


@dataclass(frozen=True)
class Rig:
    """The hosts, and a home folder whose .ssh knows them (set HOME to it, or pass `config` to ssh -F)."""

    hosts: tuple[RigHost, ...]
    home: Path

    @property
    def config(self) -> Path:
        return self.home / ".ssh" / "config"

    @property
    def known_hosts(self) -> Path:
        return self.home / ".ssh" / "known_hosts"


def dressed_python(dress: Dress, python: str | Path = PYTHON) -> str:
    """A `python3` for HostSpec.tools that lets the probe see the fake root and the recorded tools."""
    edit = f's|"root": ""|"root": "{dress.root}"|; s|"path": ""|"path": "{dress.tools}"|'
    return f'#!/bin/sh\n[ "$2" = - ] || exec {python} "$@"\nsed \'{edit}\' | exec {python} -I -\n'


@functools.cache
def ready(why_not: str | None = None) -> bool:
    """Of a program over such hosts: whether it can run, else says why not. TERM then ends it together with its rig."""
    if why_not := unavailable() if why_not is None else why_not:
        print(f"not run: {why_not}")
        return False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return True


def unavailable() -> str:
    """Why namespaced hosts cannot be made here and what to do about it, '' when they can."""
    missing = [tool for tool in ("ip", "ssh-keygen", SSHD) if not shutil.which(tool)]
    if missing:
        return f"real hosts need {', '.join(missing)}: as root, apt-get install openssh-server iproute2"
    if os.geteuid() != 0:
        return "real hosts live in network namespaces: run the tests as root"
    probe = f"hs{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    bridge = subprocess.run(["ip", "link", "add", probe, "type", "bridge"], capture_output=True, text=True)
    _ip("netns", "del", probe)
    if bridge.returncode:
        return f"bridges are not permitted: {bridge.stderr.strip()}"
    _ip("link", "del", probe)
    return ""


@contextlib.contextmanager
def hosts(specs: Sequence[HostSpec] | int, folder: Path, *, rails: int = 0, rate: str | None = None) -> Iterator[Rig]:
    """Run hosts as long as the block lasts. `rails` adds that many networks, each shaped to `rate` (1gbit)."""
    specs = [HostSpec()] * specs if isinstance(specs, int) else specs
    maker = _Maker(list(specs), folder, rails, rate)
    try:
        yield maker.make()
    finally:
        maker.remove()


class _Maker:
    """Makes a rig step by step and remembers each thing it made, so that all of it goes away whatever fails."""

    def __init__(self, specs: list[HostSpec], folder: Path, rails: int, rate: str | None) -> None:
        self.specs, self.folder, self.rails, self.rate = specs, folder, rails, rate
        self.prefix = f"hs{os.getpid()}{'abcdefghijklmnopqrstuvwxyz'[next(_COUNTER) % 26]}"
        self.net: tuple[str, ...] = ()
        self.servers: list[subprocess.Popen[bytes]] = []
        self.namespaces: list[str] = []
        self.links: list[str] = []

    def make(self) -> Rig:
        home = self.folder / "home"
        (home / ".ssh").mkdir(parents=True, mode=0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host", "other", "user"):
            _quiet("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / name))
        shutil.copy(self.folder / "user", home / ".ssh" / "id_ed25519")
        with _only_one():
            self.net = _free_block()
            bridges = [self._bridge(n) for n in range(self.rails + 1)]
        running = tuple(self._host(i, spec, bridges) for i, spec in enumerate(self.specs))
        _write_ssh_files(home, running, self.specs, self.folder)
        for host, spec in zip(running, self.specs, strict=True):
            if spec.sshd and spec.behind is None:
                await_port(host.address)
        return Rig(running, home)

    def remove(self) -> None:
        for server in self.servers:
            server.terminate()
        for namespace in self.namespaces:
            found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
            for pid in found.stdout.split():  # they live in a namespace of ours: they are ours
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for server in self.servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)
        for namespace in self.namespaces:
            _ip("netns", "del", namespace, check=False)
        for link in self.links:
            _ip("link", "del", link, check=False)

    def _bridge(self, number: int) -> str:
        name = f"{self.prefix}b{number}"
        self.links.append(name)
        _ip("link", "add", name, "type", "bridge")
        _ip("addr", "add", f"{self.net[number]}.254/24", "dev", name)
        _ip("link", "set", name, "up")
        return name

    def _host(self, i: int, spec: HostSpec, bridges: Sequence[str]) -> RigHost:
        namespace = f"{self.prefix}n{i}"
        self.namespaces.append(namespace)
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        folder = self.folder / f"h{i}"
        (folder / "bin").mkdir(parents=True)
        (folder / "home").mkdir()
        if "python3" not in spec.tools:
            (folder / "bin" / "python3").symlink_to(PYTHON)
        for name, script in spec.tools.items():
            (folder / "bin" / name).write_text(script)
            (folder / "bin" / name).chmod(0o755)
        if spec.behind is None:
            address = self._plug(namespace, "eth0", f"{self.prefix}v{i}", bridges[0], f"{self.net[0]}.{i + 1}")
        else:
            address = self._tuck(namespace, f"{self.prefix}n{spec.behind}", i)
        rails = tuple(
            self._plug(
                namespace, f"rail{r}", f"{self.prefix}r{r}v{i}", bridge, f"{self.net[r + 1]}.{i + 1}", shaped=True
            )
            for r, bridge in enumerate(bridges[1:])
        )
        host = RigHost(spec.name or f"{self.prefix}h{i}", namespace, address, folder, folder / "sshd.log", rails)
        if spec.sshd:
            self._serve(host, spec)
        return host

    def _plug(self, space: str, nic: str, outer: str, bridge: str, address: str, *, shaped: bool = False) -> str:
        """A veth from a bridge into a namespace; deleting the namespace deletes both ends."""
        _ip("link", "add", outer, "type", "veth", "peer", "name", nic, "netns", space)
        _ip("link", "set", outer, "master", bridge, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", nic)
        _ip("-n", space, "link", "set", nic, "up")
        if shaped and self.rate:
            shape = shaping(self.rate)
            _quiet("tc", "qdisc", "add", "dev", outer, *shape)
            _quiet("tc", "-n", space, "qdisc", "add", "dev", nic, *shape)
        return address

    def _tuck(self, space: str, gate: str, i: int) -> str:
        """A namespace that only `gate` can reach."""
        block = f"{self.net[0].rsplit('.', 1)[0]}.{200 + i}"
        _ip("-n", gate, "link", "add", f"to{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", gate, "addr", "add", f"{block}.1/24", "dev", f"to{i}")
        _ip("-n", gate, "link", "set", f"to{i}", "up")
        _ip("-n", space, "addr", "add", f"{block}.2/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        return f"{block}.2"

    def _serve(self, host: RigHost, spec: HostSpec) -> None:
        # a HOME of its own: no shell start-up file of this machine speaks on the host
        settings = {"PATH": f"{host.folder / 'bin'}:{_PATH}", "HOME": str(host.folder / "home"), **spec.env}
        key = self.folder / "host" if spec.known else host.folder / "key"
        if not spec.known:  # whoever compares fingerprints sees one of its own
            _quiet("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        lines = [
            f"ListenAddress {host.address}:22",
            f"HostKey {key}",
            f"PidFile {host.folder / 'sshd.pid'}",
            f"AuthorizedKeysFile {self.folder / 'user.pub'}",
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUseDNS no",
            "PermitRootLogin prohibit-password\nPrintMotd no\nPrintLastLog no\nMaxStartups 200",
            "Subsystem sftp internal-sftp",
            "SetEnv " + " ".join(f'{k}="{v}"' for k, v in settings.items()),
        ]
        if spec.force:
            (host.folder / "force").write_text(spec.force)
            (host.folder / "force").chmod(0o755)
            lines.append(f"ForceCommand {host.folder / 'force'}")
        if spec.banner:
            (host.folder / "banner").write_text(spec.banner)
            lines.append(f"Banner {host.folder / 'banner'}")
        config = host.folder / "sshd_config"
        config.write_text("\n".join(lines) + "\n")
        mounts = [f"mount -t tmpfs -o mode=755 none {shlex.quote(path)}; " for path in spec.hide]
        if spec.home_mib:
            mounts.append(f"mount -t tmpfs -o size={spec.home_mib}m none {shlex.quote(settings['HOME'])}; ")
        server = "".join(mounts) + shlex.join(["exec", SSHD, "-D", "-f", str(config), "-E", str(host.log)])
        command = ["ip", "netns", "exec", host.namespace, "sh", "-c", server]
        self.servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))


def _write_ssh_files(home: Path, running: Sequence[RigHost], specs: Sequence[HostSpec], folder: Path) -> None:
    keys = {name: (folder / f"{name}.pub").read_text().rsplit(" ", 1)[0] for name in ("host", "other")}
    known, config = [], []
    for host, spec in zip(running, specs, strict=True):
        if spec.known:
            known.append(f"{host.address} {keys['other' if spec.other_key else 'host']}\n")
        config.append(f"Host {host.name}\n  HostName {host.address}\n")
        if spec.behind is not None:
            config.append(f"  ProxyJump {running[spec.behind].name}\n")
    config.append(
        f"Host *\n  User root\n  IdentityFile {home}/.ssh/id_ed25519\n  UserKnownHostsFile {home}/.ssh/known_hosts\n"
        "  StrictHostKeyChecking yes\n  BatchMode yes\n"
    )
    (home / ".ssh" / "known_hosts").write_text("".join(known))
    (home / ".ssh" / "config").write_text("".join(config))


def shaping(rate: str) -> list[str]:
    """What tc is told to hold a device to a rate: bursts of what a millisecond carries."""
    burst = max(256, _megabits(rate) // 8)
    return ["root", "tbf", "rate", rate, "burst", f"{burst}kb", "latency", "50ms"]


def _megabits(rate: str) -> int:
    """1gbit, 500mbit -> megabits per second."""
    number, unit = rate[:-4], rate[-4:]
    return int(float(number) * {"gbit": 1000, "mbit": 1}[unit])


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Of all processes that test here: a network is taken once its bridge has an address."""
    with open(Path(tempfile.gettempdir()) / "hetctl-test-networks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_block() -> tuple[str, ...]:
    """First three bytes of /24 networks inside a /16 that no route of this machine touches."""
    shown = subprocess.run(["ip", "-j", "-4", "route", "show", "table", "all"], capture_output=True, text=True).stdout
    taken = [r["dst"] for r in json.loads(shown or "[]") if r["dst"] not in ("default", "0.0.0.0/0")]
    used = [ipaddress.ip_network(dst, strict=False) for dst in taken]
    for step in range(128):
        second = 64 + (os.getpid() + step) % 128
        block = ipaddress.ip_network(f"10.{second}.0.0/16")
        if not any(block.overlaps(other) for other in used if other.version == 4):
            return tuple(f"10.{second}.{third}" for third in range(64))
    raise OSError("no free network for the rig")


def await_port(address: str) -> None:
    """Until the host's sshd listens."""
    end = time.monotonic() + 120
    while True:
        try:
            socket.create_connection((address, 22), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _ip(*words: str, check: bool = True) -> None:
    _quiet("ip", *words, check=check)


def _quiet(*argv: str, check: bool = True) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if check and done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
