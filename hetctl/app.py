"""The command line: registers the commands."""

from __future__ import annotations

import sys

import typer

from hetctl import __version__
from hetctl.commands import bench, data, hosts, known, runs
from hetctl.commands.discover import discover
from hetctl.commands.doctor import doctor
from hetctl.commands.estimate import estimate
from hetctl.commands.exec import AfterDashes, execute
from hetctl.commands.export import export
from hetctl.commands.generate import generate
from hetctl.commands.plan import plan
from hetctl.commands.resume import resume
from hetctl.commands.run import run
from hetctl.commands.setup import setup
from hetctl.commands.train import train
from hetctl.commands.validate import validate
from hetctl.console import guarded

app = typer.Typer(
    name="hetctl",
    help="Train one large language model on a cluster that no single communication library can span.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"hetctl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(  # before a command is missed
        False, "--version", callback=_say_version, help="Show the version and exit.", is_eager=True
    ),
) -> None:
    pass


app.command("discover")(discover)
app.command("doctor")(doctor)
app.add_typer(hosts.app)
app.command("setup")(setup)
app.command("exec", cls=AfterDashes)(execute)
app.command("plan")(plan)
app.command("estimate")(estimate)
app.command("train")(train)
app.command("resume")(resume)
app.command("run")(run)
app.command("export")(export)
app.command("generate")(generate)
app.add_typer(data.app)
app.add_typer(bench.app, name="bench")
app.command("validate")(validate)
app.command("models")(known.models)
app.command("devices")(known.devices)
app.command("ps")(runs.ps)
app.command("logs")(runs.logs)
app.command("stop")(runs.stop)
app.command("clean")(runs.clean)
app.command("report")(runs.report)


def main() -> None:
    """Run the command line, and end with the exit code of what came of it."""
    guarded(app, as_json="--json" in sys.argv)
