"""Which files of a person's folder travel: as git would have it, as .hetctlignore says, and never a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.hosts import folder_files
from hetctl.launcher.hosts.folder_files import files_of_folder


def lay(folder: Path, *names: str, **texts: str) -> None:
    for name in (*names, *texts):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts.get(name, name))


def ignore(folder: Path, *lines: str, file: str = ".gitignore") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("\n".join(lines) + "\n")


def test_gitignore_holds_as_in_git_and_hetctlignore_has_the_last_word(tmp_path: Path) -> None:
    lay(
        tmp_path, "train.py", "a.log", "keep.log", "data/big.bin", "data/small.txt", "deep/a.tmp", "deep/b.tmp", "notes"
    )
    ignore(tmp_path, "*.log", "!keep.log", "data/", "*.tmp")
    ignore(tmp_path / "deep", "!b.tmp")
    ignore(tmp_path, "!data/", "*.bin", "/notes", file=".hetctlignore")
    chosen = files_of_folder(tmp_path)
    rules = {".gitignore", "deep/.gitignore", ".hetctlignore"}
    assert set(chosen.files) - rules == {"train.py", "keep.log", "data/small.txt", "deep/b.tmp"}
    assert chosen.left_out == {".gitignore": 2, ".hetctlignore": 2}


def test_rules_above_the_folder_hold_up_to_its_repository(tmp_path: Path) -> None:
    lay(tmp_path, "repository/.git/config", "repository/scripts/train.py", "repository/scripts/out.pt")
    ignore(tmp_path, "*.py")
    ignore(tmp_path / "repository", "/scripts/*.pt")
    chosen = files_of_folder(tmp_path / "repository" / "scripts")
    assert set(chosen.files) == {"train.py"}


@pytest.mark.parametrize(
    "name",
    [
        *(".env", ".env.local", "server.pem", "id_rsa", "id_ed25519", ".netrc", ".ssh/config", "deep/.aws/credentials"),
        *(".git-credentials", "credentials.json", ".kaggle/kaggle.json", ".bash_history", "host.key", ".pypirc"),
    ],
)
def test_secrets_never_travel_whatever_the_rules_say(tmp_path: Path, name: str) -> None:
    lay(tmp_path, "train.py", name)
    ignore(tmp_path, "!*", file=".hetctlignore")
    chosen = files_of_folder(tmp_path)
    assert set(chosen.files) == {"train.py", ".hetctlignore"}
    assert sum(chosen.left_out.values()) == 1
    (said,) = chosen.left_out
    assert said in name
    assert f"left out: {said})" in chosen.sentence


def test_files_that_only_look_like_secrets_travel(tmp_path: Path) -> None:
    names = {"id_map.json", "environment.py", "keys.py", "env.py", "credentials.py"}
    folder = tmp_path / "credentials"  # what it stands in says nothing of it
    lay(folder, *names)
    assert set(files_of_folder(folder).files) == names


def test_a_link_to_a_secret_is_one_and_a_link_to_a_folder_is_said(tmp_path: Path) -> None:
    lay(tmp_path, "home/.ssh/id_rsa", "mine/train.py", "shared/lib.py")
    (tmp_path / "mine" / "key.txt").symlink_to(tmp_path / "home" / ".ssh" / "id_rsa")
    (tmp_path / "mine" / "lib.py").symlink_to(tmp_path / "shared" / "lib.py")
    (tmp_path / "mine" / "shared").symlink_to(tmp_path / "shared")
    chosen = files_of_folder(tmp_path / "mine")
    assert set(chosen.files) == {"train.py", "lib.py"}
    assert chosen.left_out == {"key.txt": 1, "shared (a linked folder)": 1}


def test_what_is_sent_is_one_line(tmp_path: Path) -> None:
    lay(tmp_path, "train.py", "lib/a.py", "x.log", "y.log", ".env", "runs/1/log", ".git/config", "__pycache__/a.pyc")
    lay(tmp_path, "my-run/launch/identity", "my-run/logs/rank-0.log")
    ignore(tmp_path, "*.log")
    sentence = files_of_folder(tmp_path).sentence
    assert sentence == f"sends 3 files, 22 B of {tmp_path} (left out: .env, 2 by .gitignore, my-run (a run), runs)"


def test_a_folder_too_large_to_travel_names_what_is_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_files, "MAX_BYTES", 30)
    lay(tmp_path, "train.py", **{"data/a": "x" * 20, "data/b": "x" * 9, "weights.pt": "x" * 10})
    with pytest.raises(ConfigError, match=r"holds 47 B.*largest: data 29 B, weights.pt 10 B, train.py 8 B") as raised:
        files_of_folder(tmp_path)
    assert ".hetctlignore" in raised.value.hint
    ignore(tmp_path, "data", ".hetctlignore", file=".hetctlignore")
    assert set(files_of_folder(tmp_path).files) == {"train.py", "weights.pt"}


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_files, "MAX_FILES", 3)
    lay(tmp_path, "a", "b", "c")
    assert len(files_of_folder(tmp_path).files) == 3
    lay(tmp_path, "d")
    with pytest.raises(ConfigError, match="more than 3 files"):
        files_of_folder(tmp_path)
