"""What travels to hosts: complete, the same each time, and only where it is needed and fits."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from hetctl.launcher.hosts import bundle
from hetctl.launcher.hosts.folder_files import files_of_folder
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


def test_what_was_chosen_of_a_folder_travels_under_the_name_of_its_content(tmp_path: Path) -> None:
    for name in ("train.py", "deep/more.py", ".env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    first = bundle.folder_bundle(files_of_folder(tmp_path))
    assert names(first) == {"train.py", "deep/more.py"}
    (tmp_path / "train.py").write_text("changed")
    assert bundle.folder_bundle(files_of_folder(tmp_path)).digest != first.digest


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
