"""`hetctl validate` as a volunteer runs it: to the end on CPU processes, and when claims crash, hang or are stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from hetctl.app import main
from hetctl.validate.table import CLAIMS
from tests.busy import busy

ROOT = Path(__file__).resolve().parents[3]
SMALL = ("--emulate", "cpu:1,cpu:1", "--quick")
# in place of what claims do; hetctl puts the code before it on the path
BROKEN = """
import os, sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    from dataclasses import replace
    from pathlib import Path
    from hetctl.validate import table
    def crash(*_): os.abort()
    def hang(*_):
        Path(os.environ["HANGING"]).write_text(str(os.getpid())); time.sleep(600)
    def leave(*_): print("the last words"); os._exit(0)
    def break_(*_): raise KeyError("what")
    for name, check in {"numerics.gate": crash, "bridge.shm": hang, "bridge.tcp": leave, "parity.data": break_}.items():
        table.BY_ID[name] = replace(table.BY_ID[name], measure=check)
"""


def validate(folder: Path, *argv: str, **more: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(folder)])
    command = [sys.executable, "-m", "hetctl", "validate", *argv]
    environment = {**os.environ, "PYTHONPATH": path, **more}
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=400)


@pytest.mark.slow
def test_to_the_end_with_a_bundle(tmp_path: Path) -> None:
    some = "discovery,numerics,engine,bridge.tcp,bridge.direct,parity.pipeline"
    done = validate(
        tmp_path, *SMALL, "--only", some, "--bundle", "out.tgz", "--json", MY_API_TOKEN="fourscore-and-seven"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    verdicts = {c["id"]: c["verdict"] for c in found["claims"]}
    holding = {"numerics.gate", "bridge.tcp", "parity.pipeline"}
    assert {i for i, v in verdicts.items() if v == "holds"} == holding
    assert all(v == "not applicable" for i, v in verdicts.items() if i not in holding)
    by_id = {c["id"]: c for c in found["claims"]}
    assert by_id["parity.pipeline"]["figures"]["worst_deviation"] < 1e-10
    assert by_id["bridge.tcp"]["says"].startswith("cpu - cpu#2: 8 sums and 8 messages are exact")
    assert "packing" in done.stderr
    assert "✓ holds, x does not hold" in done.stderr
    _check_bundle(tmp_path)


def _check_bundle(folder: Path) -> None:
    with tarfile.open(folder / "out.tgz") as archive:
        archive.extractall(folder / "out", filter="data")
    below = folder / "out/hetctl-validation"
    files = {p.relative_to(below).as_posix(): p.read_text() for p in below.rglob("*") if p.is_file()}
    assert {"report.md", "report.json", "versions.json", "inventory.json"} < files.keys()
    assert "evidence/bridge.tcp/cpu-cpu-2/bench.json" in files
    assert "evidence/parity.pipeline/ranks/one-process/rank-0.log" in files
    assert json.loads(files["report.json"])["hosts"] == ["host-1"]
    assert json.loads(files["versions.json"])["host-1"]["interpreters"][0]["torch"]
    everything = "\n".join([*files, *files.values()])
    assert "fourscore-and-seven" not in everything
    for name, addresses in psutil.net_if_addrs().items():
        for address in (a.address.partition("%")[0] for a in addresses if name != "lo"):
            if address.strip("0:"):
                assert address.lower() not in everything.lower()
    words = everything.replace('"', " ").replace(":", " ").split()
    assert socket.gethostname() not in words


def test_one_claim_that_breaks_never_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    hanging, began, limit = tmp_path / "pid", time.monotonic(), str(round(15 * busy()))
    some = "numerics,bridge,parity.data"
    done = validate(tmp_path, *SMALL, "--only", some, "--timeout", limit, "--json", HANGING=str(hanging))
    assert done.returncode == 3, done.stderr
    found = {c["id"]: c for c in json.loads(done.stdout)["claims"]}
    judged = {i: c["verdict"] for i, c in found.items() if c["verdict"] != "not applicable"}
    assert judged == dict.fromkeys(("numerics.gate", "bridge.shm", "bridge.tcp", "parity.data"), "could not tell")
    assert "signal 6" in found["numerics.gate"]["says"]
    assert f"did not end within {limit} s" in found["bridge.shm"]["says"]
    assert "the last words" in found["bridge.tcp"]["says"]
    assert "KeyError" in found["parity.data"]["says"]
    assert not psutil.pid_exists(int(hanging.read_text()))
    assert time.monotonic() - began < 200 * busy()


def test_an_interruption_ends_the_claim_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    hanging = tmp_path / "pid"
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    argv = [sys.executable, "-m", "hetctl", "validate", *SMALL, "--only", "bridge.shm", "--bundle", "out.tgz"]
    environment = {**os.environ, "PYTHONPATH": path, "HANGING": str(hanging)}
    running = subprocess.Popen(argv, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while not (hanging.exists() and hanging.read_text()) and time.monotonic() < end and running.poll() is None:
        time.sleep(0.05)  # another process writes it
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=400)
    assert running.returncode == 143, said
    assert "the validation was interrupted" in said
    assert not psutil.pid_exists(int(hanging.read_text()))
    assert not (tmp_path / "out.tgz").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--only", "bridge.tpc"), "did you mean 'bridge.tcp'"),
        (("--bundle", "there.tgz"), "exists already"),
        (("--bundle", "nowhere/out.tgz"), "no folder"),
        (("--cluster", "c.yaml", "--emulate", "cpu:1,cpu:1"), "exclude each other"),
        (("--cluster", "c.yaml"), "no cluster file"),
        (("--timeout", "0"), "--timeout"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(
    tmp_path: Path,
    argv: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "there.tgz").write_bytes(b"mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hetctl", "validate", *argv])
    with pytest.raises(SystemExit, check=lambda error: error.code == 2):
        main()
    assert says in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "there.tgz").read_bytes() == b"mine"


def test_the_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hetctl", "validate", "--list", "--json"])
    with pytest.raises(SystemExit, check=lambda error: error.code == 0):
        main()
    assert [c["id"] for c in json.loads(capsys.readouterr().out)] == [c.id for c in CLAIMS]
