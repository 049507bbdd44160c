"""Kills for lack of memory, told from others by the cgroup's counter and the kernel's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.launcher.agent.oom import OomWatch

V2 = ("0::/job\n", "sys/fs/cgroup/job/memory.events", "low 0\noom 3\noom_kill {}\n")
V1 = ("7:cpu:/x\n4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill {}\n")


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize(("groups", "file", "text"), [V2, V1])
def test_the_cgroups_counter_tells(tmp_path: Path, groups: str, file: str, text: str) -> None:
    write(tmp_path, "proc/self/cgroup", groups)
    write(tmp_path, file, text.format(2))
    watch = OomWatch(str(tmp_path))
    assert watch.killed(11) is False, "those before the run are not ours"
    write(tmp_path, file, text.format(3))
    assert watch.killed(11) is True
    assert watch.killed(12) is False, "each kill is counted once"


def test_the_kernels_log_tells_what_it_said_since_the_start(tmp_path: Path) -> None:
    write(tmp_path, "dev/kmsg", "6,1,9,-;Memory cgroup out of memory: Killed process 11 (python)\n")
    watch = OomWatch(str(tmp_path))
    assert watch.killed(11) is False, "that was another process with this number"
    with (tmp_path / "dev/kmsg").open("a") as log:
        log.write("6,2,10,-;Out of memory: Killed process 12 (python) total-vm:1kB\n")
    assert watch.killed(12) is True
    assert watch.killed(13) is False


def test_where_nothing_tells_it_is_unknown(tmp_path: Path) -> None:
    assert OomWatch(str(tmp_path)).killed(11) is None
