"""The hardware table: every product is recognised by its ids and names, and its figures are possible and sourced."""

from __future__ import annotations

from itertools import permutations

import pytest

from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.units import GiB
from hetctl.trainer.planning.hardware import CLASSES, TABLE, Hardware, HardwareFile, OwnDevice

ROWS = [row for row in CLASSES.values() if row.vendor != "cpu"]
NAMES = {  # as nvidia-smi, procfs, amd-smi (market and board names), rocm-smi, sysfs and xpu-smi print them
    "nvidia": {
        "Tesla P100-SXM2-16GB": "p100",
        "Tesla P100-PCIE-16GB": "p100-pcie",
        "Tesla V100-SXM2-32GB": "v100",
        "Tesla V100-PCIE-16GB": "v100-pcie",
        "Tesla V100S-PCIE-32GB": "v100s",
        "Tesla T4": "t4",
        "NVIDIA GeForce RTX 2080 Ti": "rtx2080ti",
        "NVIDIA TITAN RTX": "titanrtx",
        "NVIDIA A10": "a10",
        "NVIDIA A10G": "a10g",
        "NVIDIA A30": "a30",
        "NVIDIA A40": "a40",
        "NVIDIA A100-SXM4-40GB": "a100-40g",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100 80GB PCIe": "a100",
        "NVIDIA A100X": "a100x",
        "NVIDIA A800-SXM4-80GB": "a800",
        "NVIDIA A800 40GB Active": "a800-40g",
        "NVIDIA L4": "l4",
        "NVIDIA L20": "l20",
        "NVIDIA L40": "l40",
        "NVIDIA L40S": "l40s",
        "NVIDIA H20": "h20",
        "NVIDIA H20-3e": "h20-3e",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H100 NVL": "h100-nvl",
        "NVIDIA H800": "h800",
        "NVIDIA H200": "h200",
        "NVIDIA H200 NVL": "h200-nvl",
        "NVIDIA GH200 480GB": "gh200",
        "NVIDIA GH200 144G HBM3e": "gh200-144g",
        "NVIDIA B200": "b200",
        "NVIDIA GB200": "gb200",
        "NVIDIA B300 SXM6 AC": "b300",
        "NVIDIA GB300": "gb300",
        "NVIDIA GB10": "gb10",
        "NVIDIA GeForce RTX 3080": "rtx3080",
        "NVIDIA GeForce RTX 3080 Ti": "rtx3080ti",
        "NVIDIA GeForce RTX 3090": "rtx3090",
        "NVIDIA GeForce RTX 3090 Ti": "rtx3090ti",
        "NVIDIA GeForce RTX 4070 Ti": "rtx4070ti",
        "NVIDIA GeForce RTX 4080": "rtx4080",
        "NVIDIA GeForce RTX 4080 SUPER": "rtx4080-super",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 5070 Ti": "rtx5070ti",
        "NVIDIA GeForce RTX 5080": "rtx5080",
        "NVIDIA GeForce RTX 5090": "rtx5090",
        "NVIDIA RTX A5000": "a5000",
        "NVIDIA RTX A6000": "a6000",
        "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000-server",
    },
    "amd": {
        "Radeon Instinct MI50 32GB": "mi50",
        "AMD Radeon Instinct MI60": "mi60",
        "AMD Instinct MI100": "mi100",
        "AMD Instinct MI210": "mi210",
        "AMD INSTINCT MI250 (MCM) OAM AC MBA": "mi250",
        "AMD Instinct MI250X": "mi250x",
        "AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2": "mi250x",
        "AMD INSTINCT MI200 (MCM) OAM AC MBA MSFT": "mi250x",
        "AMD Instinct MI300A": "mi300a",
        "AMD Instinct MI300X OAM": "mi300x",
        "AMD Instinct MI308X": "mi308x",
        "AMD Instinct MI325 OAM": "mi325x",
        "AMD Instinct MI350 OAM": "mi350x",
        "AMD Instinct MI355 OAM": "mi355x",
        "AMD Instinct MI355X": "mi355x",
        "AMD Radeon RX 7900 XTX": "rx7900xtx",
        "AMD Radeon PRO W7900": "w7900",
        "AMD Radeon AI PRO R9700": "r9700",
        "AMD Radeon RX 9070 XT": "rx9070xt",
    },
    "intel": {
        "Intel(R) Data Center GPU Max 1550": "max1550",
        "Intel(R) Data Center GPU Max 1100": "max1100",
        "Intel(R) Data Center GPU Flex 170": "flex170",
        "Intel(R) Arc(TM) B580 Graphics": "b580",
    },
}
IDS = [(row, identity) for row in ROWS for identity in row.ids]


