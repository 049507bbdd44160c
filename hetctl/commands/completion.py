"""What a shell completes words with. Called only while it does so: nothing here is imported when a command starts."""

from __future__ import annotations


def runs(incomplete: str) -> list[str]:
    """The runs of ./runs, newest first, and `latest`."""
    from hetctl.launcher.run_folder.folder import runs_here

    return sorted((p.name for p in runs_here() if p.name.startswith(incomplete)), reverse=True)


def models(incomplete: str) -> list[str]:
    """The models that are known by name."""
    from hetctl.trainer.model.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


def device_classes(incomplete: str) -> list[str]:
    """The class that the last word of a SPEC begins: after a `,` or `+` another one follows."""
    from hetctl.trainer.planning.hardware import CLASSES

    begun = max(incomplete.rfind(","), incomplete.rfind("+")) + 1
    before, last = incomplete[:begun], incomplete[begun:]
    return [f"{before}{name}:" for name in CLASSES if name.startswith(last)]
