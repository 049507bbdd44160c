"""The line that installs torch: from pytorch.org's index for a vendor's GPUs, or the vendor's own build."""

from __future__ import annotations

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.facts import GpuFacts, HostFacts
from hetctl.discovery.fabric import Report
from hetctl.doctor.check import HostCase
from hetctl.doctor.software import install_line
from tests.hetctl.doctor.healthy_hosts import checked


@pytest.mark.parametrize(
    ("vendor", "words"),
    [
        ("nvidia", "whl/cu128  #"),
        ("amd", "whl/rocm7.2  #"),
        ("intel", "whl/xpu  #"),
        ("", "whl/cpu  #"),
        ("hygon", "install WHEEL"),
    ],
)
def test_each_vendor_has_its_wheels(vendor: str, words: str) -> None:
    facts = HostFacts(gpus=(GpuFacts(vendor, 0),) if vendor else ())
    case = HostCase(Report("a", Access(), facts), checked([]))
    assert words in install_line(case, "python3")
