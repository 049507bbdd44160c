"""`hetctl validate`: which of our claims hold on these machines, and an archive to report it with."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from hetctl.commands import options
from hetctl.console import Sink


def validate(
    cluster: options.ClusterFile = None,
    emulate: options.Emulate = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="FILE.tgz", help="Pack results and evidence, masked, into this.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle if it exists.")] = False,
    only: options.Only = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: whether things work, not how fast.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1.0, callback=options.bounded, help="Seconds for each claim.")
    ] = 600.0,
    show_list: Annotated[bool, typer.Option("--list", help="Show the claims, and stop.")] = False,
    as_json: options.Json = False,
) -> None:
    """Judge every claim that was not yet tried on hardware like this, one after the other.

    On the hosts of --cluster (from `hetctl discover`), else on this machine as two islands. Nothing is installed or
    changed there; ranks run for some minutes. Exit code 0: all that applies holds; 1: something does not;
    3: something could not be determined.
    """
    from hetctl.discovery.which_cluster import Where
    from hetctl.validate import report
    from hetctl.validate.bundle import check_target, masked_files, write_bundle
    from hetctl.validate.claims import exit_code
    from hetctl.validate.ground import find_ground
    from hetctl.validate.identities import masker_for
    from hetctl.validate.runner import run_claims
    from hetctl.validate.table import choose

    sink = Sink(as_json=as_json)
    claims = choose(options.words(only))
    if show_list:
        sink.say(report.claims_table(claims))
        sink.result([{"id": c.id, "claim": c.sentence, "needs": c.needs, "how": c.how} for c in claims])
        return
    where = Where(cluster, emulate)
    if bundle is not None:
        check_target(bundle, force=force)
    with tempfile.TemporaryDirectory(prefix="hetctl-validate-") as folder:
        evidence = Path(folder)
        ground = find_ground(where, quick=quick, timeout_s=timeout, sink=sink)
        results = run_claims(
            claims,
            ground,
            evidence,
            on_begin=lambda claim: sink.warn(f"{claims.index(claim) + 1} of {len(claims)}: {claim.id}"),
            on_end=lambda result: sink.say(report.claim_line(result), markup=True),
        )
        sink.say()
        sink.say(report.results_table(results))
        found = report.document(results, ground)
        if bundle is not None:
            masker = masker_for(ground, evidence=evidence)
            documents = {"report.json": found, "report.md": report.markdown(results, ground)}
            documents |= {"versions.json": report.versions(ground), "inventory.json": report.inventory(ground)}
            files = masked_files(documents, evidence, masker)
            report.show_contents(sink, bundle, files, masker.counts)
            write_bundle(bundle, files)
            sink.say(f"wrote {bundle}: look through it, then send it as report.md says")
    sink.result(found | {"bundle": str(bundle) if bundle else None})
    if code := exit_code(results):
        raise typer.Exit(code)
