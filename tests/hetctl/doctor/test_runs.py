"""A run's folder read afterwards: who waited for whom, who is behind it, and what probably happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetctl.app import app
from hetctl.comm.contract.errors import ConfigError
from hetctl.doctor.runs import diagnose, find_run, likely_cause
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.waiting import root_of, who_waited


def operation(
    number: int, name: str, *, group: str = "all", peer: int | None = None, done: bool = True
) -> dict[str, Any]:
    state = "done" if done else "pending"
    return {
        "number": number,
        "operation": name,
        "group": group,
        "peer": peer,
        "bytes": 8,
        "started": float(number),
        "ended": number + 0.5 if done else None,
        "state": state,
        "error": "",
    }


def flight(folder: Path, rank: int, *operations: dict[str, Any]) -> None:
    path = folder / "logs" / f"flight-rank-{rank}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rank": rank, "reason": "timed out", "time": 9.0, "operations": operations}))


def failure(folder: Path, rank: int, reason: str) -> None:
    record = {"rank": rank, "host": "here", "reason": reason, "exit_code": 1, "traceback": "", "victims": []}
    (folder / "failure.json").write_text(json.dumps(record))
    (folder / "summary.json").write_text(json.dumps({"status": "failed"}))


def test_a_chain_of_messages_leads_to_the_rank_that_waits_for_nobody(tmp_path: Path) -> None:
    flight(tmp_path, 0, operation(1, "recv", peer=1, done=False))
    flight(tmp_path, 1, operation(1, "send", peer=0), operation(2, "recv", peer=2, done=False))
    flight(tmp_path, 2, operation(1, "send", peer=1))
    failure(tmp_path, 0, "BridgeError: nothing came from rank 1 within 60 s")
    found = diagnose(RunFolder(tmp_path))
    assert [(w.rank, w.targets) for w in found.waiting] == [(0, (1,)), (1, (2,))]
    assert found.culprit == 2
    assert "rank 2 did not come" in found.cause


def test_in_a_collective_those_are_waited_for_who_are_behind() -> None:
    behind = [operation(1, "all_reduce"), operation(2, "all_reduce")]
    waiting = [*behind, operation(3, "all_reduce", done=False)]
    found = who_waited({0: waiting, 1: behind, 2: waiting})
    assert {w.rank: w.targets for w in found} == {0: (1,), 2: (1,)}
    assert root_of(found) == 1


def test_a_circle_blames_nobody() -> None:
    waiting = {0: [operation(1, "recv", peer=1, done=False)], 1: [operation(1, "recv", peer=0, done=False)]}
    assert root_of(who_waited(waiting)) is None


def test_a_rank_that_left_no_record_is_named_by_what_failed_towards_it() -> None:
    error = "all_reduce 15 of group '0' failed sending to rank 3 on vm: it is gone; no answer from rank 3"
    failed = {"number": 74, "operation": "all_reduce", "group": "0", "state": "failed", "started": 1.0, "error": error}
    waiting = who_waited({0: [failed], 2: [failed]})
    assert [w.targets for w in waiting] == [(3,), (3,)]
    assert root_of(waiting) == 3


def test_an_error_of_a_ranks_own_comes_before_who_waited(tmp_path: Path) -> None:
    flight(tmp_path, 0, operation(1, "recv", peer=1, done=False))
    failure(tmp_path, 1, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    found = diagnose(RunFolder(tmp_path))
    assert (found.culprit, found.failed) == (1, True)
    assert found.cause == "a device ran out of memory"
    assert found.advice.startswith("hetctl plan")


def test_logs_tell_where_failure_json_does_not(tmp_path: Path) -> None:
    failure(tmp_path, 3, "it ended with exit code 1")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-3.log").write_text("step 1\nOSError: [Errno 28] No space left on device\n")
    found = diagnose(RunFolder(tmp_path))
    assert found.cause == "a disk is full"
    assert "no flight recorder" in found.unknown[0]


def test_broken_files_are_said_and_do_not_stop_it(tmp_path: Path) -> None:
    failure(tmp_path, 0, "it ended with exit code 1")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "flight-rank-0.json").write_text("{")
    assert any("flight-rank-0.json cannot be read" in line for line in diagnose(RunFolder(tmp_path)).unknown)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("it was ended by SIGKILL (out of memory, if nobody sent it)", "memory"),
        ("the kernel killed it: the host or its memory limit ran out of memory (SIGKILL)", "its host, or its memory"),
        ("it was ended by SIGKILL (the kernel reports no lack of memory, so somebody sent it)", "somebody, or a job"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "a device ran out"),
        ("RuntimeError: Address already in use", "port"),
        ("NCCL WARN message truncated : receiving 8 bytes", "two vendors"),
        ("all well", ""),
    ],
)
def test_causes(text: str, word: str) -> None:
    assert word in likely_cause([text])[0]
    assert bool(likely_cause([text])[0]) == bool(word)


def test_the_command_says_it_and_exits_1(tmp_path: Path) -> None:
    failure(tmp_path, 1, "OutOfMemoryError: out of memory")
    done = CliRunner().invoke(app, ["doctor", "--run", str(tmp_path), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["culprit"] == 1
    shown = CliRunner().invoke(app, ["doctor", "--run", str(tmp_path)]).stdout
    assert "rank 1: a device ran out of memory" in shown


def test_a_run_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="no run"):
        find_run("nowhere")
