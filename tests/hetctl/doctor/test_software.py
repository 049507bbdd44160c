"""Whether torch fits the devices of a host: the line that installs it, and an environment for each of two vendors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.facts import GpuFacts, HostFacts, Interpreter
from hetctl.discovery.fabric import Report
from hetctl.doctor.check import HostCase
from hetctl.doctor.software import build, match
from hetctl.doctor.verdict import Verdict
from tests.hetctl.doctor.healthy_hosts import checked

CUDA = Interpreter("/cuda/bin/python", torch="2.13.0+cu128", cuda="12.8", vendors=("nvidia",))
ROCM = Interpreter("~/rocm/bin/python", torch="2.13.0+rocm7.2", hip="7.2", vendors=("amd",))


def host(*vendors: str, pythons: tuple[Interpreter, ...] = (Interpreter("python3"),)) -> Report:
    gpus = tuple(GpuFacts(vendor, str(n)) for n, vendor in enumerate(vendors))
    return Report("box", Access(), HostFacts(gpus=gpus, interpreters=pythons))


def judged(report: Report) -> Verdict:
    return build(HostCase(report, checked([])))


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
    assert words in judged(host(*filter(None, [vendor]))).fix


def test_two_vendors_have_an_environment_each() -> None:
    mixed = host("nvidia", "amd", pythons=(ROCM, CUDA, Interpreter("/usr/bin/python3")))
    said = judged(mixed)
    assert (said.state, said.reason) == (
        "ok",
        "nvidia: torch 2.13.0+cu128 in /cuda/bin/python; amd: torch 2.13.0+rocm7.2 in ~/rocm/bin/python",
    )
    one_minor_apart = replace(ROCM, torch="2.12.0+rocm7.2")
    apart = host("nvidia", "amd", pythons=(CUDA, one_minor_apart))
    assert [(v.state, v.about) for v in match(checked([apart]))][-1] == ("warn", "nvidia - amd")


def test_a_vendor_without_its_torch_is_named_with_what_makes_it() -> None:
    said = judged(host("nvidia", "amd", pythons=(replace(CUDA, vendors=()),)))
    assert said.state == "fail"
    assert "amd: torch 2.13.0+cu128 in /cuda/bin/python is not built for its GPUs" in said.reason
    making, _, where = said.fix.partition("  # ")
    torch, numpy = "'torch>=2.11' --index-url https://download.pytorch.org/whl/rocm7.2", "numpy"
    own = "~/hetctl-env-amd"
    installs = " && ".join(f"{own}/bin/python -m pip install {what}" for what in (torch, numpy))
    assert making == f"python3 -m venv {own} && {installs}"
    assert where.endswith(f"box: {{python: {{nvidia: /cuda/bin/python, amd: {own}/bin/python}}}}")


def test_what_the_inventory_names_is_made_there() -> None:
    missing = Interpreter("/opt/rocm-env/bin/python", problem="no such file", vendors=("amd",))
    said = judged(host("nvidia", "amd", pythons=(CUDA, missing)))
    assert said.fix.startswith("python3 -m venv /opt/rocm-env && /opt/rocm-env/bin/python -m pip install 'torch>=2.11'")
    bare = judged(host("nvidia", "amd", pythons=(CUDA, replace(ROCM, torch=None, hip=None))))
    assert bare.fix.startswith("~/rocm/bin/python -m pip install 'torch>=2.11'")


def test_without_any_torch_both_are_made() -> None:
    said = judged(host("nvidia", "amd"))
    assert [f"venv ~/hetctl-env-{vendor} " in said.fix for vendor in ("nvidia", "amd")] == [True, True]
