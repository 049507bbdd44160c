"""`hetctl discover` and `hetctl hosts` without SSH: this machine, files, and what does not go together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hetctl.app import app
from hetctl.comm.contract.cluster import load_cluster
from hetctl.comm.contract.errors import ConfigError, HetctlError
from hetctl.discovery.discover import discover
from hetctl.discovery.inventory import this_machine
from hetctl.probe import Options
from tests.rigs.dress import Costume, dress_host


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)


def hetctl(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_this_machine_becomes_a_cluster_file() -> None:
    done = hetctl("discover", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    [host] = document["hosts"]
    assert (host["status"], host["access"]["address"]) == ("ok", None)
    assert document["file"] == "cluster.yaml"
    assert load_cluster(Path("cluster.yaml")).digest == document["digest"]
    assert "from this machine" in done.stderr


def test_people_see_a_line_per_host_and_a_tree() -> None:
    done = hetctl("discover", "-o", "here.yaml")
    assert done.stdout.splitlines()[0].startswith("✓")
    assert "1 host" in done.stdout
    assert "wrote here.yaml" in done.stdout


def test_a_dressed_machine_shows_its_gpus(tmp_path: Path) -> None:
    dress = dress_host(tmp_path / "dress", Costume(gpus=2, nics=2, tool_delay_s=0.0))
    options = Options(root=str(dress.root), path=str(dress.tools))
    [answer] = discover(this_machine().entries, options=lambda entry: options)
    assert answer.report.facts is not None, answer.report.reason
    assert [gpu.name for gpu in answer.report.facts.gpus] == ["NVIDIA H200"] * 2


def test_a_capture_of_this_machine_is_read_again() -> None:
    assert hetctl("discover", "--capture", "out.tgz").exit_code == 0
    first = load_cluster(Path("cluster.yaml"))
    again = hetctl("discover", "--from-capture", "out.tgz", "-o", "again.yaml")
    assert again.exit_code == 0, again.output
    second = load_cluster(Path("again.yaml"))
    assert len(second.hosts[0].nics) == len(first.hosts[0].nics)
    assert second.hosts[0].name != first.hosts[0].name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("discover", "--from-capture", "x.tgz", "node1"), "asks no hosts"),
        (("discover", "--from-capture", "x.tgz"), "no capture"),
        (("discover", "-i", "nowhere.yaml"), "no inventory"),
        (("discover", "--", "-oProxyCommand=x"), "begins with '-'"),
        (("hosts", "list", "a b"), "not a host name"),
    ],
)
def test_usage_errors(words: tuple[str, ...], said: str) -> None:
    done = hetctl(*words)
    assert isinstance(done.exception, ConfigError)
    assert said in done.exception.message
    assert isinstance(done.exception, HetctlError)
    assert done.exception.exit_code == 2


def test_hosts_list_says_how_each_is_reached() -> None:
    Path("inventory.yaml").write_text("groups: {red: {hosts: 'r[1-2]', user: root, port: 23}}\nhosts: [localhost]\n")
    done = hetctl("hosts", "list", "--json")
    listed = {h["name"]: h["access"] for h in json.loads(done.stdout)["hosts"]}
    assert (listed["r2"]["address"], listed["r2"]["port"], listed["localhost"]["address"]) == ("r2", 23, None)
    shown = hetctl("hosts", "list", "red").stdout
    assert "r1:23" in shown
    assert "2 from inventory.yaml" in shown
