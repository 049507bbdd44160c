"""Changed inputs, read one after the other: what ends in anything but the house's errors is a defect, and is kept."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import HetctlError
from hetctl.launcher.hosts.shell import ShellError
from tests.fuzz.mutate import Case, mutated
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
CPU_S, MEMORY_KB, MESSAGE = 2.0, 200 * 1024, 2000
REFUSALS = (HetctlError, ShellError)


class Hang(BaseException):
    """More CPU time than an input may cost."""


@dataclass(frozen=True)
class Defect:
    target: str
    what: str  # equal for equal causes
    case: Case
    trace: str


def defects(target: str, count: int, seed: int) -> Iterator[Defect | None]:
    """One for each of `count` changed inputs: what is wrong with it, or None."""
    rng = random.Random(f"{target} {seed}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "seeds").mkdir()
        seeds = TARGETS[target].seeds(folder / "seeds")
        for _ in range(count):
            yield tried(target, mutated(rng.choice(seeds), rng), folder / "case")


def tried(target: str, case: Case, folder: Path) -> Defect | None:
    """What is wrong when a case is read. `folder` is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in case.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "run/launch").mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGPROF, _hangs)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # CPU time: a busy machine is no defect
    try:
        TARGETS[target].read(folder)
    except REFUSALS as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(str(error)) > MESSAGE:
            return Defect(target, f"a message of {MESSAGE} characters or more: {_where(error)}", case, str(error)[:300])
    except (Exception, Hang) as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return Defect(target, f"{type(error).__name__} {_where(error)}", case, traceback.format_exc(limit=-6)[-3000:])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Defect(target, f"{MEMORY_KB // 1024} MB or more", case, "") if grown > MEMORY_KB else None


def keep(defect: Defect) -> Path:
    """The input becomes a case of `make test`."""
    files = {name: base64.b64encode(data).decode() for name, data in defect.case.items()}
    name = hashlib.sha256(defect.what.encode()).hexdigest()[:12]
    path = CORPUS / f"{defect.target.replace(' ', '-')}-{name}.json"
    path.write_text(json.dumps({"target": defect.target, "what": defect.what, "files": files}) + "\n")
    return path


def kept(path: Path) -> tuple[str, Case]:
    data = json.loads(path.read_text())
    return data["target"], {name: base64.b64decode(text) for name, text in data["files"].items()}


def _where(error: BaseException) -> str:
    """The last place in the house's code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/tests/" not in f.filename]
    ours = [f for f in frames if "/hetctl/" in f.filename and "site-packages" not in f.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else str(error)[:60]


def _hangs(*_: Any) -> None:
    raise Hang
