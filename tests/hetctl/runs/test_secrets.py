"""Canaries in every place that may hold a secret: nothing of hetctl's, whatever it leaves behind, holds one."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs import netns
from tests.rigs.cluster import command, environment

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
CANARY = "canary-7f3a"
PROXY = f"http://me:{CANARY}-{{}}@proxy.test:3128"
HOSTS_OWN = {"HF_TOKEN": f"{CANARY}-1", "HTTPS_PROXY": PROXY.format(2), "NCCL_NET_TOKEN": f"{CANARY}-3"}
LAUNCHERS = {"HF_TOKEN": f"{CANARY}-4", "HTTPS_PROXY": PROXY.format(5), "WANDB_API_KEY": f"{CANARY}-6"}
INVENTORY = f"""\
schema_version: 1
defaults:
  python: {sys.executable}
  env: [HF_TOKEN, HTTPS_PROXY]
hosts:
"""
PROGRAM = "import os\nassert {0!r} in os.environ['HF_TOKEN'] and {0!r} in os.environ['HTTPS_PROXY']\n{1}\n"
FAILS = "raise SystemExit(7)"


class Onlooker:
    """Somebody else on the machine, who looks at every command line for as long as the block lasts."""

    def __enter__(self) -> Onlooker:
        self.seen: set[bytes] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for name in filter(str.isdigit, os.listdir("/proc")):
                try:
                    words = Path(f"/proc/{name}/cmdline").read_bytes()
                except OSError:
                    continue
                if CANARY.encode() in words:
                    self.seen.add(words[:400])


def holding(folder: Path) -> Iterator[str]:
    """Files that hold a canary, packed ones looked into."""
    for file in (p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        data = file.read_bytes()
        if file.suffix == ".tgz":
            with tarfile.open(file) as archive:
                members = [archive.extractfile(m) for m in archive.getmembers()]
                data = b"".join(m.read() for m in members if m)
        elif file.suffix == ".gz":
            data = gzip.decompress(data)
        if CANARY.encode() in data:
            yield str(file.relative_to(folder))


def test_no_canary_gets_out(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    with netns.hosts([netns.HostSpec(env=HOSTS_OWN)] * 2, tmp_path / "rig", rails=1) as rig, Onlooker() as onlooker:
        (mine / "inventory.yaml").write_text(INVENTORY + "".join(f"  {host.name}: {{}}\n" for host in rig.hosts))
        for name, end in (("well.py", ""), ("fails.py", FAILS)):
            (mine / name).write_text(PROGRAM.format(CANARY[:6], end))
        said, theirs = "", {*holding(tmp_path)}  # of the rig itself
        for code, words in (
            (0, ("discover", "--capture", "capture.tgz")),
            (None, ("doctor", "-o", "lists")),
            (0, ("run", "--cluster", "cluster.yaml", "--run-dir", "well", "--", "python", "well.py")),
            (1, ("run", "--cluster", "cluster.yaml", "--run-dir", "fails", "--", "python", "fails.py")),
            (None, ("doctor", "--run", "fails")),
            (0, ("train", "--emulate", "h200:1,mi325x:1", "--run-dir", "trained", "--set", "train.steps=2")),
            (0, ("report", "trained")),
            (0, ("exec", "--", "true")),
            (None, ("validate", "--cluster", "cluster.yaml", "--quick", "--only", "doctor", "--bundle", "bundle.tgz")),
        ):
            done = subprocess.run(
                command(*words),
                cwd=mine,
                env=environment(rig, **LAUNCHERS),
                text=True,
                capture_output=True,
                timeout=240,
            )
            assert code in (None, done.returncode), done.stdout + done.stderr
            said += done.stdout + done.stderr
        found = {*holding(tmp_path)} - theirs
    assert found == set()
    assert CANARY not in said
    assert onlooker.seen == set()
