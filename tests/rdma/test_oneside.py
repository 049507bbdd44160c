"""What makes it RDMA: a stopped process's memory is written all the same; and memory no NIC takes is refused."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest

from tests.rdma.vms import ROOT, Machine, Pair

pytestmark = pytest.mark.timeout(1500)
RUN = "cd /tmp/code && exec python3 programs/oneside.py"


@pytest.fixture(scope="module")
def shipped(machines: Pair) -> tuple[Machine, Machine]:
    """Both machines, with hetctl.comm and the programs in /tmp/code."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        archive.add(ROOT / "hetctl" / "__init__.py", "hetctl/__init__.py")
        archive.add(ROOT / "comm", "hetctl/comm", filter=lambda m: None if "__pycache__" in m.name else m)
        archive.add(Path(__file__).parent / "programs", "programs")
    for machine in machines.machines:
        machine.run("mkdir -p /tmp/code && tar x -C /tmp/code", stdin=packed.getvalue())
    return machines.machines


def command(engine: str, role: str, machine: Machine, *peer: str) -> str:
    words = " ".join((role, engine, "rxe0:1", machine.address(), *peer))
    return f"export PYTHONPATH=/tmp/code; {RUN} {words} 2>/tmp/{role}.errors"


def test_a_stopped_process_receives_and_a_dead_one_is_noticed(shipped: tuple[Machine, Machine], engine: str) -> None:
    there, here = shipped
    target = there.start(command(engine, "target", there))
    writer = here.start(command(engine, "writer", here, there.address()))
    assert writer.stdin
    assert target.stdout
    assert writer.stdout
    try:
        assert target.stdout.readline() == b"warm True\n", there.run("cat /tmp/target.errors").stdout
        assert writer.stdout.readline() == b"asking\n", here.run("cat /tmp/writer.errors").stdout
        there.run("kill -STOP $(pgrep -f 'oneside.py target' | head -1)")
        writer.stdin.write(b"\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == b"written\n", here.run("cat /tmp/writer.errors").stdout
        state = there.run("ps -o state= -p $(pgrep -f 'oneside.py target' | head -1)").stdout
        assert state.strip() == b"T"
        found = there.run("python3 -c \"print(set(open('/dev/shm/target', 'rb').read()))\"").stdout
        assert found == b"{9}\n", "bytes were served by the stopped process"
        there.run("pkill -KILL -f 'oneside.py target'")
        there.run("while pgrep -f '[o]neside.py target'; do sleep 0.2; done")  # a slow machine takes a while to end it
        writer.stdin.write(b"\n")
        writer.stdin.flush()
        lost = writer.stdout.readline().decode()
        if engine == "mooncake" and not lost:
            errors = here.run("cat /tmp/writer.errors").stdout.decode()
            assert "the write does not end" in errors, errors
            pytest.xfail(
                "Mooncake's write to a killed process does not end by itself: the control connection tells `het`"
            )
        assert re.match(r"lost: a transfer of \w+ failed", lost), lost
        assert writer.stdout.readline() == b"registered 0\n"
        pid = here.run("pgrep -f 'oneside.py writer' | tail -1").stdout.decode().strip()
        kept = here.run("rdma resource show mr", check=False).stdout.decode()
        assert f"pid {pid} " not in kept, kept
    finally:
        there.run("pkill -KILL -f 'oneside.py target'", check=False)
        for process in (writer, target):
            process.kill()
            process.wait()


def test_memory_of_a_pci_device_is_refused_by_name(shipped: tuple[Machine, Machine], engine: str) -> None:
    machine = shipped[0]
    said = machine.run(f"({command(engine, 'bar', machine)}); cat /tmp/bar.errors", timeout=600).stdout.decode()
    assert "host memory True" in said
    assert re.search(r"refused: \w+ does not register \d+ bytes of host memory", said), said
