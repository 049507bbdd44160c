"""What a discovery may replace: never a cluster file that somebody edited, or that knows more, unless told to."""

from __future__ import annotations

from pathlib import Path

from hetctl.comm.contract.cluster import Cluster, load_cluster, save_cluster
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.kept_files import kept_name
from hetctl.comm.contract.units import listed
from hetctl.console import Sink


def save_over(path: Path, cluster: Cluster, sink: Sink, *, force: bool) -> bool:
    """Write the cluster file. False, and said, where nothing was reached and the file there is of something.

    Raises ConfigError where it would lose more than what it found otherwise.
    """
    lost = "" if force else lost_with(path, cluster)
    if lost and not _reached(cluster):
        sink.warn(f"no host was reached: {path} is left as it was ({lost})")
        return False
    if lost:
        raise ConfigError(
            f"{path} would lose {lost}",
            hint=f"write elsewhere with -o, or replace it with --force (it is then kept as {kept_name(path)})",
        )
    if kept := save_cluster(path, cluster, keep=True):
        sink.warn(f"{path} is replaced; the old one is {kept}")
    return True


def lost_with(path: Path, cluster: Cluster) -> str:
    """What the cluster file there knows and this cluster does not: hosts that nobody asked now, or measured links."""
    if not path.is_file():
        return ""
    try:
        old = load_cluster(path)
    except ConfigError:  # of another version, which this one replaces
        return ""
    asked = {host.name for host in cluster.hosts} if _reached(cluster) else set()
    gone = sorted(_reached(old) - asked)
    links = "its measured links (--links measures them)" if old.measured and not cluster.measured else ""
    return " and ".join(filter(None, (listed(gone, 4), links)))


def _reached(cluster: Cluster) -> set[str]:
    return {host.name for host in cluster.hosts if host.status == "ok"}
