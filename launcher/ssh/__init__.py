"""SSH, the only place that knows paramiko: routes from ~/.ssh/config, verified host keys, sessions with deadlines.

with SshBook() as book:
    shell = connect(access, book, deadline)     # a launcher.shell.Shell, or a ShellError that says why not
"""

from hetctl.launcher.ssh.config import SshConfig, SshRoute
from hetctl.launcher.ssh.connect import connect, show_host_keys

__all__ = ["SshConfig", "SshRoute", "connect", "show_host_keys"]