def named(vendor: str, *names: str, pci_id: str | None = None, subsystem: str | None = None) -> str | None:
    row = CLASSES.of_gpu(vendor, names, pci_id, subsystem)
    return row and row.name


@pytest.mark.parametrize(
    ("vendor", "name", "expected"), [(v, n, row) for v, rows in NAMES.items() for n, row in rows.items()]
)
def test_every_name(vendor: str, name: str, expected: str) -> None:
    assert named(vendor, name) == expected
    assert named(vendor, "D05101", name) == expected  # a SKU is no name


@pytest.mark.parametrize(("row", "identity"), IDS, ids=[identity for _, identity in IDS])
def test_every_id(row: DeviceClass, identity: str) -> None:
    """Without a name too, and with the one of another product, or of a board, beside it."""
    sharing = [r.name for r, other in IDS if other == identity]
    assert named(row.vendor, pci_id=identity) in sharing
    assert named(row.vendor, "AMD Instinct MI300X", "NVIDIA H100 PCIe", "Max 1100", pci_id=identity) in sharing
    assert named(row.vendor, row.product_names[0], pci_id=identity) == row.name


def test_ids_that_several_products_have() -> None:
    """740c is the MI250 and the MI250X: names decide, else it is the slower; a Radeon's id decides nothing."""
    assert named("amd", "AMD INSTINCT MI200 (MCM) OAM AC MBA", pci_id="1002:740c") == "mi250x"
    assert named("amd", "Board 5", "AMD Instinct MI250", pci_id="1002:740c") == "mi250"
    assert named("amd", pci_id="1002:740c") == "mi250"
    assert named("amd", "Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]", pci_id="1002:744c") is None
    assert [i for i in {i for _, i in IDS} if [j for _, j in IDS].count(i) > 1] == ["1002:740c"]


def test_a_board_is_told_by_its_subsystem_before_its_device() -> None:
    own = {
        "a": OwnDevice(like="mi300x", ids=("1002:74a1/1002:0001",)),
        "b": OwnDevice(like="mi300x", names=("Own B",), source="mine"),
    }
    table = HardwareFile(own).rows(CLASSES, "own")
    for subsystem, name, expected in (("1002:0001", "", "a"), ("1002:0002", "", "mi300x"), (None, "Own B", "b")):
        row = table.of_gpu("amd", [name], "1002:74a1", subsystem)
        assert row is not None
        assert row.name == expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_figures_of_a_row_are_possible(row: DeviceClass) -> None:
    assert 8 * GiB <= row.memory_bytes <= 300 * GiB
    assert 0.25e12 <= row.memory_bytes_per_s <= 8e12
    assert 0 < row.sustained_tflops < 0.65 * row.peak_tflops
    assert row.peak_tflops / 2100 < row.memory_bytes_per_s / 1e12 * 0.25  # no more than 525 FLOPs a byte
    assert row.peak_tflops >= (row.fp32_tflops or 0) >= (row.fp64_tflops or 0)
    assert row.fp8_tflops is None or 1.9 < row.fp8_tflops / row.peak_tflops < 2.1
    assert row.tf32 <= row.bf16
    assert row.product_names
    assert row.source
    assert "https://" in row.source or "no data sheet" in row.source
    assert row.architecture or row.vendor == "intel"
    assert all(identity.startswith(("10de:", "1002:", "8086:")) for identity in row.ids)


