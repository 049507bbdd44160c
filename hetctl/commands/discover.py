"""`hetctl discover`: what is this cluster, really?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetctl.comm.contract.units import count_of
from hetctl.commands import options
from hetctl.console import Sink

if TYPE_CHECKING:
    from hetctl.discovery.discover import HostAnswer
    from hetctl.discovery.inventory import Inventory

Hosts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[HOSTS]...", help="node[01-16], user@host:port, or groups of the inventory.", show_default=False
    ),
]
InventoryPath = Annotated[
    Path | None,
    typer.Option("-i", "--inventory", help="inventory.yaml, or a hostfile (`host slots=8`).", show_default=False),
]


HeldBy = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="slurm|ray|kubernetes", help="All hosts that this engine holds, or HOSTS.", show_default=False
    ),
]


def discover(
    hosts: Hosts = None,
    inventory: InventoryPath = None,
    engine: HeldBy = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the cluster is written.")] = Path(
        "cluster.yaml"
    ),
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that was edited or knows more; it is kept as .bak.")
    ] = False,
    links: Annotated[bool, typer.Option("--links", help="Measure latency and bandwidth between hosts.")] = False,
    timeout: options.Timeout = 60.0,
    capture: Annotated[
        Path | None, typer.Option("--capture", help="Write all raw material, names and serials masked, to this .tgz.")
    ] = None,
    from_capture: Annotated[
        Path | None, typer.Option("--from-capture", help="Read a capture instead of hosts.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Find out what the machines are: GPUs, NICs, networks, and who can talk to whom how.

    Hosts come from the arguments, from -i or ./inventory.yaml, from --from, from a Slurm allocation; with none of
    these it is this machine. Nothing is installed on them. Exit code 4 when some were not reached: the file is still
    written.
    """
    from hetctl.comm.contract.errors import ConfigError
    from hetctl.comm.contract.kept_files import refuse_edited
    from hetctl.comm.contract.values import encode
    from hetctl.discovery.discover import recordings
    from hetctl.discovery.fabric import build
    from hetctl.discovery.links import measure_links
    from hetctl.discovery.replacing import save_over
    from hetctl.discovery.tables import show_cluster
    from hetctl.discovery.unusual import unusual
    from hetctl.probe.capture import write_capture
    from hetctl.trainer.planning.own_hardware import own_classes

    sink = Sink(as_json=as_json)
    if from_capture and (hosts or links or engine):
        raise ConfigError("--from-capture asks no hosts: neither HOSTS, --from nor --links go with it")
    refuse_edited(output, force=force)
    if from_capture:
        meant, answers = _replayed(from_capture, sink)
    else:
        meant, answers = _asked(hosts or [], inventory, engine, timeout, sink)
    reports = [answer.report for answer in answers]
    fabric = build(reports, named=meant.networks, classes=own_classes(None))
    cluster = measure_links(fabric.cluster, meant.entries, timeout_s=timeout, sink=sink) if links else fabric.cluster
    if capture:
        write_capture(capture, recordings(answers))
    notes = [*fabric.notes, *unusual(reports, cluster)]
    show_cluster(sink, cluster, notes)
    wrote = [str(output)] if save_over(output, cluster, sink, force=force) else []
    masked = [f"{capture} (names, serial numbers and addresses masked)"] if capture else []
    sink.say("wrote " + (" and ".join([*wrote, *masked]) or "nothing"))
    document = {**encode(cluster), "digest": cluster.digest}
    sink.result({**document, "notes": [encode(note) for note in notes], "file": wrote[0] if wrote else None})
    _end(answers, sink)


def _asked(
    hosts: list[str], file: Path | None, engine: str | None, timeout: float, sink: Sink
) -> tuple[Inventory, list[HostAnswer]]:
    from hetctl.discovery.discover import HostAnswer
    from hetctl.discovery.discover import discover as ask
    from hetctl.discovery.meant import meant_hosts
    from hetctl.discovery.tables import host_line

    meant, reports = meant_hosts(hosts, file, engine)
    told = [HostAnswer(report) for report in reports]
    sink.warn(f"discovering {count_of(len(meant.entries), 'host')} from {meant.origin}")
    width = max(len(entry.name) for entry in meant.entries)

    def show(answer: HostAnswer) -> None:
        sink.say(host_line(answer.report, width), markup=True)

    for answer in told:
        show(answer)
    read = {answer.report.name for answer in told}
    if read:
        sink.warn(f"no image is named for {count_of(len(read), 'host')}: only labels are read, NICs stay unknown")
    asked = [entry for entry in meant.entries if entry.name not in read]
    found = {a.report.name: a for a in (*told, *ask(asked, timeout_s=timeout, on_answer=show, say=sink.warn))}
    return meant, [found[entry.name] for entry in meant.entries]


def _replayed(path: Path, sink: Sink) -> tuple[Inventory, list[HostAnswer]]:
    from hetctl.discovery.discover import replay
    from hetctl.discovery.inventory import Inventory
    from hetctl.discovery.tables import host_line

    answers = replay(path)
    for answer in answers:
        sink.say(host_line(answer.report, max(len(a.report.name) for a in answers)), markup=True)
    return Inventory((), f"the capture {path}"), answers


def _end(answers: list[HostAnswer], sink: Sink) -> None:
    """Exit 4 when a host is missing, saying which and what to do about the first of each kind."""
    missing = [answer.report for answer in answers if not answer.report.ok]
    if not missing:
        return
    asked = count_of(len(answers), "host")
    sink.warn(
        f"{len(missing)} of {asked} {'is' if len(missing) == 1 else 'are'} missing: "
        + ", ".join(r.name for r in missing)
    )
    hints = {report.status: f"{report.name}: {report.hint}" for report in reversed(missing) if report.hint}
    for hint in reversed(hints.values()):
        sink.warn(hint)
    raise typer.Exit(4)
