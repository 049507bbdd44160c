"""Who is meant: arguments, inventory.yaml, hostfiles, Slurm, this machine; and every way to get it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.comm.contract.errors import ConfigError
from hetctl.discovery.inventory import Inventory, resolve
from hetctl.launcher.hosts.host_names import MAX_HOSTS, HostName, expand


def names(inventory: Inventory) -> list[str]:
    return [entry.name for entry in inventory.entries]


def written(tmp_path: Path, text: str, name: str = "inventory.yaml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03]", ["node01", "node02", "node03"]),
        ("node[01-02,07]", ["node01", "node02", "node07"]),
        ("a[1-2]-b[0-1]", ["a1-b0", "a1-b1", "a2-b0", "a2-b1"]),
        ("b,a,b", ["b", "a"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        ("fe80::1", ["fe80::1"]),
    ],
)
def test_names_expand_in_order(text: str, hosts: list[str]) -> None:
    assert [spot.host for spot in expand(text)] == hosts


def test_user_and_port() -> None:
    assert expand("root@gpu[1-2]:2222") == [HostName("gpu1", "root", 2222), HostName("gpu2", "root", 2222)]
    assert expand("me@[2001:db8::1]:22") == [HostName("2001:db8::1", "me", 22)]


NO_NAMES = """-oProxyCommand=touch x|root@-x|-l@x|a b|a;b|$(x)|a:0|a:99999|a:x|@x|node[1-|node[]|node[3-1]|a[1-2]!b
fe80::1%;x|n[0-999999999]|`x`|x/../y|a,,b"""


@pytest.mark.parametrize("text", ["", f"n[1-{MAX_HOSTS + 1}]", *NO_NAMES.replace("\n", "|").split("|"), "a\nb"])
def test_what_is_no_host_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        expand(text)


@given(st.text(max_size=30))
def test_any_text_is_hosts_or_a_named_error(text: str) -> None:
    try:
        spots = expand(text)
    except ConfigError:
        return
    assert spots
    assert not any(s.host.startswith("-") or set(s.host) & set(" ;$`'\"\n\\|&<>()") for s in spots)


def test_layers_lie_over_one_another(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
defaults: {user: train, python: /opt/py/bin/python, env: {A: 1, B: x}}
groups:
  green: {hosts: "n[1-2]", user: root, exclude_nics: [eno1]}
  red: [r1, r2]
hosts:
  n2: {port: 2222, address: 10.0.0.2, data_address: 192.168.0.2, env: {B: y}, gpus: [0, 3]}
  solo:
networks: {fabric: [10.1.0.0/16]}
""",
    )
    inventory = resolve(file=file)
    by_name = {e.name: e for e in inventory.entries}
    assert names(inventory) == ["n1", "n2", "r1", "r2", "solo"]
    assert by_name["n1"].access.user == "root"
    assert by_name["n1"].access.exclude_nics == ("eno1",)
    assert by_name["r1"].access.user == "train"
    assert by_name["solo"].access.address == "solo"
    n2 = by_name["n2"]
    assert (n2.access.address, n2.access.port, n2.access.user, n2.access.gpus) == ("10.0.0.2", 2222, "root", (0, 3))
    assert (n2.access.env, n2.data_address, n2.group) == ({"A": "1", "B": "y"}, "192.168.0.2", "green")
    assert inventory.networks == {"fabric": ("10.1.0.0/16",)}


def test_a_python_for_each_vendor(tmp_path: Path) -> None:
    each = "{nvidia: ~/cuda/bin/python, amd: ~/rocm/bin/python}"
    file = written(tmp_path, f"defaults: {{python: {each}}}\nhosts: {{n1: , n2: {{python: python3.12}}}}\n")
    n1, n2 = (entry.access for entry in resolve(file=file).entries)
    assert n1.pythons == {"nvidia": "~/cuda/bin/python", "amd": "~/rocm/bin/python"}
    assert n1.python == "~/cuda/bin/python", "the first asks the host and starts its ranks"
    assert (n2.python, n2.pythons) == ("python3.12", {})


