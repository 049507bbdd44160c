"""Which files of a person's folder travel to hosts: not what .gitignore and .hetctlignore name, and never secrets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.units import MiB, count_of, listed, show_bytes

MAX_BYTES, MAX_FILES = 64 * MiB, 20_000
RULES = (".hetctlignore", ".gitignore")  # the first has the last word, also over the second of a deeper folder
REMADE = frozenset({"__pycache__", ".git", ".venv", "venv", "node_modules", "runs", ".mypy_cache", ".ruff_cache"})
_SECRETS = (  # by name, whatever the rules say
    ".env .env.* *.pem *.key *.p12 *.pfx *.keytab *.kdbx id_rsa* id_dsa* id_ecdsa* id_ed25519* .netrc _netrc .pgpass",
    ".git-credentials credentials credentials.json credentials.db credentials.toml credentials.y*ml *_credentials.json",
    ".pypirc .npmrc .*_history .ssh .gnupg .aws .azure .kube .docker .kaggle",
)
_SECRET = GitIgnoreSpec.from_lines(" ".join(_SECRETS).split())
_Rules = tuple[Path, Mapping[str, GitIgnoreSpec]]  # a folder, and what its rule files say


@dataclass(frozen=True)
class FolderFiles:
    """What travels (name in the folder -> file), and how much stays: a file's name, or by what -> entries."""

    folder: Path
    files: Mapping[str, Path]
    bytes: int
    left_out: Mapping[str, int]

    @property
    def sentence(self) -> str:
        """For people, in a line."""
        out = [f"{count} by {why}" if why in RULES else why for why, count in sorted(self.left_out.items())]
        left = f" (left out: {listed(out)})" if out else ""
        return f"sends {count_of(len(self.files), 'file')}, {show_bytes(self.bytes)} of {self.folder}{left}"


def files_of_folder(folder: Path) -> FolderFiles:
    """What of a folder travels. Raises ConfigError where it is too much."""
    files: dict[str, Path] = {}
    sizes: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for path in _kept(folder, _rules_above(folder), left_out):
        name = path.relative_to(folder).as_posix()
        files[name] = path
        sizes[name.split("/")[0]] += path.stat().st_size
        if len(files) > MAX_FILES:
            raise _too_much(folder, f"more than {MAX_FILES:,} files", sizes)
    if sizes.total() > MAX_BYTES:
        raise _too_much(folder, show_bytes(sizes.total()), sizes)
    return FolderFiles(folder, files, sizes.total(), left_out)


def _too_much(folder: Path, what: str, sizes: Counter[str]) -> ConfigError:
    largest = ", ".join(f"{name} {show_bytes(size)}" for name, size in sizes.most_common(4))
    return ConfigError(
        f"{folder} holds {what}, too much to send to hosts ({show_bytes(MAX_BYTES)}, {MAX_FILES:,} files); "
        f"the largest: {largest}",
        hint=f"name what is not needed in {folder / RULES[0]}, or put the program into a folder of its own",
    )


def _kept(folder: Path, above: list[_Rules], left_out: Counter[str]) -> Iterator[Path]:
    """The files of a folder that travel, in order; what does not is counted. A folder left out is not looked into."""
    rules = [_rules_of(folder), *above]
    for path in sorted(folder.iterdir()):
        why = _why_not(path, rules)
        if why:
            left_out[why] += 1
        elif why is None and path.is_dir():
            yield from _kept(path, rules, left_out)
        elif why is None and path.is_file():
            yield path


def _why_not(path: Path, rules: list[_Rules]) -> str | None:
    """What leaves an entry out, in words ('': nothing worth a word), or None."""
    if _SECRET.match_file(path.name) or (path.is_symlink() and _SECRET.match_file(path.resolve().as_posix())):
        return path.name
    if path.name in REMADE:
        return "" if path.name[0] in "._" else path.name
    if path.is_dir() and path.is_symlink():
        return f"{path.name} (a linked folder)"
    if (path / "launch" / "identity").is_file():
        return f"{path.name} (a run)"
    for file in RULES:
        for folder, specs in rules:
            name = path.relative_to(folder).as_posix() + "/" * path.is_dir()
            if (said := specs[file].check_file(name).include) is not None:
                return file if said else None
    return None


def _rules_of(folder: Path) -> _Rules:
    lines = {name: (folder / name).read_text(errors="replace") if (folder / name).is_file() else "" for name in RULES}
    return folder, {name: GitIgnoreSpec.from_lines(text.splitlines()) for name, text in lines.items()}


def _rules_above(folder: Path) -> list[_Rules]:
    """Those between a folder and the repository that it is in, the nearest first."""
    above = [folder, *folder.parents]
    end = next((number for number, one in enumerate(above) if (one / ".git").exists()), 0)
    return [_rules_of(one) for one in above[1 : end + 1]]
