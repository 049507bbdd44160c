"""Two virtual machines with Soft-RoCE, joined by two rails: hosts with real RDMA devices for the probe and the bridge.

They run under software emulation (a stock kernel, no KVM): right about what happens, silent about how fast. Rails are
unix sockets between the two, SSH comes in over a forwarded port of this machine's loopback; nothing gets out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "build" / "rdma"
QEMU = "qemu-system-x86_64"
RAILS = 2
BOOT_SECONDS = 240.0  # eight when nothing else runs
MEMORY_MIB = 3072
_KEEP = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=60", "-o", "ServerAliveInterval=30")


@dataclass(frozen=True)
class Machine:
    """One of the two; `number` is the last byte of its address on each rail 10.77.R."""

    number: int
    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return f"rig{self.number}"

    def address(self, rail: int = 0) -> str:
        return f"10.77.{rail}.{self.number}"

    def run(
        self, *argv: str, stdin: bytes | None = None, check: bool = True, timeout: float = 300
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a shell line in the machine; with `check`, raise with what it said when it fails."""
        done = subprocess.run([*self.ssh, " ".join(argv)], input=stdin or b"", capture_output=True, timeout=timeout)
        if check and done.returncode:
            said = (done.stdout + done.stderr).decode(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name}: {' '.join(argv)[:200]}: exit {done.returncode}: {said}")
        return done

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a shell line in the machine; its output is the process's."""
        return subprocess.Popen(
            [*self.ssh, " ".join(argv)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    @property
    def ssh(self) -> list[str]:
        return ["ssh", "-F", str(self.folder.parent / "home" / ".ssh" / "config"), *_KEEP, self.name]

    def plug(self, rail: int, *, on: bool) -> None:
        """Pull or push the cable of a rail."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(20)
            monitor.connect(str(self.folder / "monitor"))
            _until(monitor, b"(qemu) ")
            monitor.sendall(f"set_link rail{rail} {'on' if on else 'off'}\n".encode())
            _until(monitor, b"(qemu) ")


@dataclass(frozen=True)
class Pair:
    """The two machines, and a home folder whose .ssh knows them."""

    machines: tuple[Machine, Machine]
    home: Path


def unavailable() -> str:
    """Why the machines cannot be run here, '' when they can."""
    missing = [tool for tool in (QEMU, "ssh") if not shutil.which(tool)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not (IMAGE / "disk.img").exists():
        return "the machines' image is not built: make test-rdma"
    return ""


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    """Both machines, up and reachable, as long as the block lasts; their disks forget what was written."""
    with tempfile.TemporaryDirectory(prefix="hetrig-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        ports = [_free_port(), _free_port()]
        home = _home(folder, ports)
        machines = []
        for number in (1, 2):
            machine = _boot(number, ports[number - 1], folder)
            stack.callback(_stop, machine)
            machines.append(machine)
        for machine in machines:
            _await(machine)
        yield Pair((machines[0], machines[1]), home)


def _home(folder: Path, ports: Sequence[int]) -> Path:
    ssh = folder / "home" / ".ssh"
    ssh.mkdir(parents=True, mode=0o700)
    shutil.copy(IMAGE / "user", ssh / "id_ed25519")
    (ssh / "id_ed25519").chmod(0o600)
    key = " ".join((IMAGE / "host.pub").read_text().split()[:2])
    hosts = [f"Host rig{n}\n  HostName 127.0.0.1\n  Port {port}\n" for n, port in enumerate(ports, 1)]
    common = (
        f"Host *\n  User root\n  IdentityFile {ssh}/id_ed25519\n  UserKnownHostsFile {ssh}/known_hosts\n"
        f"  StrictHostKeyChecking yes\n  BatchMode yes\n"
    )
    (ssh / "config").write_text("".join(hosts) + common)
    (ssh / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {key}\n" for port in ports))
    return folder / "home"


def _boot(number: int, port: int, folder: Path) -> Machine:
    own = folder / f"rig{number}"
    own.mkdir()
    rails: list[str] = []
    for rail in range(RAILS):
        way = f"addr.type=unix,addr.path={folder}/rail{rail}"
        server = "on" if number == 1 else "off"
        rails += ["-netdev", f"stream,id=rail{rail},server={server},{way}"]
        rails += ["-device", f"virtio-net-pci,netdev=rail{rail},mac=52:54:00:77:{rail:02x}:{number:02x}"]
    inward = f"hostfwd=tcp:127.0.0.1:{port}-10.78.{number}.15:22"
    outside = f"user,id=outside,restrict=on,ipv6=off,net=10.78.{number}.0/24,{inward}"
    command = [
        *(QEMU, "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-m", str(MEMORY_MIB), "-smp", "2"),
        *("-nographic", "-no-reboot", "-nodefaults", "-serial", f"file:{own}/console", "-snapshot"),
        *("-kernel", str(IMAGE / "vmlinuz"), "-initrd", str(IMAGE / "initrd.gz")),
        *("-append", f"console=ttyS0 quiet panic=-1 mitigations=off nokaslr net.ifnames=0 rig={number}"),
        *(
            "-drive",
            f"file={IMAGE}/disk.img,if=virtio,format=raw",
            "-monitor",
            f"unix:{own}/monitor,server=on,wait=off",
        ),
        *rails,
        *("-netdev", outside, "-device", "virtio-net-pci,netdev=outside", "-device", "virtio-rng-pci"),
    ]
    with (own / "qemu").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_go_with_parent,
        )
    machine = Machine(number, port, own, process)
    if number == 1:  # the second one calls its sockets
        _wait(machine, lambda: all((folder / f"rail{rail}").exists() for rail in range(RAILS)))
    return machine


def _go_with_parent() -> None:
    """However the tests end, a machine does not outlive them."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _await(machine: Machine) -> None:
    """Until its sshd answers, which it does after everything else is up."""
    _wait(machine, lambda: machine.run("true", check=False, timeout=90).returncode == 0)


def _wait(machine: Machine, there: object) -> None:
    assert callable(there)
    end = time.monotonic() + BOOT_SECONDS
    while not there():
        if machine.process.poll() is not None or time.monotonic() > end:
            logs = [machine.folder / name for name in ("qemu", "console")]
            said = "".join(log.read_text(errors="replace")[-1500:] for log in logs if log.exists())
            raise RuntimeError(f"{machine.name} does not come up: {said}")
        time.sleep(0.2)


def _stop(machine: Machine) -> None:
    machine.process.kill()  # its disk is a snapshot: nothing is lost
    machine.process.wait(30)


def _until(sock: socket.socket, word: bytes) -> bytes:
    said = b""
    while not said.endswith(word):
        part = sock.recv(4096)
        if not part:
            raise OSError("the machine's monitor was closed")
        said += part
    return said


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":  # a pair to look at by hand: python -m tests.rdma.vms
    with pair() as running:
        print(f"HOME={running.home}; ssh -F {running.home}/.ssh/config rig1 (or rig2); Enter ends both", flush=True)
        with contextlib.suppress(KeyboardInterrupt, EOFError):
            input() if os.isatty(0) else running.machines[0].process.wait()