def test_short_spellings(tmp_path: Path) -> None:
    assert names(resolve(file=written(tmp_path, "hosts: n[1-2]\n"))) == ["n1", "n2"]
    assert names(resolve(file=written(tmp_path, "- root@n1:22\n- n2\n"))) == ["n1", "n2"]
    [entry] = resolve(file=written(tmp_path, "hosts: {n1: {env: [HF_TOKEN]}}\n")).entries
    assert entry.access.env == {"HF_TOKEN": None}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("hosts: {n1: {usr: root}}", "hosts.n1: unknown key 'usr'", "'user'"),
        ("grups: {}", "unknown key 'grups'", "'groups'"),
        ("defaults: {password: x}", "takes no passwords", "ssh-agent"),
        ("hosts: {n1: {ansible_ssh_pass: x}}", "takes no passwords", "ssh-agent"),
        ("hosts: {n1: {env: {HF_TOKEN: abc}}}", "HF_TOKEN does not belong", "env: [HF_TOKEN]"),
        ("hosts: {n1: {env: {'A B': x}}}", "not the name of an environment variable", ""),
        ("hosts: {n1: {port: 70000}}", "not a port", ""),
        ("hosts: {n1: {port: '22'}}", "expected a whole number", ""),
        ("hosts: {n1: {python: 'python3; rm x'}}", "not a name or path of a Python", ""),
        ("hosts: {n1: {python: '-c'}}", "not a name or path of a Python", ""),
        ("hosts: {n1: {python: {nvidia: python3, amd: '-c'}}}", "not a name or path of a Python", ""),
        ("hosts: {n1: {python: {nvidai: python3}}}", "'nvidai' is no vendor", "nvidia"),
        ("hosts: {n1: {python: [python3]}}", "expected text or keys and values", ""),
        ("hosts: {n1: {address: -oX}}", "not a host name", ""),
        ("hosts: {n1: {proxy_jump: '-oX'}}", "not a host name", ""),
        ("hosts: {n1: {data_address: nohost}}", "not an IP address", ""),
        ("hosts: {n1: {gpus: [0, 0]}}", "each once", ""),
        ("hosts: [n1, 3]", "hosts: expected keys and values", ""),
        ("hosts: {'n[1-2]': {}, n1: {}}", "'n1' is listed twice", ""),
        ("groups: {a: n1, b: n1}", "in two groups, 'a' and 'b'", ""),
        ("networks: {x: [10.0.0.1/8]}", "host bits set", ""),
        ("schema_version: 9\nhosts: n1", "schema_version 9", ""),
        ("hosts: []", "names no host", ""),
        ("just text", "expected keys and values", ""),
        ("hosts: !!python/object:os.system {}", "plain YAML", ""),
    ],
)
def test_inventory_errors_name_the_place(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(file=written(tmp_path, text))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_names_that_only_look_like_secrets_are_taken(tmp_path: Path) -> None:
    text = 'defaults: {env: {TOKENIZERS_PARALLELISM: "false"}}\ngroups: {compass: {hosts: [n1]}}\n'
    [entry] = resolve(file=written(tmp_path, text)).entries
    assert entry.access.env == {"TOKENIZERS_PARALLELISM": "false"}
    assert entry.group == "compass"


def test_hostfile(tmp_path: Path) -> None:
    file = written(
        tmp_path, "# comment\nworker-0 slots=4\nworker-1 slots=2 max_slots=8 # fast\nworker-2:3\nw3\n", "hostfile"
    )
    inventory = resolve(file=file)
    assert [(e.name, e.slots, e.access.gpus) for e in inventory.entries] == [
        ("worker-0", 4, (0, 1, 2, 3)),
        ("worker-1", 2, (0, 1)),
        ("worker-2", 3, (0, 1, 2)),
        ("w3", None, None),
    ]
    assert all(e.access.port is None for e in inventory.entries)


@pytest.mark.parametrize(
    "line",
    [
        "h slots=x",
        "h gpus=3",
        "h slots=0",
        "h slots=²",
        "h slots=1000000000000",
        "a slots=1\na slots=1",
        "n[1-2] slots=1",
        "# none",
    ],
)
def test_hostfile_errors(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError):
        resolve(file=written(tmp_path, line + "\n", "hostfile"))


def test_slurm_then_this_machine(tmp_path: Path) -> None:
    nowhere = tmp_path / "inventory.yaml"
    slurm = resolve(environment={"SLURM_JOB_NODELIST": "gpu[07-08],x1", "SLURM_JOB_ID": "5"}, default_file=nowhere)
    assert names(slurm) == ["gpu07", "gpu08", "x1"]
    assert "job 5" in slurm.origin
    [here] = resolve(environment={}, default_file=nowhere).entries
    assert here.access.local
    [named] = resolve(["localhost"], environment={}, default_file=nowhere).entries
    assert named.access.local
    [by_ssh] = resolve(["localhost:2222"], environment={}, default_file=nowhere).entries
    assert not by_ssh.access.local


def test_host_arguments_choose_from_an_inventory(tmp_path: Path) -> None:
    file = written(tmp_path, "defaults: {user: u}\ngroups: {red: 'r[1-2]'}\nhosts: [n1, n2]\n")
    assert names(resolve(["red", "n2"], file)) == ["r1", "r2", "n2"]
    [typed] = resolve(["me@n1:23"], file).entries
    assert (typed.access.user, typed.access.port) == ("me", 23)
    with pytest.raises(ConfigError) as caught:
        resolve(["n3"], file)
    assert "'n1'" in caught.value.hint
    assert names(resolve(["n3"], default_file=file)) == ["n3"]
