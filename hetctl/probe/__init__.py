"""What a host is: a program that collects raw material there, and pure functions that turn it into facts here.

stdin = program(Options(...))              # bytes for `python3 -` on the host
raw = extract(stdout)                      # Raw, or a HetctlError that says what the host answered instead
facts = parse(raw)                         # comm.facts.HostFacts; what cannot be read is unknown, with a reason
"""

from hetctl.probe.assemble import parse
from hetctl.probe.raw import MAX_STDOUT_BYTES, Options, Raw, extract
from hetctl.probe.wanted import program

__all__ = ["MAX_STDOUT_BYTES", "Options", "Raw", "extract", "parse", "program"]
