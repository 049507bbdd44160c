"""Environments for ranks: the right torch for each vendor, shown before anything is typed, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.facts import GpuFacts, HostFacts, Interpreter
from hetctl.discovery.execute import HostOutput
from hetctl.discovery.fabric import Report
from hetctl.discovery.inventory import load_inventory
from hetctl.doctor.setup import Setup, exit_code_of_setups, inventory_lines, setups
from tests.rigs import netns
from tests.rigs.cluster import command, environment
from tests.rigs.dress import Costume, dress_host

WHY_NOT = netns.unavailable()
hosts_needed = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def report(name: str, *vendors: str, version: str = "3.12.1") -> Report:
    gpus = tuple(GpuFacts(vendor, str(n)) for n, vendor in enumerate(vendors))
    pythons = (Interpreter("python3.12", version=version),)
    return Report(name, Access(name, python="python3.12"), HostFacts(name, gpus=gpus, interpreters=pythons))


def planned(*reports: Report, path: str = "~/env", **more: str) -> list[Setup]:
    return setups(reports, path=path, **more)


def test_each_vendor_has_its_torch_and_hosts_of_one_vendor_the_path_as_it_is() -> None:
    (one,) = planned(report("a", "nvidia", "nvidia"))
    assert one.lines[1] == "python3.12 -m venv ~/env"
    assert one.lines[2].endswith("'torch>=2.11' --index-url https://download.pytorch.org/whl/cu128")
    (one,) = planned(report("a"), wheels="http://mirror/")
    assert one.vendors == ("cpu",)
    assert one.lines[2].endswith("--index-url http://mirror/cpu")


def test_environments_of_several_vendors_never_share_a_folder() -> None:
    both, green, red = planned(report("both", "nvidia", "amd"), report("green", "nvidia"), report("red", "amd"))
    assert [line for line in both.lines if "venv" in line] == [
        "python3.12 -m venv ~/env-nvidia",
        "python3.12 -m venv ~/env-amd",
    ]
    assert set(green.lines) | set(red.lines) == set(both.lines)


def test_a_path_is_one_word_of_the_shell() -> None:
    (one,) = planned(report("a"), path="~/my env")
    assert "python3.12 -m venv ~/'my env'" in one.lines
    (one,) = planned(report("a"), path="/x; rm -r y")
    assert "python3.12 -m venv '/x; rm -r y'" in one.lines


def test_hosts_on_which_nothing_can_be_typed_say_why() -> None:
    away = Report("away", Access("away"), None, status="timeout", reason="no answer")
    fine, old, foreign, gone = planned(report("fine"), report("old", version="3.9.2"), report("x", "mthreads"), away)
    assert (fine.problem, old.lines, foreign.lines, gone.lines) == ("", (), (), ())
    assert "is 3.9, 3.11 is needed" in old.problem
    assert "mthreads" in foreign.problem
    assert "timeout" in gone.problem
    assert [exit_code_of_setups(some) for some in ([fine], [fine, foreign], [foreign, gone])] == [0, 1, 4]


def test_what_to_write_is_an_inventory(tmp_path: Path) -> None:
    said = "torch 2.13.0+cu128 in /root/e-nvidia/bin/python"
    outputs = [HostOutput(f"node{n}", 0, said) for n in (1, 2)]
    outputs += [HostOutput("both", 0, f"a warning\n{said}\ntorch 2.12 in /root/e-amd/bin/python")]
    outputs += [HostOutput("bad", 1, said)]
    hosts = planned(*(report(o.name, "nvidia", *["amd"] * (o.name == "both")) for o in outputs))
    (tmp_path / "inventory.yaml").write_text("\n".join(inventory_lines(hosts, outputs)))
    found = {e.name: e.access for e in load_inventory(tmp_path / "inventory.yaml").entries}
    green, red = "/root/e-nvidia/bin/python", "/root/e-amd/bin/python"
    assert {name: access.python for name, access in found.items()} == dict.fromkeys(("node1", "node2", "both"), green)
    assert found["both"].pythons == {"nvidia": green, "amd": red}
    assert not found["node1"].pythons
    assert inventory_lines(hosts, [HostOutput("bad", 1, "")]) == []


def dressed(folder: Path, costume: Costume) -> netns.HostSpec:
    """A host that looks like that to the probe, and makes environments whose python notes what it is told."""
    own = (
        '#!/bin/sh\necho "$@" >> ~/typed\n[ "$1" != -c ] || echo "torch 2.13.0+stub in $0"\n'
        'case "$*" in *rocm*) [ ! -e ~/broken ] || { echo "no such wheel" >&2; exit 7; };; esac\n'
    )
    make = f'mkdir -p "$3/bin"; cat > "$3/bin/python" <<\'END\'\n{own}END\nexec chmod +x "$3/bin/python"\n'
    probe = netns.dressed_python(dress_host(folder, costume)).partition("\n")[2]
    return netns.HostSpec(tools={"python3": f'#!/bin/sh\nif [ "$1 $2" = "-m venv" ]; then\n{make}fi\n{probe}'})


@hosts_needed
def test_nothing_is_typed_before_it_was_shown_and_agreed_to(tmp_path: Path) -> None:
    specs = [dressed(tmp_path / f"dress{n}", Costume(f"h{n}", n, vendor=v)) for n, v in enumerate(("nvidia", "amd"))]
    with netns.hosts([*specs, netns.HostSpec(sshd=False)], tmp_path / "rig") as rig:
        (green, red, gone), env = rig.hosts, environment(rig)

        def hetctl(*words: str, answer: str = "") -> subprocess.CompletedProcess[str]:
            argv = command("setup", green.name, red.name, *words)
            return subprocess.run(
                argv, cwd=tmp_path, env=env, input=answer, text=True, capture_output=True, timeout=200
            )

        def typed(host: netns.RigHost) -> str:
            file = host.folder / "home" / "typed"
            return file.read_text() if file.exists() else ""

        done = hetctl("--dry-run")
        assert done.returncode == 0, done.stderr
        assert f"{green.name} (nvidia):\n  mkdir -p ~/hetctl-env-nvidia" in done.stdout
        assert "whl/rocm7.2" in done.stdout
        assert hetctl(answer="n\n").returncode == 1
        assert hetctl().returncode == 1, "nobody answers"
        assert (typed(green), typed(red)) == ("", "")
        done = hetctl(answer="y\n")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Type this on 2 hosts?" in done.stderr
        for host, vendor, index in ((green, "nvidia", "cu128"), (red, "amd", "rocm7.2")):
            assert f"torch>=2.11 --index-url https://download.pytorch.org/whl/{index}\n" in typed(host)
            python = host.folder / "home" / f"hetctl-env-{vendor}" / "bin" / "python"
            assert f"  {host.name}: {{python: {python}}}\n" in done.stdout
        (red.folder / "home" / "broken").touch()
        done = hetctl("--yes", gone.name, "--json")
        assert done.returncode == 4
        document = json.loads(done.stdout)
        assert document["inventory"][1].startswith(f"  {green.name}: ")
        assert len(document["inventory"]) == 2
        assert f"{red.name}: exit code 7" in done.stderr
        assert "no such wheel" in done.stderr


def wheel(folder: Path, name: str) -> None:
    """A package of that name in a folder that pip reads as an index."""
    (folder / name).mkdir(parents=True)
    about = f"{name}-99.0.dist-info"
    files = {
        f"{name}/__init__.py": '__version__ = "99.0"\n',
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    file = f"{name}-99.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / name / file, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    (folder / name / "index.html").write_text(f'<a href="{file}">{file}</a>')


@pytest.mark.slow
@hosts_needed
def test_a_real_environment_from_an_index_of_our_own(tmp_path: Path) -> None:
    """Two hosts that share their home, and so the environment: they take turns."""
    index = tmp_path / "whl" / "cpu"
    for name in ("torch", "numpy", "safetensors", "tokenizers"):
        wheel(index, name)
    env = {"PIP_INDEX_URL": index.as_uri(), "PIP_CONFIG_FILE": os.devnull}
    with netns.hosts([netns.HostSpec(env=env) for _ in range(2)], tmp_path / "rig") as rig:
        names = [host.name for host in rig.hosts]
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        for host in rig.hosts:
            (host.folder / "bin" / f"python{version}").symlink_to(netns.PYTHON)
        words = ("--yes", "--python", version, "--path", str(tmp_path / "env"), "--wheels", (tmp_path / "whl").as_uri())
        argv = command("setup", *names, *words)
        done = subprocess.run(argv, cwd=tmp_path, env=environment(rig), text=True, capture_output=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"torch 99.0 in {tmp_path / 'env'}/bin/python" in done.stdout
        assert f"  {names[0][:-1]}[0-1]: {{python: {tmp_path / 'env'}/bin/python}}" in done.stdout
