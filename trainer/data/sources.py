"""Documents: the texts of a source (a file, rows, a folder, or Python's own library), in a fixed order."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.files import read_text
from hetctl.comm.contract.units import MiB
from hetctl.trainer.data.megatron import files_of, is_megatron
from hetctl.trainer.data.tables import ROW_SUFFIXES, keys_of, rows_of
from hetctl.trainer.recipe import NO_PATHS, PAIRS, STDLIB, DataSection

TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
    *ROW_SUFFIXES,
)
MAX_TOKENIZER_BYTES = 256 * MiB
CHAT = ({"messages"}, {"conversations"}, {"prompt", "completion"})  # the keys that rows of conversations have
SIDES = ("chosen", "rejected")  # those of preference pairs
TEMPLATES = "additional_chat_templates"
BESIDE = ("special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja")  # the later say more
SETTINGS = ("generation_config.json", "config.json")  # of a model; transformers too reads the second without a first
LEFT_OUT = ("test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3")


@dataclass(frozen=True)
class Document:
    """One text and the name it is known by (which decides whether it is held out)."""

    name: str
    text: str


def source_files(section: DataSection) -> list[Path]:
    """The files of a source, sorted. Raises ConfigError when there is nothing to read."""
    if section.source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in root.rglob("*.py") if not set(p.relative_to(root).parts) & set(LEFT_OUT)]
        return _some(files, f"no standard library sources under {root}")
    if is_megatron(section.source):
        return list(files_of(section.source))
    path = Path(section.source)
    if path.is_dir():
        files = [p for p in path.rglob("*") if p.is_file() and p.suffix in TEXT_SUFFIXES and not _is_cache(p)]
        return _some(files, f"the folder {path} holds no text to train on")
    if not path.is_file():
        raise ConfigError(f"the data path '{path}' does not exist", hint="set data.source to a file or folder of text")
    return _some([path], "")


def named_files(section: DataSection) -> Iterator[tuple[Path, str]]:
    """The files of a source, each with its name in the source. Raises ConfigError."""
    root = Path(sysconfig.get_paths()["stdlib"]) if section.source == STDLIB else Path(section.source)
    for path in source_files(section):
        yield path, str(path.relative_to(root)) if path != root else path.name


def is_chat(section: DataSection) -> bool:
    """Whether a source's rows are conversations, as those of its first file of rows say. Raises ConfigError."""
    keys = _keys(section)
    asked = section.field not in keys or section.field in ("messages", "conversations")
    return asked and any(needed <= keys for needed in (*CHAT, set(SIDES)))


def is_pairs(section: DataSection) -> bool:
    """Whether these are two answers to one prompt, as far as nothing says that rows hold something else."""
    keys = _keys(section)
    others = section.field in keys or any(needed <= keys for needed in CHAT)
    return set(SIDES) <= keys and (section.field == PAIRS or not others)


def check_pairs(data: DataSection, *, wanted: bool) -> None:
    """Raise ConfigError unless all sources hold preference pairs, or none, as is `wanted`."""
    for one in data.each:
        if wanted and not is_pairs(one):
            raise ConfigError(
                f"dpo trains on preference pairs, and the rows of '{one.source}' are none",
                hint="rows have prompt, chosen and rejected, or the last two as messages; data.field is not set",
            )
        if not wanted and is_pairs(one):
            raise ConfigError(
                f"'{one.source}' holds preference pairs, and nothing says to train on them",
                hint="--dpo 0.1 (dpo.beta); data.field names a key with texts",
            )


def _keys(section: DataSection) -> set[str]:
    """Those that the first file of rows has."""
    files = [] if section.source == STDLIB or is_megatron(section.source) else source_files(section)
    return next((set(keys_of(path)) for path in files if path.suffix in ROW_SUFFIXES), set[str]())


def beside_tokenizer(tokenizer: str) -> list[Path]:
    """The files beside a tokenizer.json that say what its special tokens are, and how conversations are written."""
    if tokenizer == "bytes":
        return []
    folder = Path(tokenizer).parent
    return [path for name in BESIDE if (path := folder / name).is_file()] + sorted(folder.glob(f"{TEMPLATES}/*.jinja"))


def settings_beside(tokenizer: str) -> Path | None:
    """The file of its model that names end tokens: only beside the tokenizer are those numbers its words."""
    files = [] if tokenizer == "bytes" else [Path(tokenizer).with_name(name) for name in SETTINGS]
    return next((file for file in files if file.is_file()), None)


def documents(section: DataSection) -> Iterator[Document]:
    """All texts of the source in a fixed order. Raises ConfigError for files and lines that cannot be read."""
    for path, name in named_files(section):
        try:
            yield from _texts(path, name, section.field)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def fingerprint(section: DataSection) -> str:
    """A digest of the source as it stands now: names, sizes and modification times. Raises ConfigError."""
    digest = hashlib.sha256(repr(section).encode())
    for path in source_files(section):
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    if section.tokenizer != "bytes":
        path = Path(section.tokenizer)
        digest.update(read_text(path, what="tokenizer", max_bytes=MAX_TOKENIZER_BYTES).encode())
        settings = path.with_name("tokenizer_config.json")  # it may name the end of a text
        if settings.is_file():
            digest.update(read_text(settings, what="tokenizer", max_bytes=MAX_TOKENIZER_BYTES).encode())
    if is_chat(section):
        digest.update(section.template.encode())
        named = [Path(section.template)] if section.template not in NO_PATHS else []
        for path in [*named, *beside_tokenizer(section.tokenizer)]:
            digest.update(read_text(path, what="chat template", max_bytes=MAX_TOKENIZER_BYTES).encode())
    return digest.hexdigest()[:24]


def held_out(name: str, section: DataSection) -> bool:
    """Whether a document belongs to validation: by a hash of its name, so that it never changes sides."""
    digest = hashlib.sha256(f"{section.seed}/{name}".encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < section.validation_share


def _texts(path: Path, name: str, field: str) -> Iterator[Document]:
    if path.suffix not in ROW_SUFFIXES:
        yield Document(name, path.read_text(encoding="utf-8", errors="replace"))
        return
    for row in rows_of(path, (field,)):
        text = row.values.get(field) if isinstance(row.values, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f"{row.place}: no text under the key '{field}'", hint="set data.field to the text's key")
        yield Document(f"{name}#{row.number}", text)


def _is_cache(path: Path) -> bool:
    """What the library `datasets` leaves beside a dataset's own files."""
    return path.suffix == ".arrow" and path.name.startswith("cache-")


def _some(files: list[Path], otherwise: str) -> list[Path]:
    found = sorted(f for f in files if f.stat().st_size > 0)
    if not found:
        raise ConfigError(otherwise or f"the data path '{files[0]}' is empty", hint="set data.source to some text")
    return found
