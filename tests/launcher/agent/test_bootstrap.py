"""The program that is first on a host: it goes when its launcher does, also when no connection tells it so."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hetctl.launcher.agent import bootstrap
from hetctl.launcher.hosts.dialogue import BOOT
from hetctl.trainer.checkpoint import listing

PATIENCE_S = 0.5
ENTER = {"do": "enter", "run": "r", "host": "h"}


def start(tmp_path: Path, request: Mapping[str, Any] = ENTER) -> subprocess.Popen[bytes]:
    """It, with little patience, asked to enter a run, or something else."""
    source = inspect.getsource(bootstrap).replace(f"PATIENCE_S = {bootstrap.PATIENCE_S}", f"PATIENCE_S = {PATIENCE_S}")
    assert f"PATIENCE_S = {PATIENCE_S}" in source
    program = f"scope={{}};exec({source!r},scope);scope['main']({json.dumps(request)!r})\n"
    env, pipe = {"HOME": str(tmp_path)}, subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-I", "-c", BOOT], env=env, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    process.stdin.write(program.encode())
    process.stdin.flush()
    return process


def test_a_launcher_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    """Its stdin stays open, as when the network between them is cut."""
    process = start(tmp_path)
    assert process.wait(30) == 1
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "host"


def test_a_damaged_bundle_is_not_taken_in(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "host"
    told, _ = process.communicate(json.dumps({"do": "bundle", "digest": "0" * 24, "zip": "AAAA"}).encode() + b"\n", 30)
    assert process.returncode == 1
    assert "arrived damaged" in told.decode()
    assert not list(tmp_path.rglob("*.py"))


def test_base_folders_that_are_relative_are_ignored_as_agents_stand_in_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        monkeypatch.setenv("XDG_STATE_HOME", given)
        assert (bootstrap.cache_home(), bootstrap.state_home()) == (f"{tmp_path}/.cache", f"{tmp_path}/.local/state")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert bootstrap.cache_home() == "/elsewhere"


def take(tmp_path: Path, root: Path, names: list[str], own: Path, sent: bytes | None) -> list[dict[str, Any]]:
    """What a host says that is asked to take in files under `root`, having perhaps its own; `sent` is given to it."""
    files = [[name, (root / name).stat().st_size] for name in names]
    digest = bootstrap.digest_of(str(root), files)
    process = start(tmp_path, {"do": "take", "digest": digest, "files": files, "path": str(own)})
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    rest, _ = process.communicate(sent, 30)
    return [first, *map(json.loads, rest.splitlines())]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "a").write_bytes(b"abc")
    (tmp_path / "mine" / "deep" / "b").write_bytes(b"x" * 100_000)
    return tmp_path / "mine"


def test_data_that_a_host_lacks_are_taken_in_once(tmp_path: Path, mine: Path) -> None:
    content = b"abc" + b"x" * 100_000
    first, took = take(tmp_path, mine, ["a", "deep/b"], tmp_path / "nowhere", content)
    assert (first["folder"], took["kept_bytes"]) == (None, 100_003)
    there = Path(took["folder"])
    assert there.parent == tmp_path / ".cache" / "hetctl" / "data"
    assert (there / "deep" / "b").read_bytes() == b"x" * 100_000
    assert oct(there.stat().st_mode & 0o777) == "0o700"
    (again,) = take(tmp_path, mine, ["a", "deep/b"], tmp_path / "nowhere", None)
    assert again["folder"] == str(there)


def test_a_host_s_own_copy_is_used_where_it_is_the_same(tmp_path: Path, mine: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "a").write_bytes(b"abc")
    (said,) = take(tmp_path, mine, ["a"], own, None)
    assert said["folder"] == str(own)
    (own / "a").write_bytes(b"abd")
    first, took = take(tmp_path, mine, ["a"], own, b"abc")
    assert first["folder"] is None
    assert Path(took["folder"], "a").read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("sent", "why"), [(b"abd", "damaged"), (b"ab", "went away"), (None, "went away")], ids=["damaged", "cut", "nothing"]
)
def test_data_that_do_not_arrive_whole_leave_nothing(tmp_path: Path, mine: Path, sent: bytes | None, why: str) -> None:
    _, said = take(tmp_path, mine, ["a"], tmp_path / "nowhere", sent)
    assert why in said["reason"]
    assert list((tmp_path / ".cache" / "hetctl" / "data").iterdir()) == []


def test_data_without_room_are_refused_before_they_travel(tmp_path: Path, mine: Path) -> None:
    process = start(tmp_path, {"do": "take", "digest": "d", "files": [["a", 1 << 60]], "path": "/nowhere"})
    told, _ = process.communicate(None, 30)
    assert "1,152,921,504,607 MB are needed" in json.loads(told)["reason"]


def test_old_code_that_another_host_of_the_same_home_removes_meanwhile_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("mine", ".new-theirs"):
        Path(bootstrap.place(name)).mkdir(parents=True)
    listed = list(os.scandir(bootstrap.place("")))
    Path(bootstrap.place(".new-theirs")).rmdir()
    monkeypatch.setattr(bootstrap.os, "scandir", lambda folder: iter(listed))
    bootstrap.prune("mine")
    assert Path(bootstrap.place("mine")).is_dir()


def test_what_a_program_wrote_beside_itself_outlives_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(12):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("train.py", f"print({number})")
        digest = hashlib.sha256(packed.getvalue()).hexdigest()[:24]
        bootstrap.unpack(packed.getvalue(), digest)
        folder = Path(bootstrap.place(digest))
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "train.pyc").touch()
        if number < 2:
            (folder / f"model{number}.pt").write_text("a week's work")
        elif number == 2:
            os.utime(folder / "train.py")  # as an older hetctl left it
        os.utime(folder, (number, number))
    left = {p.name for p in Path(bootstrap.place("")).glob("*/*") if p.is_file()}
    assert left == {"train.py", "model0.pt", "model1.pt"}
    assert len(list(Path(bootstrap.place("")).iterdir())) == 2 + bootstrap.KEEP_BUNDLES


def test_what_a_killed_process_left_half_made_goes_with_the_next_one_and_what_another_makes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Path(bootstrap.place("")).mkdir(parents=True)
    mine = Path(bootstrap.half_made(bootstrap.place("")))
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    killed = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{gone.pid}-"))
    elsewhere, old = killed.with_name(killed.name.replace(".new-", ".new-x")), mine.with_name(".new-abcd1234")
    for folder in (killed, elsewhere, old):
        (folder / "code").mkdir(parents=True)
    os.utime(old, (0, 0))
    bootstrap.sweep(bootstrap.place(""))
    assert {p.name for p in mine.parent.iterdir()} == {mine.name, elsewhere.name}


def test_a_host_whose_first_checkpoint_was_not_named_yet_says_so(tmp_path: Path) -> None:
    assert bootstrap.checkpoints(str(tmp_path / "none")) == []
    assert bootstrap.checkpoints(str(tmp_path)) == []
    (tmp_path / listing.BEGUN).touch()
    assert bootstrap.checkpoints(str(tmp_path)) == [listing.name_of(0)]
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / listing.MANIFEST).write_text("{}")
    assert bootstrap.checkpoints(str(tmp_path)) == ["step-00000001"]


GUARDED = """
import os, socket, sys, time
path = sys.argv[1]
if os.fork():
    os.wait()
    time.sleep(0.5)
    sys.exit()
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
visitor, _ = listener.accept()
visitor.sendall(b"attached\\n")
visitor.recv(1)  # of more: what it leaves unread makes its end a reset
os.unlink(path)
visitor.close()
time.sleep(0.5)
"""


def test_who_joined_a_running_agent_ends_after_its_guardian(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    guardian = subprocess.Popen([sys.executable, "-c", GUARDED, str(path)])
    while not path.exists():
        time.sleep(0.01)
    joined = start(tmp_path, {"do": "attach", "socket": str(path)})
    assert joined.stdout is not None
    assert joined.stdout.readline() == b"attached\n"
    joined.communicate(b"a beat, and another one", 30)
    assert guardian.poll() == 0
    assert joined.returncode == 0
