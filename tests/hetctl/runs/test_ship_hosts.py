"""`data.ship` on real hosts that share nothing: data and tokenizer arrive, once; without it the error says how."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hetctl.comm.contract.emulate import Machine, label_machine, parse_spec
from hetctl.console import Sink
from hetctl.runs.inputs import paths_to_read, shipments
from hetctl.runs.prepare import prepare
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.recipe import load_recipe
from tests.rigs import netns
from tests.rigs.cluster import command, environment, write_cluster

WHY_NOT = netns.unavailable()
SIZES = ("model.seq_len=16", "batch.global_batch=4", "train.validation_samples=4", "train.steps=2")


def lay(folder: Path) -> None:
    (folder / "text" / "deep").mkdir(parents=True)
    for n in range(40):
        (folder / "text" / "deep" / f"{n}.txt").write_text("a b c d " * 50)
    (folder / "text" / "picture.png").write_text("no text")
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "</s>": 2, "u": 3}, unk_token="u"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_what_is_sent_need_not_be_there(tmp_path: Path) -> None:
    lay(tmp_path)
    named = [("data.source", str(tmp_path / "text")), ("data.tokenizer", str(tmp_path / "tokenizer.json"))]
    plain, sent = load_recipe(None, named), load_recipe(None, [*named, ("data.ship", True)])
    assert (paths_to_read(plain, "auto"), shipments(plain)) == ([path for _, path in named], [])
    assert paths_to_read(sent, "/some/step-1") == ["/some/step-1"]
    text, tokenizer = shipments(sent)
    assert (len(text.files), text.bytes, tokenizer.names[0][0]) == (40, 40 * 400, "tokenizer.json")
    assert sent.with_paths({str(tmp_path / "text"): "/there"}).data.source == "/there"
    assert shipments(load_recipe(None, [("data.ship", True)])) == [], "the hosts have Python's own library"


def test_here_nothing_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = label_machine(parse_spec("h200:1,mi325x:1", CLASSES), Machine("here", "gloo", (2**35, 2**35), "cpu"))
    prepare(load_recipe(None, [("data.ship", True)]), cluster, speeds={}, way="local", sink=Sink())
    assert "data.ship" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    lay(folder)
    return folder


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, mine: Path) -> Iterator[netns.Rig]:
    specs = [netns.HostSpec(hide=(str(mine),)) for _ in range(2)]
    with netns.hosts(specs, tmp_path_factory.mktemp("rig"), rails=1) as rig:
        write_cluster(rig, {"h200": ((0, 1),), "mi325x": ((1, 1),)}, mine / "cluster.yaml")
        yield rig


def train(rig: netns.Rig, mine: Path, *more: str) -> subprocess.CompletedProcess[str]:
    named = ("data.source=text", "data.tokenizer=tokenizer.json")
    settings = [w for key in (*SIZES, *named, *more) for w in ("--set", key)]
    argv = command("train", "--cluster", "cluster.yaml", "--run-dir", "run", *settings)
    return subprocess.run(argv, cwd=mine, env=environment(rig), text=True, capture_output=True, timeout=400)


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_data_arrive_and_stay(rig: netns.Rig, mine: Path) -> None:
    refused = train(rig, mine)
    assert refused.returncode == 2, refused.stderr
    assert f"it cannot read {mine / 'text'}, {mine / 'tokenizer.json'}" in refused.stderr
    assert "--set data.ship=true" in refused.stderr
    done = train(rig, mine, "data.ship=true")
    assert done.returncode == 0, done.stdout + done.stderr
    both = f"{rig.hosts[0].name[:-1]}[0-1]"
    assert f"sent {mine / 'text'} (15.6 KiB) to {both}" in done.stdout
    for host in rig.hosts:
        kept = sorted(p.name for p in (host.folder / "home").glob(".cache/hetctl/data/*/*"))
        assert kept == ["deep", "tokenizer.json"]
        (job,) = (host.folder / "home").glob(".local/state/hetctl/runs/*/*/launch/job.json")
        assert json.loads(job.read_text())["recipe"]["data"]["source"].startswith(str(host.folder / "home"))
    assert f'source: "{mine / "text"}"' in (mine / "run" / "recipe.yaml").read_text()
    again = train(rig, mine, "data.ship=true", "train.steps=3")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "sent " not in again.stdout
    assert "continuing from step 2" in again.stdout
    assert "other samples" not in again.stderr
