"""Addresses of interfaces where the usual tool is missing: from the kernel itself."""

from __future__ import annotations

import subprocess
import sys

from hetctl.probe import Options, extract, program
from hetctl.probe.nics import parse_kernel_addresses

IF_INET6 = "fe800000000000000000000000000001 02 40 20 80     eth0\n"


def test_addresses_without_the_ip_tool_come_from_the_kernel() -> None:
    told = parse_kernel_addresses({"eth0": "10.1.2.3/24", "lo": "127.0.0.1/8", "odd": 7, "x": "no/24"}, IF_INET6)
    assert [(a.ip, a.prefix, a.scope) for a in told["eth0"]] == [
        ("10.1.2.3", 24, "global"),
        ("fe80::1", 64, "link"),
    ]
    assert told["lo"][0].scope == "host"
    assert set(told) == {"eth0", "lo"}
    assert parse_kernel_addresses(None, "") == {}


def test_the_probe_of_this_machine_reads_its_ipv4_addresses() -> None:
    command = [sys.executable, "-I", "-S", "-"]
    done = subprocess.run(command, input=program(Options()), capture_output=True, check=True)
    raw = extract(done.stdout)
    assert raw.values["ipv4"]["lo"] == "127.0.0.1/8"
