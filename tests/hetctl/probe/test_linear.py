"""What reads long lines of hosts takes time in proportion to them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hetctl.probe.masking import CaptureMasker, ReportMasker, serials_in
from hetctl.probe.software import parse_torch_version

SHORT, TIMES = 2_000, 4  # characters; quadratic time would be sixteen times as much
UNITS = (
    "1.",
    "-",
    "a",
    "a-",
    "a.",
    "key",
    "key-",
    "serial",
    "version",
    "ssh-",
    "eyJ-",
    "sk-",
    "\n",
    " ",
    "a@",
    '"',
    "0",
)
UNITS = (*UNITS, "://a:", "<serial", "AAAA", "a:", "-----BEGIN ", "a =", "GPU-0")
READERS: dict[str, Callable[[str], object]] = {
    "torch version": parse_torch_version,
    "capture": lambda text: CaptureMasker((), b"salt").text(text),
    "report": lambda text: ReportMasker().text(text),
    "serials": serials_in,
    "learned": lambda text: ReportMasker().learn_texts([("tool", text)]),
}


def cpu_s(read: Callable[[str], object], text: str) -> float:
    """The least CPU seconds of three readings."""
    found = []
    for _ in range(3):
        began = time.process_time()
        read(text)
        found.append(time.process_time() - began)
    return min(found)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("reader", READERS)
def test_the_time_of_a_long_line_grows_with_its_length(reader: str, unit: str) -> None:
    text = unit * (SHORT // len(unit))
    once, more = cpu_s(READERS[reader], text), cpu_s(READERS[reader], text * TIMES)
    assert more < 2.2 * TIMES * once + 0.02, f"{once:.4f} s, then {more:.4f} s"
