"""One target a reader: good inputs, and what is done with one that lies in a folder."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch
import yaml

from hetctl.comm.contract.cluster import SCHEMA_VERSION, Access, load_cluster, save_cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.files import read_text
from hetctl.comm.contract.plan import load_plan, save_plan
from hetctl.console import Sink
from hetctl.discovery.inventory import load_inventory
from hetctl.launcher.hosts.host_names import expand
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.ssh.config import SshConfig
from hetctl.probe import extract, parse
from hetctl.probe.capture import read_capture
from hetctl.probe.masking import CaptureMasker
from hetctl.probe.raw import load
from hetctl.probe.vendors import amd_smi, hygon, intel, nvidia_smi
from hetctl.render.plan_page import plan_page
from hetctl.runs.history import _row, past_table
from hetctl.runs.logs import show_logs
from hetctl.runs.report import report_run
from hetctl.trainer.checkpoint.reader import Reader
from hetctl.trainer.data.megatron import HEADER, MAGIC, open_indexed
from hetctl.trainer.data.sources import documents
from hetctl.trainer.data.tokenizer import load_tokenizer
from hetctl.trainer.model.config import config_of, read_config, shape_from_config
from hetctl.trainer.model.huggingface import WeightFiles, write_model
from hetctl.trainer.model.model import shapes_of
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.own_hardware import own_classes
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.predicted_step import PredictedStep
from hetctl.trainer.planning.profile import ClassProfile, Point, Profile, load_profile, save_profile
from hetctl.trainer.recipe import load_recipe
from tests.fuzz.mutate import Case
from tests.hetctl.render.pages import FAILURE, planning, run_folder, summary_of

FACTS = Path(__file__).resolve().parents[1] / "facts"
RECIPE = {"model": {"name": "demo", "seq_len": 64}, "batch": {"global_batch": 8}, "train": {"steps": 30}}


@dataclass(frozen=True)
class Target:
    """`seeds` are made in an empty folder; `read` takes the folder of a changed one."""

    seeds: Callable[[Path], list[Case]]
    read: Callable[[Path], None]


class Markup(HTMLParser):
    """Refuses what data must never bring into a page."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "img", f"markup from data: {tag} {attrs}"
        assert not any(name.startswith("on") for name, _ in attrs), f"markup from data: {tag} {attrs}"

    def handle_data(self, data: str) -> None:
        script = self.cdata_elem in ("script", "style")  # newer parsers count a title as well
        assert not script or "alert(1)</" not in data, "script from data"


def check_page(text: str) -> None:
    """No markup of mutations came through, and the page says which scripts may run."""
    assert text.count("Content-Security-Policy") >= 1, "no Content-Security-Policy"
    Markup().feed(text)
    assert "<script>alert(1)" not in text, "script from data"


def files_of(folder: Path) -> Case:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _text(name: str, *texts: str) -> Callable[[Path], list[Case]]:
    return lambda _: [{name: text.encode()} for text in texts]


def _cluster(folder: Path) -> list[Case]:
    save_cluster(folder / "cluster.yaml", describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES))
    return [files_of(folder)]


def _read_cluster(folder: Path) -> None:
    make_plan(load_cluster(folder / "cluster.yaml"), load_recipe(None, [("model.name", "demo")]))


def _read_recipe(folder: Path) -> None:
    make_plan(describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES), load_recipe(folder / "recipe.yaml"))


def _plan(folder: Path) -> list[Case]:
    save_plan(folder / "plan.yaml", planning("h200:1,mi325x:1").plan)
    return [files_of(folder)]


def _read_plan(folder: Path) -> None:
    check_page(plan_page(load_plan(folder / "plan.yaml"), PredictedStep((), 1, ())))


def _profile(folder: Path) -> list[Case]:
    points = (Point(1, 1.0, 2.0), Point(4, 2.5, 5.0))
    save_profile(folder / "p.yaml", Profile((ClassProfile("h200", "demo", 64, points, points, points),)))
    return [files_of(folder)]


def _read_profile(folder: Path) -> None:
    cluster = describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES)
    sets = [("model.name", "demo"), ("model.seq_len", 64)]
    make_plan(cluster, load_recipe(None, sets), profile=load_profile(folder / "p.yaml"))


