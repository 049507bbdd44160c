"""The program that is first on a host: it goes when its launcher does, also when no connection tells it so."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetctl.launcher.agent import bootstrap
from hetctl.launcher.hosts.dialogue import BOOT

PATIENCE_S = 0.5


def start(tmp_path: Path) -> subprocess.Popen[bytes]:
    """It, with little patience, asked to enter a run."""
    source = inspect.getsource(bootstrap).replace(f"PATIENCE_S = {bootstrap.PATIENCE_S}", f"PATIENCE_S = {PATIENCE_S}")
    assert f"PATIENCE_S = {PATIENCE_S}" in source
    request = json.dumps({"do": "enter", "run": "r", "host": "h"})
    program = f"scope={{}};exec({source!r},scope);scope['main']({request!r})\n"
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
