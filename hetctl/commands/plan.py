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
    force: Annotated[
        bool, typer.Option("--force", help="Replace a plan that somebody edited; it is kept as .bak.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also: the runner-up, what binds, and what would help most.")
    ] = False,
    advise: Annotated[
        bool, typer.Option("--advise", help="Also: what to buy, change or leave out, and what it gives for its price.")
    ] = False,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the simulated step for Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write one page that needs no network.")] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="torchtitan|megatron|accelerate",
            help="Also write that framework's own configuration of the plan (plan-FRAMEWORK.*), and say what it lacks.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Decide who does what on a cluster, say why, and predict how fast it will be.

    With --emulate it plans for a cluster you do not own, from published and vendors' figures.
    """
    from hetctl.comm.contract.errors import ConfigError, Infeasible
    from hetctl.comm.contract.files import write_atomically, write_json
    from hetctl.comm.contract.kept_files import refuse_edited
    from hetctl.comm.contract.plan import save_plan
    from hetctl.comm.contract.values import encode
    from hetctl.commands.resolve import require_model, resolve, with_model
    from hetctl.render.advice import show_advice
    from hetctl.render.for_others import FRAMEWORKS, for_framework
    from hetctl.render.plan import show_plan
    from hetctl.render.plan_page import plan_page
    from hetctl.render.trace import chrome_trace
    from hetctl.trainer.planning.advise import Advised, what_would_fit
    from hetctl.trainer.planning.advise import advise as advice_on
    from hetctl.trainer.planning.explain import explain as explanation
    from hetctl.trainer.planning.hardware import CLASSES
    from hetctl.trainer.planning.own_hardware import own_classes
    from hetctl.trainer.planning.planner import weigh
    from hetctl.trainer.planning.precision import precision_of
    from hetctl.trainer.planning.predicted_step import PredictedStep
    from hetctl.trainer.planning.would_fit import Asked

    sink = Sink(as_json=as_json)
    if framework is not None and framework not in FRAMEWORKS:
        raise ConfigError(f"--for {framework}: no such framework", hint=" or ".join(FRAMEWORKS))
    refuse_edited(output, force=force)
    asked = with_model(asked, sink) if env is None else asked
    found = resolve(asked, sink, runs=False)
    if env is None:  # the ranks' environment is the same for every model
        require_model(asked)
    known = found.cluster.classes
    table = CLASSES.with_own((*known, *own_classes(asked.hardware, asked.device or (), known=known)))
    again = Asked(found.cluster, found.recipe, table, found.speeds, found.profile)
    try:
        weighed = weigh(found.cluster, found.recipe, speeds=found.speeds, profile=found.profile)
    except Infeasible as error:
        if advise:
            with sink.trying("nothing fits: trying what would") as said_what:
                fitting = what_would_fit(again, said_what)
            show_advice(sink, fitting)
            document = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
            sink.result({**document, "advice": encode(fitting)})
            error.documented = as_json
        raise
    chosen = weighed.predictions[0]
    # refused before anything is written
    other = for_framework(weighed.plan, framework, precision_of(found.cluster, found.recipe)) if framework else None
    advised = Advised((), 0, 0)
    if advise or (explain and found.cluster.source != "emulated"):
        with sink.trying("planning again with changes of the cluster") as said_what:
            advised = advice_on(again, weighed.problem, chosen, weighed.plan, every_class=advise, said=said_what)
    held = weighed.plan.predicted.memory_bytes if weighed.plan.predicted else ()
    said = explanation(weighed.problem, weighed.predictions, held, advised.advice).sentences() if explain else ()
    if output and (kept := save_plan(output, weighed.plan, keep=True)):
        sink.warn(f"{output} is replaced; the old one is {kept}")
    if trace:
        write_json(trace, chrome_trace(weighed.plan, chosen.simulated.spans, clones=chosen.candidate.clones))
    if html:
        bought = advised if advise else None
        page = plan_page(weighed.plan, PredictedStep.of(weighed), explanation=said, advised=bought)
        write_atomically(html, page)
    beside = (output.parent if output else Path()) / other.name if other else None
    if beside and other:
        write_atomically(beside, other.text)
    for written in filter(None, (output, trace, html, beside)):
        sink.warn(f"wrote {written}")
    if env:
        from hetctl.runs.show_environment import show_environment

        sink.result(show_environment(weighed.plan, found.cluster, env, sink))
        return
    if as_json:
        more = {**({"explanation": said} if explain else {}), **({"advice": encode(advised)} if advise else {})}
        more |= {"for": {"framework": framework, "lacks": other.lacks}} if other else {}
        sink.result({**encode(weighed.plan), **more})
        return
    show_plan(sink, weighed.plan)
    for sentence in said:
        sink.say(f"- {sentence}")
    for sentence in other.lacks if other else ():
        sink.say(f"- not in {beside}: {sentence}")
    if advise:
        show_advice(sink, advised)
