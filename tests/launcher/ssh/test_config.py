"""Routes from ~/.ssh/config and the inventory: aliases, jumps, keys, includes; nothing is connected to."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.hosts.shell import ShellError
from hetctl.launcher.ssh.config import SshConfig, SshRoute


def route(home: Path, access: Access, config: str = "") -> SshRoute:
    (home / ".ssh").mkdir(exist_ok=True)
    (home / ".ssh" / "config").write_text(config)
    return SshConfig(home).route(access)


def test_aliases_and_what_the_inventory_says_over_them(tmp_path: Path) -> None:
    config = "Host n1\n HostName 10.0.0.1\n Port 2200\n User me\n HostKeyAlias farm\n IdentitiesOnly yes\n"
    found = route(tmp_path, Access("n1"), config)
    assert (found.hostname, found.port, found.user, found.known_as, found.agent) == (
        "10.0.0.1",
        2200,
        "me",
        "farm",
        False,
    )
    typed = route(tmp_path, Access("n1", user="root", port=22), config)
    assert (typed.user, typed.port) == ("root", 22)


def test_a_key_is_forgotten_where_it_is_filed_and_not_under_the_alias(tmp_path: Path) -> None:
    aliased = route(tmp_path, Access("n1"), "Host n1\n HostName 10.0.0.1\n")
    assert aliased.forget_line == f"ssh-keygen -f {tmp_path}/.ssh/known_hosts -R 10.0.0.1"
    ported = route(tmp_path, Access("n1"), "Host n1\n HostName 10.0.0.1\n Port 2200\n")
    assert ported.forget_line.endswith("-R '[10.0.0.1]:2200'")


def test_jumps_come_from_the_config_and_may_be_switched_off(tmp_path: Path) -> None:
    config = "Host n*\n ProxyJump a,root@b:23\n"
    assert route(tmp_path, Access("n1"), config).jumps == ("a", "root@b:23")
    assert route(tmp_path, Access("n1", proxy_jump="none"), config).jumps == ()
    assert route(tmp_path, Access("n1", proxy_jump="c"), config).jumps == ("c",)


def test_includes_are_followed_and_do_not_run_in_circles(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "more.conf").write_text("Include more.conf\nHost n1\n HostName 10.0.0.9\n")
    assert route(tmp_path, Access("n1"), "Include *.conf\n").hostname == "10.0.0.9"


def test_a_user_without_a_name_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", none)
    with pytest.raises(ConfigError, match="this user has no name here") as caught:
        route(tmp_path, Access("n1"), "Host n1\n HostName 10.0.0.1\n")
    assert caught.value.hint == "export USER=NAME"


def test_keys_are_those_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    for name in ("id_rsa", "farm"):
        (tmp_path / ".ssh" / name).write_text("x")
    assert [k.name for k in route(tmp_path, Access("n1")).keys] == ["id_rsa"]
    assert [k.name for k in route(tmp_path, Access("n1"), "Host *\n IdentityFile ~/.ssh/farm\n").keys] == ["farm"]
    assert [k.name for k in route(tmp_path, Access("n1", identity_file="~/.ssh/farm")).keys] == ["farm"]
    with pytest.raises(ShellError) as caught:
        route(tmp_path, Access("n1", identity_file="~/.ssh/absent"))
    assert caught.value.problem == "authentication-failed"


def test_a_key_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("no key")
    said = SshConfig(tmp_path).private_key(broken)
    assert isinstance(said, str)
    assert "cannot be read" in said


def test_known_hosts_files_of_the_config(tmp_path: Path) -> None:
    files = route(tmp_path, Access("n1"), f"Host *\n UserKnownHostsFile {tmp_path}/mine\n GlobalKnownHostsFile none\n")
    assert files.known_hosts == (tmp_path / "mine",)
    assert route(tmp_path, Access("n1")).known_hosts[0] == tmp_path / ".ssh" / "known_hosts"