def _run(folder: Path) -> list[Case]:
    made = planning("h200:1,mi325x:2")
    run = run_folder(folder / "run", made, steps=4, failure=FAILURE)
    summary = summary_of(run, made.plan) | {"run": "run"}
    timeline = summary.pop("timeline")
    run.write_summary(summary)
    run.timeline.write_text(json.dumps(timeline))
    run.versions.write_text(json.dumps({"mi325x-0": {"torch": "2.11"}}))
    (folder / "run/logs").mkdir(exist_ok=True)
    run.log(0).write_text("begins\nends\n")
    return [files_of(folder)]


def _read_run(folder: Path) -> None:
    run, sink = RunFolder((folder / "run").resolve()), Sink(as_json=True)
    sink.people.file = io.StringIO()
    sink.people.print(past_table([_row(run, None)]))
    show_logs(str(run.path), follow=False, ranks=None, sink=sink)
    run.report.unlink(missing_ok=True)
    report_run(str(run.path), sink)
    check_page(run.report.read_text(encoding="utf-8"))


def _raw(folder: Path) -> list[Case]:
    return [{"raw.json": p.read_bytes()} for p in sorted(FACTS.glob("*/*/raw.json"))[:12]]


def _read_raw(folder: Path) -> None:
    parse(load((folder / "raw.json").read_bytes()))


def _outputs(folder: Path) -> list[Case]:
    return [{"out": p.read_bytes()[:20_000]} for p in sorted(FACTS.glob("*/*/output.*"))[::9]]


def _read_outputs(folder: Path) -> None:
    data = (folder / "out").read_bytes()
    text = data.decode("utf-8", "replace")
    for reader in (nvidia_smi.parse_xml, nvidia_smi.parse_topology, amd_smi.parse_static, amd_smi.parse_metric):
        reader(text)
    intel.parse_dump(text)
    hygon.parse_smi(text)
    CaptureMasker((), b"salt").text(text)
    extract(data)


def _capture(folder: Path) -> list[Case]:
    manifest = {"schema_version": 1, "hosts": [{"name": "a", "file": "0000.json", "status": "ok"}]}
    raw = next(iter(sorted(FACTS.glob("*/*/raw.json")))).read_bytes()
    return [{"manifest.json": json.dumps(manifest).encode(), "0000.json": raw}]


def _read_capture(folder: Path) -> None:
    path = folder / "capture.tgz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name in ("manifest.json", "0000.json"):
            archive.add(folder / name, name)
    read_capture(path)


def _checkpoint(folder: Path) -> list[Case]:
    entry = {"sha256": "0" * 64, "tensors": {"w": ["w", "weights", 0, 4]}}
    step = {
        "step": 1,
        "loss": 2.5,
        "tokens": 64,
        "grad_norm": 1.0,
        "lr": 0.1,
        "step_time_s": 0.1,
        "tokens_per_s": 640.0,
    }
    done = {"step": 1, "updates": 1, "loss_scale": {"value": 2.0}, "best": {"step": 1, "loss": 2.5}, "lately": [step]}
    manifest = {"format": 3, **done, "shapes": {"w": [2, 2]}, "files": {"r.safetensors": entry}}
    return [{"manifest.json": json.dumps(manifest).encode(), "r.safetensors": b"\x08\0\0\0\0\0\0\0{}      "}]


def _read_checkpoint(folder: Path) -> None:
    reader = Reader(folder)
    void((reader.step, reader.updates, reader.loss_scale, reader.best, reader.lately, reader.shapes))


def _jsonl(folder: Path) -> list[Case]:
    return [{"d.jsonl": b'{"text": "one"}\n{"text": "two"}\n'}]


def _read_jsonl(folder: Path) -> None:
    list(documents(load_recipe(None, [("data.source", str(folder / "d.jsonl"))]).data))


def _read_tokenizer(folder: Path) -> None:
    section = load_recipe(None, [("data.tokenizer", str(folder / "tokenizer.json"))]).data
    load_tokenizer(section).encode("some words")


def _tokenizer(folder: Path) -> list[Case]:
    model = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "some": 1, "words": 2}, "unk_token": "<|endoftext|>"}
    pre = {"type": "Whitespace"}
    return [{"tokenizer.json": json.dumps({"version": "1.0", "model": model, "pre_tokenizer": pre}).encode()}]


