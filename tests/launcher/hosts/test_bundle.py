"""What travels to hosts: complete, the same each time, and only where it is needed and fits."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.hosts import bundle
from hetctl.launcher.supervisor.launch import code_root


def names(made: bundle.Bundle) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(made.packed)).namelist())


def test_the_code_travels_with_its_links_followed_and_its_entry_point() -> None:
    made = bundle.code_bundle(code_root() / "hetctl")
    assert {
        "hetctl/__init__.py",
        "hetctl/comm/group/backend.py",
        "hetctl/launcher/agent/agent.py",
        "hetctl/trainer/loop/loop.py",
    } <= names(made)
    assert "hetctl_entry-0.dist-info/entry_points.txt" in names(made)
    assert not any("__pycache__" in name for name in names(made))
    assert made == bundle.code_bundle(code_root() / "hetctl"), "the same code has the same name"


def test_a_folder_of_a_person_travels_without_what_is_not_theirs(tmp_path: Path) -> None:
    for name in ("train.py", "deep/more.py", ".git/config", "runs/x", "__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    first = bundle.folder_bundle(tmp_path)
    assert names(first) == {"train.py", "deep/more.py"}
    (tmp_path / "train.py").write_text("changed")
    assert bundle.folder_bundle(tmp_path).digest != first.digest


def test_a_folder_too_large_to_travel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_FOLDER_BYTES", 10)
    (tmp_path / "a").write_bytes(b"x" * 11)
    with pytest.raises(ConfigError, match="cannot travel"):
        bundle.folder_bundle(tmp_path)


@pytest.mark.parametrize(
    ("found", "machine", "expected"),
    [
        ({"torch": "2.13", "numpy": "2", "safetensors": "0.4"}, "x", ([], False)),
        ({"torch": "2.13", "numpy": "2", "safetensors": None}, "x", ([], True)),
        ({"torch": "2.13", "numpy": "2", "safetensors": None}, "other", (["safetensors"], False)),
        ({"torch": None, "numpy": None, "safetensors": None}, "x", (["torch", "numpy"], True)),
    ],
)
def test_what_a_host_lacks(found: dict[str, str | None], machine: str, expected: tuple[list[str], bool]) -> None:
    made = bundle.Bundle("d", b"", "x", carried=("safetensors",))
    assert bundle.missing_packages(found, made, machine) == expected
