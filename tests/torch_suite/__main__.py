"""PyTorch's own distributed tests against `het`: counts, and every test that gloo passes and `het` does not.

`python -m tests.torch_suite gloo`, then `het`, which compares. Without more it is the tests of collectives that torch
brings along, torchft's of groups and torchcomms' integration tests where these are installed; `--tests FOLDER` names
PyTorch's own `test/distributed`, of the installed version, and adds the files of it in FILES. None of them is changed:
what they ask for by gloo's name, or by none, is `het`, as `hetctl run --as-nccl` has it, over islands of 1, 2 and all
further ranks. Outcomes and logs are in build/torch-suite.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hetctl.comm.contract import variables
from hetctl.comm.contract.natives import HOST
from hetctl.comm.contract.placement import PlacedIsland, Placement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ISLANDS = Placement(
    tuple(
        PlacedIsland(f"island{n}", "cpu", "gloo", ranks) for n, ranks in enumerate(((0,), (1, 2), tuple(range(3, 64))))
    )
)
FILES = (  # or folders, of which all files are run; those that an older or a newer PyTorch lacks are left out
    *("test_c10d_object_collectives.py", "test_functional_api.py", "test_c10d_functional_native.py"),
    *("test_device_mesh.py", "test_collective_utils.py", "test_c10d_common.py"),
    *("tensor", "_tensor", "checkpoint", "pipelining", "_composable/fsdp"),
)
LEAVES_OUT = (
    "compile",
    "attention",
    "dtensor_ops",
    "xla",
    "micro_pipeline",
    "CudaGraphs",
    "Fullgraph",
)  # hours of the compiler, or of operators
TORCHFT = "process_group_test.py"
REASONS = {
    "monitored_barrier": "torch.distributed.monitored_barrier refuses every back end that is not named gloo",
    "py/MonitoredBarrierTest": "it skips back ends that are not named gloo",
    **dict.fromkeys(
        ("py/BackendWrapperCoalescing", "py/C10dBatchIsend"),
        "torchcomms gives no back end in Python batches of messages",
    ),
    **dict.fromkeys(
        ("py/ReconfigureTest", "py/GetInitHandleTest", "py/RegisterTensorTest"), "torchcomms has it for C++ alone"
    ),
    "py/WaitBlockingTest": "it wants a handle that goes on: collectives have ended when their call returns",
}
SECONDS = 240  # of one test
RANKS = 4  # of torchcomms' tests
OUT = ROOT / "build" / "torch-suite"


def outcomes_of(backend: str, only: str, file: Path) -> dict[str, str]:
    """Outcome (pass, skip, fail) of each test of a file; a process that dies is one failure, by the file's name."""
    name, began = OUT / f"{backend}-{file.parent.name}-{file.stem}", time.monotonic()
    found = name.with_suffix(".xml")
    for old in OUT.glob(f"{found.name}*"):
        old.unlink()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "90"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if backend == "het":
        told = {variables.DEVICE_TYPE: HOST, variables.AS_NCCL: "1"}
        environment |= {variables.PLACEMENT: str(OUT / "placement.json"), **told}
    words = ["pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(file.parent)]
    words += ["--timeout", str(SECONDS), "--junitxml", str(found), "-k", only, str(file)]
    if file.parts[-3:-1] == ("integration", "py"):  # torchcomms': each rank runs the file
        environment |= {"TEST_BACKEND": backend, "TEST_DEVICE": HOST}
        start = [*("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)), "-m"]
        words += ["-p", "tests.torch_suite.each_rank"]
    else:
        start, words = [], [*words, "-p", "tests.torch_suite.forked"]
        words += ["-p", "tests.torch_suite.torchft_over_het"] if file.name == TORCHFT else []
    argv = [sys.executable, "-W", "ignore", "-m", *start, *words]
    with name.with_suffix(".log").open("w") as lines:
        subprocess.run(argv, cwd=file.parent, env=environment, stdout=lines, stderr=subprocess.STDOUT, check=False)
    outcomes = _of_all_ranks([_read(one) for one in OUT.glob(f"{found.name}*")]) or {"died": "fail"}
    counts = Counter(outcomes.values())
    print(f"{time.monotonic() - began:6.0f} s  {file.name}: {dict(counts)}", flush=True)
    return {f"{_name(file)}::{name}": outcome for name, outcome in outcomes.items()}


def _of_all_ranks(ranks: list[dict[str, str]]) -> dict[str, str]:
    """What is the same on all ranks that ran a test; else it failed."""
    names = {name: None for rank in ranks for name in rank}
    said = {name: {rank.get(name, "fail") for rank in ranks} for name in names}
    return {name: one.pop() if len(one) == 1 else "fail" for name, one in said.items()}


def _name(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


def _read(found: Path) -> dict[str, str]:
    outcomes = {}
    for case in ElementTree.parse(found).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        word = "fail" if kinds & {"failure", "error"} else "skip" if "skipped" in kinds else "pass"
        outcomes[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = word
    return outcomes


def files_of(tests: Path | None) -> list[Path]:
    """The tests of collectives, torchft's where it is installed, and PyTorch's files where their folder is given."""
    found = [HERE / "collectives.py"]
    torchft = importlib.util.find_spec("torchft")
    found += [Path(folder) / TORCHFT for folder in (torchft and torchft.submodule_search_locations) or ()]
    torchcomms = importlib.util.find_spec("torchcomms")
    for folder in (torchcomms and torchcomms.submodule_search_locations) or ():
        found += sorted(Path(folder).glob("tests/integration/py/*Test.py"))
    for name in FILES if tests is not None else ():
        path = Path(tests or ".").resolve() / name
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.exists() else []
    return [path for path in found if not any(word in path.name for word in LEAVES_OUT)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=["het", "gloo"])
    parser.add_argument("--tests", type=Path, help="PyTorch's test/distributed")
    parser.add_argument("--file", default="", help="only files whose path has this")
    parser.add_argument("-k", dest="only", default="", help="only tests that pytest's -k names, of gloo's run as well")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time; each has up to four ranks")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "placement.json").write_text(ISLANDS.to_json())
    asked = [file for file in files_of(options.tests) if options.file in str(file)]
    with ThreadPoolExecutor(options.jobs) as pool:
        of_files = pool.map(partial(outcomes_of, options.backend, options.only), asked)
        outcomes = {name: outcome for of_file in of_files for name, outcome in of_file.items()}
    print(f"{options.backend}: {len(outcomes)} tests, {dict(Counter(outcomes.values()))}")
    if options.backend == "gloo":
        (OUT / "gloo.json").write_text(json.dumps(outcomes, indent=1))
        return 0
    natively = json.loads((OUT / "gloo.json").read_text())
    ran = {_name(file) for file in asked}  # of one that died no test is known
    passed = [n for n, o in natively.items() if o == "pass" and n.partition("::")[0] in ran]
    lost = [n for n in passed if outcomes.get(n) != "pass"]
    kept = len(passed) - len(lost)
    print(f"of {len(passed)} tests that gloo passes, het passes {kept} ({kept / max(len(passed), 1):.1%})")
    for name in lost:
        reason = next((text for part, text in REASONS.items() if part in name), "to be looked at")
        print(f"  lost: {name} ({outcomes.get(name)}): {reason}")
    return 0 if all(any(part in name for part in REASONS) for name in lost) else 1


if __name__ == "__main__":
    sys.exit(main())
