"""`hetctl plan`: who does what, why, and how fast it will be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink


@options.takes("recipe", *options.WHERE, *options.WHAT, *options.HOW)
def plan(
    asked: options.RunOptions,
    env: Annotated[
        str | None,
        typer.Option("--env", metavar="HOST", help="Show what the ranks of a host are started with, and why."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here (plan.yaml).")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also: the runner-up, what binds, and what would help most.")
    ] = False,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the simulated step for Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write one page that needs no network.")] = None,
    as_json: options.Json = False,
) -> None:
    """Decide who does what on a cluster, say why, and predict how fast it will be.

    With --emulate it plans for a cluster you do not own, from published and vendors' figures.
    """
    from hetctl.comm.contract.files import write_atomically, write_json
    from hetctl.comm.contract.plan import save_plan
    from hetctl.comm.contract.values import encode
    from hetctl.commands.resolve import resolve
    from hetctl.render.plan import show_plan
    from hetctl.render.plan_page import plan_page
    from hetctl.render.trace import chrome_trace
    from hetctl.trainer.planning.explain import explain as explanation
    from hetctl.trainer.planning.planner import weigh

    sink = Sink(as_json=as_json)
    found = resolve(asked, sink, runs=False)
    weighed = weigh(found.cluster, found.recipe, speeds=found.speeds, profile=found.profile)
    said = explanation(weighed.problem, weighed.predictions).sentences() if explain else ()
    chosen = weighed.predictions[0]
    if output:
        save_plan(output, weighed.plan)
    if trace:
        write_json(trace, chrome_trace(weighed.plan, chosen.simulated.spans, clones=chosen.candidate.clones))
    if html:
        clones = chosen.candidate.clones
        write_atomically(html, plan_page(weighed.plan, chosen.simulated.spans, explanation=said, clones=clones))
    for written in filter(None, (output, trace, html)):
        sink.warn(f"wrote {written}")
    if env:
        from hetctl.runs.show_environment import show_environment

        sink.result(show_environment(weighed.plan, found.cluster, env, sink))
        return
    if as_json:
        sink.result({**encode(weighed.plan), **({"explanation": said} if explain else {})})
        return
    show_plan(sink, weighed.plan)
    for sentence in said:
        sink.say(f"- {sentence}")
