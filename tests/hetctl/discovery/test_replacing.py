"""A cluster file that knows more, or that somebody edited, is not replaced by the way; the old one is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetctl.app import app
from hetctl.comm.contract.cluster import Cluster, Host, Measured, load_cluster, save_cluster
from hetctl.comm.contract.errors import ConfigError, Infeasible
from hetctl.console import Sink
from hetctl.discovery.replacing import save_over
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe

FILE = Path("cluster.yaml")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)


def cluster(*names: str, gone: str = "", measured: bool = False) -> Cluster:
    hosts = tuple(Host(n, status="unreachable" if n == gone else "ok", reason="it is off") for n in names)
    rails = (Measured(("a", "b"), ("eth0", "eth0"), "tcp"),) if measured else ()
    return Cluster(hosts, (), measured=rails)


def test_no_host_reached_leaves_a_good_file_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo in a group's name: exit code 4 as ever, and the file stays."""
    save_cluster(FILE, cluster("node1", "node2"))
    before = FILE.read_bytes()
    done = CliRunner().invoke(app, ["discover", "nosuchgroup.invalid", "--timeout", "5"])
    assert done.exit_code == 4, done.output
    assert "cluster.yaml is left as it was" in done.output
    assert "wrote nothing" in done.output
    assert FILE.read_bytes() == before
    assert not Path("cluster.yaml.bak").exists()


def test_hosts_that_nobody_asked_are_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    save_cluster(FILE, cluster("a", "b", "c"))
    with pytest.raises(ConfigError, match=r"cluster\.yaml would lose b, c") as caught:
        save_over(FILE, cluster("a"), Sink(), force=False)
    assert "--force" in caught.value.hint
    assert save_over(FILE, cluster("a"), Sink(), force=True)
    assert [h.name for h in load_cluster(FILE).hosts] == ["a"]
    assert [h.name for h in load_cluster(Path("cluster.yaml.bak")).hosts] == ["a", "b", "c"]
    assert "the old one is cluster.yaml.bak" in capsys.readouterr().err


def test_a_host_that_was_asked_and_is_gone_is_written_and_the_old_file_kept() -> None:
    save_cluster(FILE, cluster("a", "b"))
    assert save_over(FILE, cluster("a", "b", gone="b"), Sink(), force=False)
    assert load_cluster(Path("cluster.yaml.bak")).hosts[1].status == "ok"


def test_measured_links_are_not_lost() -> None:
    save_cluster(FILE, cluster("a", "b", measured=True))
    with pytest.raises(ConfigError, match="would lose its measured links"):
        save_over(FILE, cluster("a", "b"), Sink(), force=False)
    assert save_over(FILE, cluster("a", "b", measured=True), Sink(), force=False)
    assert not Path("cluster.yaml.bak").exists()  # the same again


def test_an_edited_file_is_refused_before_any_host_is_asked() -> None:
    save_cluster(FILE, cluster("a"))
    FILE.write_text(FILE.read_text().replace("name: a", "name: b"))
    done = CliRunner().invoke(app, ["discover", "nosuchhost.invalid"])
    assert isinstance(done.exception, ConfigError)
    assert "edited" in done.exception.message
    assert "discovering" not in done.output


def test_a_plan_that_somebody_edited_is_not_overwritten() -> None:
    words = ["plan", "--model", "demo", "--emulate", "h200:1,mi325x:1", "-o", "plan.yaml"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert CliRunner().invoke(app, words).exit_code == 0  # as it was written: the same again
    assert not Path("plan.yaml.bak").exists()
    edited = Path("plan.yaml").read_text() + "# mine\n"
    Path("plan.yaml").write_text(edited)
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigError)
    assert Path("plan.yaml").read_text() == edited
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    assert Path("plan.yaml.bak").read_text() == edited


def test_a_cluster_without_devices_says_that_and_who_was_not_asked() -> None:
    none = replace(cluster("a", "b", gone="b"))
    with pytest.raises(Infeasible, match=r"no devices to train on: 2 hosts, .* not asked: b \(it is off\)") as caught:
        make_plan(none, load_recipe(None))
    assert "hetctl discover" in caught.value.hint
    assert "free one" not in caught.value.hint


def test_measured_links_go_into_the_file_and_the_old_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    save_cluster(FILE, cluster("a", "b"))
    monkeypatch.setattr("hetctl.discovery.links.measure_file", lambda path, **_: cluster("a", "b", measured=True))
    done = CliRunner().invoke(app, ["bench", "links"])
    assert done.exit_code == 0, done.output
    assert load_cluster(FILE).measured
    assert not load_cluster(Path("cluster.yaml.bak")).measured
    assert "the old one is cluster.yaml.bak" in done.output
