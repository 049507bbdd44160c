"""One command on many hosts: on this machine, folded, bounded, cleaned; on real hosts, one of them strange."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError
from hetctl.discovery import execute
from hetctl.discovery.execute import HostOutput, execute_line, exit_code_of, folded, line_of
from hetctl.discovery.inventory import InventoryHost
from tests.rigs import netns
from tests.rigs.cluster import command, environment

HERE = InventoryHost("here", Access())
WHY_NOT = netns.unavailable()


def here(line: str, seconds: float = 60) -> HostOutput:
    (found,) = execute_line([HERE], lambda entry: line, timeout_s=seconds)
    return found


def test_both_streams_come_in_order_with_the_exit_code() -> None:
    found = here("echo one; echo two >&2; echo three; exit 3")
    assert (found.exit_code, found.output, found.problem) == (3, "one\ntwo\nthree", "")


def test_what_a_host_prints_cannot_steer_a_terminal_and_keeps_its_columns() -> None:
    found = here(r"printf 'a\tb   c\r\n\033[31mred\033[0m \007\n50%%\r100%%\n'")
    assert found.output == "a       b   c\nred\n100%"


def test_output_is_bounded_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "MAX_BYTES", 10)
    found = here("printf 1234567890; printf more")
    assert (found.exit_code, found.output) == (0, "1234567890\n[cut after 10 B]")


def test_a_command_that_does_not_end_is_given_up() -> None:
    found = here("sleep 60", seconds=0.5)
    assert found.exit_code is None
    assert "within 0.5 s" in found.problem


def test_a_line_that_no_shell_understands_says_so() -> None:
    found = here("echo 'unbalanced")
    assert found.exit_code not in (0, None)
    assert found.output


def test_equal_answers_stand_together() -> None:
    outputs = [HostOutput(f"node{n:02}", 0, "same") for n in (1, 2, 3)]
    outputs += [HostOutput("other", 0, "else"), HostOutput("node04", 1, "same")]
    outputs += [HostOutput("silent", 0, "")]
    assert [*folded(outputs, lambda one: one.output)] == [("node[01-04]", 4, "same"), ("other", 1, "else")]


@pytest.mark.parametrize(
    ("codes", "expected"), [((0, 0), 0), ((0, 2), 1), ((2, None), 4), ((None,), 4)], ids=lambda value: str(value)
)
def test_the_exit_code_is_the_worst(codes: tuple[int | None, ...], expected: int) -> None:
    assert exit_code_of([HostOutput(str(n), code, "") for n, code in enumerate(codes)]) == expected


def test_words_are_given_as_they_are_and_a_single_one_is_a_line() -> None:
    entry = InventoryHost("h", Access("h", python="/opt/x y/bin/python"))
    assert line_of(["echo", "$HOME", "a b"], entry) == "echo '$HOME' 'a b'"
    assert line_of(["echo $HOME | wc"], entry) == "echo $HOME | wc"
    assert line_of(["python", "-V"], entry) == "'/opt/x y/bin/python' -V"
    assert line_of(["python3"], entry) == "'/opt/x y/bin/python'"
    with pytest.raises(ConfigError, match="no command"):
        line_of([], entry)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_hosts_answer_together_and_a_lost_one_is_named(tmp_path: Path) -> None:
    specs = [netns.HostSpec(), netns.HostSpec(), netns.HostSpec(other_key=True)]
    with netns.hosts(specs, tmp_path / "rig") as rig:

        def hetctl(*words: str) -> subprocess.CompletedProcess[str]:
            argv, env = command("exec", *words), environment(rig)
            return subprocess.run(argv, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=200)

        a, b, gone = (host.name for host in rig.hosts)
        both = f"{a[:-1]}[0-1]"
        done = hetctl(a, b, "--", "echo", "-n", "$HOME *")
        assert (done.returncode, done.stdout) == (0, f"{'-' * 15}\n{both} (2)\n{'-' * 15}\n$HOME *\n"), done.stderr
        done = hetctl(a, b, "--", "echo $HOME; exit 5")
        assert done.returncode == 1
        assert f"{rig.hosts[1].folder / 'home'}\n" in done.stdout
        assert f"{both}: exit code 5" in done.stderr
        done = hetctl(both, gone, "--json", "--timeout", "30", "--", "uname")
        assert done.returncode == 4
        found = {h["name"]: h for h in json.loads(done.stdout)["hosts"]}
        assert [found[n]["exit_code"] for n in (a, b, gone)] == [0, 0, None]
        assert found[a]["output"] == "Linux"
        assert "known_hosts" in found[gone]["problem"]
        assert hetctl(a).returncode == 2
