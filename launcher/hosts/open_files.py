"""How many files a process may have open: most systems give 1,024 until they are asked for more."""

from __future__ import annotations

import resource

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.units import count_of

OF_HOST = 8  # descriptors: a connection, its pipes, and a second one while it comes back
OTHERS = 256  # of the process itself: code, logs, what a person's terminal needs


def allow_open_files(hosts: int) -> None:
    """Let this process hold connections to so many hosts. Raises ConfigError where its owner may not."""
    needed = hosts * OF_HOST + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{count_of(hosts, 'host')} need {needed:,} open files here, and {hard:,} are allowed",
            hint=f"raise the hard limit of open files: ulimit -Hn {needed}, as root or in /etc/security/limits.conf",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