def test_fp16_is_twice_bf16_on_an_mi100() -> None:
    assert CLASSES["mi100"].peak_in("fp16") == 2 * CLASSES["mi100"].peak_in("bf16") == 184.6
    assert CLASSES["mi100"].sustained_in("fp16") == pytest.approx(2 * CLASSES["mi100"].sustained_tflops)
    assert [row.name for row in ROWS if row.fp16_tflops] == ["mi100"]


def test_geforce_peaks_are_with_fp32_accumulation() -> None:
    """Twice fp32's there, four times on workstations with the same chips, which do not halve it (the white papers)."""
    geforce = [row for row in ROWS if any("GeForce RTX" in name for name in row.product_names) and row.bf16]
    assert len(geforce) == 12
    for row in geforce:
        assert row.peak_tflops == pytest.approx(2 * (row.fp32_tflops or 0), rel=0.01), row.name
    for name in ("a5000", "a6000", "rtx6000ada", "rtxpro6000", "rtxpro6000-server", "rtxpro6000-maxq"):
        assert CLASSES[name].peak_tflops == pytest.approx(4 * (CLASSES[name].fp32_tflops or 0), rel=0.01)


def test_what_has_no_bf16() -> None:
    without = ["p100", "p100-pcie", "v100", "v100-pcie", "v100s", "t4", "rtx2080ti", "titanrtx", "mi50", "mi60"]
    assert [row.name for row in ROWS if not row.computes("bf16")] == without


@pytest.mark.parametrize(
    ("vendor", "architecture", "like", "bf16"),
    [
        ("nvidia", "sm_86", "rtx3080", True),
        ("nvidia", "sm_90", "h20", True),
        ("nvidia", "sm_87", "rtx3080", True),  # of none in the table: the slowest that multiplies bf16
        ("nvidia", "sm_61", "p100-pcie", False),  # older than the first that does
        ("nvidia", None, "rtx3080", True),
        ("amd", "gfx942", "mi308x", True),
        ("amd", "gfx900", "mi50", False),
        ("amd", "gfx1030", "mi100", True),
        ("intel", None, "b580", True),
        ("acme", None, "rtx3080", True),
    ],
)
def test_an_estimate_is_below_the_slowest_alike(vendor: str, architecture: str | None, like: str, bf16: bool) -> None:
    row = CLASSES.estimated("z", vendor, memory=500 * GiB, architecture=architecture)
    assert (row.vendor, row.memory_bytes, row.bf16) == (vendor, 500 * GiB, bf16)
    assert row.peak_tflops == pytest.approx(CLASSES[like].peak_tflops / 2)
    assert row.memory_bytes_per_s == pytest.approx(CLASSES[like].memory_bytes_per_s / 2)
    assert like in row.estimate
    known = CLASSES.estimated("z", vendor, architecture=architecture)
    assert "assumed" in known.estimate
    assert known.memory_bytes == CLASSES[like].memory_bytes


def test_the_table_is_read_as_a_persons_file_is_and_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = type(CLASSES)()  # type: ignore[call-arg]
    monkeypatch.setattr("hetctl.trainer.planning.hardware.read_versioned", lambda *_, **__: HardwareFile())
    assert list(fresh) == ["cpu"]
    assert isinstance(fresh, Hardware)
    assert TABLE.is_file()


def test_what_is_better_in_nothing_trains_no_faster_than_its_like() -> None:
    for one, other in permutations(CLASSES.values(), 2):
        alike = (one.vendor, one.architecture) == (other.vendor, other.architecture)
        if alike and one.peak_tflops <= other.peak_tflops and one.memory_bytes_per_s <= other.memory_bytes_per_s:
            assert one.sustained_tflops <= other.sustained_tflops * 1.0001, (one.name, other.name)


def test_a_row_of_another_peak_sustains_the_share_of_the_class_that_it_is_like() -> None:
    own = OwnDevice(like="h100", peak=500.0).row("mine", CLASSES, "here")
    assert own.published_tflops is None
    assert own.sustained_tflops == pytest.approx(500 * 440 / 989)
