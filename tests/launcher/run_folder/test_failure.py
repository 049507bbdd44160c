"""Which rank failed first: crashes and own errors before those that only heard of them."""

from __future__ import annotations

import signal
from pathlib import Path

from hetctl.launcher.agent.run_files import last_words
from hetctl.launcher.run_folder.failure import Exit, RankError, failed_all_the_same, find_failure

HOSTS = ["a", "a", "b", "b"]


def test_all_well_is_no_failure() -> None:
    assert find_failure([Exit(0, 0, 1.0), Exit(1, 0, 2.0)], HOSTS, {}) is None


def test_a_killed_rank_comes_before_the_peers_that_noticed_it_sooner() -> None:
    errors = {0: RankError("RuntimeError: Connection closed by peer [10.0.0.1]", "", 9.9)}
    exits = [Exit(0, 1, 10.2), Exit(3, -signal.SIGKILL, 10.1), Exit(1, -signal.SIGTERM, 10.4, asked=True)]
    failure = find_failure(exits, HOSTS, errors)
    assert failure is not None
    assert (failure.rank, failure.host, failure.victims) == (3, "b", (0, 1))
    assert "SIGKILL" in failure.reason


def test_an_error_of_its_own_comes_before_an_earlier_one_about_peers() -> None:
    errors = {
        1: RankError("BridgeError: all_reduce: rank 2 on b did not answer", "", 5.0),
        2: RankError("ValueError: wrong", "Traceback ...", 6.0),
    }
    failure = find_failure([Exit(1, 1, 5.1), Exit(2, 1, 6.1)], HOSTS, errors)
    assert failure is not None
    assert (failure.rank, failure.error_type, failure.traceback) == (2, "ValueError", "Traceback ...")


def test_a_watchdogs_abort_is_a_consequence() -> None:
    errors = {2: RankError("ValueError: wrong", "", 6.0)}
    failure = find_failure([Exit(0, -signal.SIGABRT, 5.0), Exit(2, 1, 6.1)], HOSTS, errors)
    assert failure is not None
    assert failure.rank == 2


def test_where_there_are_only_consequences_the_first_is_named() -> None:
    errors = {r: RankError("DistNetworkError: connection timed out", "", 5.0 + r) for r in (3, 1)}
    failure = find_failure([Exit(3, 1, 8.0), Exit(1, 1, 9.0)], HOSTS, errors)
    assert failure is not None
    assert failure.rank == 1


def test_a_rank_without_an_error_file_is_quoted() -> None:
    told = Exit(1, 1, 5.0, said="ValueError: no such corpus")
    failure = find_failure([Exit(0, 1, 4.0, said="RuntimeError: Connection closed by peer"), told], HOSTS, {})
    assert failure is not None
    assert failure.rank == 1
    assert failure.reason == "it ended with exit code 1; the last it said: ValueError: no such corpus"


def test_of_ranks_that_were_told_to_end_only_those_with_an_error_of_their_own_failed() -> None:
    errors = {
        0: RankError("OSError: [Errno 28] No space left on device", "", 5.0),
        1: RankError("BridgeError: all_reduce: rank 0 on a did not answer", "", 5.1),
    }
    full = Exit(3, 1, 5.2, asked=True, reason="it ended with exit code 1, and could not say why: No space left on disk")
    lost = Exit(2, 1, 5.1, asked=True, reason="b cannot reach a at 10.0.0.1", seen=False)
    ended = (Exit(1, 1, 5.1, asked=True), Exit(2, -signal.SIGTERM, 5.2, asked=True), lost)
    assert failed_all_the_same([*ended, Exit(3, -signal.SIGKILL, 60.0, asked=True)], errors) == []
    assert failed_all_the_same([*ended, Exit(0, 1, 5.0, asked=True), full], errors) == [
        Exit(0, 1, 5.0, asked=True),
        full,
    ]
    waited = Exit(3, 1, 5.2, asked=True, said="RuntimeError: Connection closed by peer")
    assert failed_all_the_same([waited, *ended], errors) == []
    assert failed_all_the_same([waited, Exit(0, 0, 5.0)], {}) == [waited], "nobody was ended by force"


def test_an_exception_that_c_plus_plus_met_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("terminate called after throwing\n  what():  ValueError: planted\n\nAt:\n  a.py(4)\n")
    told = Exit(1, -signal.SIGABRT, 5.0, said=last_words(str(log)))
    failure = find_failure([Exit(0, 1, 4.0, said="RuntimeError: Connection closed by peer"), told], HOSTS, {})
    assert failure is not None
    assert (failure.rank, failure.reason) == (1, "it was ended by SIGABRT; the last it said: ValueError: planted")
    log.write_text("")
    assert last_words(str(log)) is None
