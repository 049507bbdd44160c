"""PyTorch's own collective tests against `het`: counts, and every test that gloo passes and `het` does not.

`python tests/torch_suite.py het` (or `gloo` for the baseline). Each test runs in processes of its own over islands of
2 and 1 ranks. The suite chooses by name between gloo and nccl in decorators and inside tests, so it is told "gloo" and
its worlds are made `het`: that way the tests that it reserves for gloo run too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

SIZES = (2, 1)
os.environ.setdefault("WORLD_SIZE", str(sum(SIZES)))
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "90")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="hetctl-torch-suite-"))

import torch  # noqa: E402
import torch.distributed  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

for _feature in DistTestCases.backend_feature.values():
    _feature.add("het")

from torch.testing._internal.distributed import distributed_test  # noqa: E402

for _list in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
    getattr(distributed_test, _list).append("het")
if os.environ.get("SUITE_BACKEND", "het") == "het":
    from hetctl.comm.group.autoload import register

    register()
    _init = torch.distributed.init_process_group

    def _init_het(backend: str | None = None, **options: object) -> None:
        """The suite says gloo, by name, in its decorators and in its tests; the world that it gets is `het`."""
        _init("het" if backend == "gloo" else backend, **options)  # type: ignore[arg-type]

    torch.distributed.init_process_group = _init_het


BY_NAME = {"test_get_backend"}  # asks for the name of the back end: here the suite is told the true one
REASONS = {
    "monitored_barrier": "torch.distributed.monitored_barrier refuses every back end that is not named gloo",
}


_SERVER = torch.multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch", "torch.testing._internal.distributed.distributed_test", "hetctl.comm.group.backend"]
)


def _forked(target: Callable[..., None], args: tuple[object, ...], **more: object) -> object:
    """A process of a server that has torch already, with the environment as it is now."""
    return _SERVER.Process(target=_in_environment, args=(dict(os.environ), target, *args), **more)


def _in_environment(environment: dict[str, str], target: Callable[..., None], *args: object, **more: object) -> None:
    os.environ.update(environment)
    target(*args, **more)


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All tests of the suite, each in processes of its own."""

    @classmethod
    def _run(cls, rank: int, test_name: str, *rest: object, **more: object) -> None:
        if test_name in BY_NAME:
            distributed_test.BACKEND = os.environ.get("SUITE_BACKEND", "het")
        super()._run(rank, test_name, *rest, **more)

    def setUp(self) -> None:
        torch.set_num_threads(1)
        super().setUp()
        self._start_processes(_forked)  # not spawned: importing torch would be most of a test's time


class _Counting(unittest.TextTestResult):
    """Remembers each test's outcome and says it as it comes."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.outcomes: dict[str, str] = {}
        self.reasons: Counter[str] = Counter()
        self._began = time.monotonic()

    def startTest(self, test: unittest.TestCase) -> None:
        self._began = time.monotonic()
        super().startTest(test)

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        name = test.id().rsplit(".", 1)[-1]
        self.outcomes[name] = outcome
        print(f"{outcome:5} {time.monotonic() - self._began:5.1f} s  {name}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "pass")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skip")
        self.reasons[reason] += 1

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        self._note(test, "fail")
        print(self._exc_info_to_string(err, test)[-3000:], flush=True)  # type: ignore[attr-defined]

    addError = addFailure


def run(backend: str, names: list[str]) -> dict[str, str]:
    """Outcome (pass, skip, fail) of each named test, or of all."""
    suite = unittest.TestSuite(TorchSuite(n) for n in names or unittest.TestLoader().getTestCaseNames(TorchSuite))
    result = unittest.TextTestRunner(stream=open(os.devnull, "w"), resultclass=_Counting).run(suite)  # noqa: SIM115
    assert isinstance(result, _Counting)
    for reason, count in result.reasons.most_common():
        print(f"skipped {count}: {reason}")
    return result.outcomes


def placement_file() -> str:
    """A file with the placement of islands SIZES."""
    from hetctl.comm.contract.placement import PlacedIsland, Placement

    first, islands = 0, []
    for index, size in enumerate(SIZES):
        islands.append(PlacedIsland(f"island{index}", "cpu", "gloo", tuple(range(first, first + size))))
        first += size
    path = Path(os.environ["TEMP_DIR"]) / "placement.json"
    path.write_text(Placement(tuple(islands)).to_json())
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["het", "gloo"])
    parser.add_argument("tests", nargs="*", help="names of tests; all by default")
    parser.add_argument("--baseline", type=Path, help="outcomes of a gloo run to compare with")
    parser.add_argument("--output", type=Path, help="write the outcomes here as JSON")
    options = parser.parse_args()
    if os.environ.get("SUITE_BACKEND") != options.backend:  # spawned children read it at import
        os.environ["SUITE_BACKEND"] = options.backend
        os.environ["HETCTL_PLACEMENT"] = placement_file()
        os.execv(sys.executable, [sys.executable, *sys.argv])
    outcomes = run(options.backend, options.tests)
    counts = {word: sum(o == word for o in outcomes.values()) for word in ("pass", "fail", "skip")}
    print(f"{options.backend}: {len(outcomes)} tests, " + ", ".join(f"{n} {w}" for w, n in counts.items()))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(outcomes, indent=1))
    if not options.baseline:
        return 0 if not counts["fail"] else 1
    passed = [n for n, o in json.loads(options.baseline.read_text()).items() if o == "pass" and n in outcomes]
    lost = [n for n in passed if outcomes[n] != "pass"]
    share = 1 - len(lost) / max(len(passed), 1)
    print(f"of {len(passed)} tests that gloo passes, het passes {len(passed) - len(lost)} ({share:.1%})")
    for name in lost:
        reason = next((text for part, text in REASONS.items() if part in name), "to be looked at")
        print(f"  lost: {name} ({outcomes[name]}): {reason}")
    return 0 if share >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
