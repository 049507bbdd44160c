"""On a real NVIDIA host: does the local probe say what `nvidia-smi --query-gpu` and `topo -m` say? Exit 1 if not.

python tests/gpu/discover_check.py [--raw FILE] [--interpreter PYTHON]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hetctl.comm.contract.facts import GpuFacts, HostFacts
from hetctl.probe import Options, Raw, extract, parse, program
from hetctl.probe.vendors.nvidia_smi import parse_topology
from hetctl.probe.words import number, pci_address, told

FIELDS = (
    *("index", "name", "uuid", "pci.bus_id", "driver_version", "memory.total", "memory.free"),
    *("pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.max", "compute_cap", "vbios_version", "serial"),
    *("mig.mode.current", "ecc.errors.uncorrected.volatile.total", "power.limit"),
)
MIB = 2**20
Row = tuple[str, str, str, str, bool]  # device, what, the probe's word, nvidia-smi's word, agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", type=Path, help="also keep the probe's raw answer here")
    parser.add_argument("--interpreter", default=sys.executable)
    arguments = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        print("there is no nvidia-smi here to compare with")
        return 1
    raw, seconds = run_probe(arguments.interpreter, arguments.raw)
    facts = parse(raw)
    rows = compare_gpus(facts, query()) + compare_distances(facts) + compare_torch(facts, arguments.interpreter)
    show(facts, rows, seconds)
    wrong = [row for row in rows if not row[4]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} values agree")
    return 1 if wrong or not rows else 0


def run_probe(interpreter: str, keep: Path | None) -> tuple[Raw, float]:
    began = time.monotonic()
    options = Options(interpreters=(interpreter,))
    done = subprocess.run([sys.executable, "-I", "-S", "-"], input=program(options), capture_output=True, timeout=60)
    if keep:
        keep.write_bytes(done.stdout)
    return extract(done.stdout), time.monotonic() - began


def query() -> list[dict[str, str]]:
    argv = ["nvidia-smi", "--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
    text = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    return [dict(zip(FIELDS, (w.strip() for w in line.split(",")), strict=True)) for line in text.splitlines() if line]


def compare_gpus(facts: HostFacts, told_rows: list[dict[str, str]]) -> list[Row]:
    count = ("host", "GPUs", str(len(facts.gpus)), str(len(told_rows)), len(facts.gpus) == len(told_rows))
    rows = [count]
    for gpu, row in zip(facts.gpus, told_rows, strict=False):
        rows += [(gpu.id, what, str(ours), str(theirs), agree) for what, ours, theirs, agree in pairs(gpu, row)]
    return rows


def pairs(gpu: GpuFacts, row: dict[str, str]) -> list[tuple[str, object, object, bool]]:
    """(what, the probe's value, nvidia-smi's, agree). Free memory may move by 1 GiB between the two readings."""
    architecture = "sm_" + row["compute_cap"].replace(".", "")
    generation = {"3": 8.0, "4": 16.0, "5": 32.0, "6": 64.0}.get(row["pcie.link.gen.max"])
    exact: list[tuple[str, object, object]] = [
        ("index", gpu.index, int(row["index"])),
        ("name", gpu.name, told(row["name"])),
        ("uuid", gpu.uuid, told(row["uuid"])),
        ("pci", gpu.pci, pci_address(row["pci.bus_id"])),
        ("driver", gpu.driver, told(row["driver_version"])),
        ("memory total", gpu.memory_total_bytes, _mib(row["memory.total"])),
        ("link width", gpu.pcie.width, number(row["pcie.link.width.current"])),
        ("link width max", gpu.pcie.max_width, number(row["pcie.link.width.max"])),
        ("link speed max", gpu.pcie.max_speed_gt_per_s, generation),
        ("architecture", gpu.architecture, architecture),
        ("firmware", gpu.firmware and gpu.firmware.upper(), (told(row["vbios_version"]) or "").upper() or None),
        ("serial", gpu.serial, told(row["serial"])),
        ("mig", gpu.partition.mode, {"Enabled": "mig", "Disabled": "none"}.get(row["mig.mode.current"])),
        ("ecc uncorrected", gpu.health.ecc_uncorrected, number(row["ecc.errors.uncorrected.volatile.total"])),
        ("power limit", gpu.health.power_limit_w, number(row["power.limit"])),
    ]
    ours, theirs = gpu.memory_free_bytes, _mib(row["memory.free"])
    near = ours is not None and theirs is not None and abs(ours - theirs) <= 1024 * MIB
    return [(what, a, b, a == b) for what, a, b in exact] + [("memory free", ours, theirs, near)]


def _mib(text: str) -> int | None:
    found = number(text)
    return None if found is None else int(found) * MIB


def compare_distances(facts: HostFacts) -> list[Row]:
    """Every cell of the matrix against the record, which took PCIe distances from sysfs where it could."""
    text = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60).stdout
    matrix = parse_topology(text)
    gpus = {f"GPU{g.index}": g for g in facts.gpus}
    ports = {n.rdma_device: n.name for n in facts.nics if n.rdma_device}
    rows: list[Row] = []
    for (row, column), (path, lanes) in matrix.cells.items():
        device = matrix.nics.get(column, column)
        to = gpus[column].id if column in gpus else ports.get(device)
        if row not in gpus or to is None:
            continue
        reach = next((r for r in (*gpus[row].gpus, *gpus[row].nics) if r.to == to), None)
        ours = f"{reach.path}{reach.lanes or ''}" if reach else "unknown"
        rows.append((gpus[row].id, f"to {to}", ours, f"{path}{lanes or ''}", ours == f"{path}{lanes or ''}"))
    return rows


def compare_torch(facts: HostFacts, interpreter: str) -> list[Row]:
    """The versions read from files against those that an import tells."""
    code = "import torch; print(torch.__version__, torch.version.cuda, '.'.join(map(str, torch.cuda.nccl.version())))"
    done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=120)
    words = done.stdout.split()
    python = next((i for i in facts.interpreters if i.path == interpreter), None)
    if len(words) != 3 or python is None:
        return []
    told_by_files = (python.torch, python.cuda, python.nccl)
    names = ("torch", "cuda", "nccl")
    return [("python", n, str(a), b, a == b) for n, a, b in zip(names, told_by_files, words, strict=True)]


def show(facts: HostFacts, rows: list[Row], seconds: float) -> None:
    print(f"probe: {seconds:.2f} s; {facts.system.os}, kernel {facts.system.kernel}, {len(facts.nics)} ports")
    for gpu in facts.gpus:
        nearest = ", ".join(f"{r.to} {r.path}{r.lanes or ''}" for r in (*gpu.gpus, *gpu.nics)[:4])
        print(f"{gpu.id:10} {gpu.name}  {gpu.pci}  numa {gpu.numa_node}  x{gpu.pcie.width}  {nearest or 'no peers'}")
    for device, what, ours, theirs, agree in rows:
        if not agree:
            print(f"DIFFERS  {device:10} {what:18} probe: {ours}   nvidia-smi: {theirs}")
    for sentence in facts.warnings:
        print("warning:", sentence)
    for path, reason in facts.unknown.items():
        print(f"unknown: {path}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