def _megatron(folder: Path) -> list[Case]:
    sizes, ends = np.array([3, 2], np.int32), np.array([0, 1, 2], np.int64)
    index = HEADER.pack(MAGIC, 1, 8, 2, 3) + sizes.tobytes() + np.array([0, 6], np.int64).tobytes() + ends.tobytes()
    return [{"x.idx": index, "x.bin": np.arange(5, dtype=np.uint16).tobytes()}]


def _ssh(folder: Path) -> list[Case]:
    text = 'Host a b*\n  HostName 10.0.0.1\n  Port 22\n  User "x"\n  IdentityFile ~/.ssh/k\nInclude x/*\nMatch host a\n'
    return [{".ssh/config": text.encode()}]


def _read_ssh(folder: Path) -> None:
    with SshConfig(folder) as config:
        config.known(config.route(Access("a")))


def _read_hosts(folder: Path) -> None:
    expand(read_text(folder / "hosts", what="list", max_bytes=1 << 20).strip())


def _hardware(folder: Path) -> list[Case]:
    own = {"vendor": "nvidia", "tflops": 70, "memory": "48GiB", "bandwidth": "696GB/s", "nic": "25GbE", "source": "me"}
    rows = {"mine": own, "h200": {"like": "h100", "price": 2.5, "slices": 7, "bf16": True}}
    said = {"schema_version": SCHEMA_VERSION, "sources": {"me": "measured"}, "devices": rows}
    return [{"hardware.yaml": yaml.safe_dump(said).encode()}]


def _read_hardware(folder: Path) -> None:
    table = CLASSES.with_own(own_classes(folder / "hardware.yaml"))
    make_plan(describe_cluster(parse_spec("h200:1,mine:1", table), table), load_recipe(None, [("model.name", "demo")]))


def _weights(folder: Path) -> list[Case]:
    """A model of two files, whose index names them."""
    shape = replace(SHAPES["demo"], layers=1, hidden=8, intermediate=8, vocab=16, heads=2, kv_heads=1, head_dim=4)
    shapes = shapes_of(shape)
    config = config_of(shape, dtype="float32")
    write_model(folder, config, shapes, lambda name: torch.ones(shapes[name]), dtype=torch.float32, max_file_bytes=900)
    return [files_of(folder)]


shapes_of(SHAPES["demo"])  # torch imports half of itself here: no input's fault


def _read_weights(folder: Path) -> None:
    shape = shape_from_config(read_config(folder / "config.json"), where="config.json")
    if sum(math.prod(size) for size in shapes_of(shape).values()) > 1 << 20:
        return  # another model
    files = WeightFiles(folder, shape)
    files.check(shapes_of(shape))
    for name, size in shapes_of(shape).items():
        files.read(name, size)


INVENTORY = {"defaults": {"user": "root", "python": "~/v/bin/python"}, "groups": {"green": ["n[1-3]"], "red": ["m"]}}
TARGETS = {
    "inventory": Target(_text("i.yaml", yaml.safe_dump(INVENTORY)), lambda f: void(load_inventory(f / "i.yaml"))),
    "cluster": Target(_cluster, _read_cluster),
    "recipe": Target(_text("recipe.yaml", yaml.safe_dump(RECIPE)), _read_recipe),
    "plan": Target(_plan, _read_plan),
    "profile": Target(_profile, _read_profile),
    "run folder": Target(_run, _read_run),
    "raw": Target(_raw, _read_raw),
    "outputs": Target(_outputs, _read_outputs),
    "capture": Target(_capture, _read_capture),
    "checkpoint": Target(_checkpoint, _read_checkpoint),
    "jsonl": Target(_jsonl, _read_jsonl),
    "tokenizer": Target(_tokenizer, _read_tokenizer),
    "megatron": Target(_megatron, lambda f: void(open_indexed(str(f / "x")))),
    "hardware": Target(_hardware, _read_hardware),
    "weights": Target(_weights, _read_weights),
    "ssh config": Target(_ssh, _read_ssh),
    "host ranges": Target(_text("hosts", "root@n[01-16]:22,[fe80::1]:22", "a,b[1-3,5],c"), _read_hosts),
}


def void(_: object) -> None:
    """A reader's answer is not looked at."""
