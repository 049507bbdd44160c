"""The pages and pictures that are made from the code, and what each has to be."""

from __future__ import annotations

from pathlib import Path

from tests.reference import devices, fields, known, pictures, recordings

DOCS = Path(__file__).parents[2] / "docs"


def made() -> dict[Path, str]:
    """Page -> its text as the code would have it."""
    return {
        DOCS / "cluster-yaml.md": fields.cluster(),
        DOCS / "devices.md": devices.made(),
        DOCS / "discover.md": recordings.discover(),
        DOCS / "reference/recipe.md": fields.recipe(),
        DOCS / "reference/inventory.md": fields.inventory(),
        DOCS / "reference/plan.md": fields.plan(),
        DOCS / "reference/checks.md": known.checks(),
        DOCS / "reference/variables.md": known.environment(),
        DOCS / "reference/exit-codes.md": known.exits(),
        DOCS / "reference/models.md": known.models(),
        DOCS / "reference/commands.md": known.commands(),
        **{DOCS / name: text for name, text in pictures.made().items()},
    }
