"""What is known by name: the doctor's checks, variables, exit codes, models, commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click
import typer

from hetctl.app import app
from hetctl.comm.contract import errors, variables
from hetctl.comm.contract.errors import HetctlError
from hetctl.doctor.registry import CHECKS, THEMES
from hetctl.render.known import model_rows
from hetctl.trainer.families.registry import FAMILIES, LLAMA, Family
from tests.reference.table import code, plain, table

MADE = "This page is made from the code: `make reference`.\n"
CHECKS_HEAD = f"""# Checks of the doctor

What `hetctl doctor` looks at, in the order in which it is mended. A star: unknown is not good enough, and ends with
exit code 3. How it is used: [doctor.md](../doctor.md). {MADE}"""
VARIABLES_HEAD = f"""# Environment variables

Every variable that hetctl reads or gives to its ranks. `hetctl plan --cluster F --env HOST` shows what ranks on a host
get, the vendors' own variables too, and why. {MADE}"""
EXIT_HEAD = f"""# Exit codes

The same for every command. What else they say of hosts and claims: [the doctor](../doctor.md),
[validation](../validate.md). {MADE}
"""
MODELS_HEAD = f"""# Models

Known by name, for `--model` and a recipe's `model.name`; `hetctl models` lists them. Any Hugging Face folder or
`config.json` of a family that trains is a model too. {MADE}
"""
COMMANDS_HEAD = f"""# Commands

What `--help` of each command says. {MADE}"""


def checks() -> str:
    head = ("check", "level", "reads", "to paste", "with root", "source")
    found = CHECKS_HEAD
    for theme in THEMES:
        rows = [
            (
                code(c.id) + (" *" if c.essential else ""),
                c.level,
                plain(c.reads),
                code(c.fix),
                plain(c.root),
                plain(c.source),
            )
            for c in CHECKS
            if c.theme == theme
        ]
        found += f"\n## {theme}\n\n" + table(head, rows)
    return found


def environment() -> str:
    """Its sections are the comments that stand alone in the module that has them."""
    found, above = VARIABLES_HEAD, ""
    for block in re.split(r"\n\n+", inspect.getsource(variables)):
        rows = []
        for line in block.splitlines():
            if match := re.match(r'[A-Z_]+ = "(HETCTL_\w+)"(?:  # (.*))?', line):
                rows.append((code(match[1]), match[2] or above))
                above = ""
            elif line.startswith("# ") and block.startswith(line):
                found += f"\n## {line[2:]}\n\n"
            elif line.startswith("# "):
                above = line[2:]
        found += table(("variable", ""), rows) if rows else ""
    return found


def exits() -> str:
    rows = [("0", "Done.")]
    for cls in HetctlError.__subclasses__():
        if cls.__module__ == errors.__name__:
            says = re.sub(r" \(exit \d\)", "", " ".join((inspect.getdoc(cls) or "").split()))
            rows.append((f"{cls.exit_code}", says))
    return EXIT_HEAD + table(("code", ""), sorted(rows, key=lambda row: int(row[0])))


def models() -> str:
    sizes = ("parameters", "layers", "hidden", "heads", "kv_heads", "vocab", "max_seq_len")
    rows = [
        (code(row["name"]), row["family"], *(f"{row[size]:,}" for size in sizes), "" if row["trains"] else "plan only")
        for row in model_rows()
    ]
    head = (
        "model",
        "family",
        "parameters",
        "layers",
        "hidden",
        "heads",
        "KV heads",
        "vocabulary",
        "longest sample",
        "",
    )
    families = [(code(f.model_type), code(f.architecture) or "plan only", _unlike(f)) for f in FAMILIES.values()]
    title = "\n## Families\n\n"
    return MODELS_HEAD + table(head, rows) + title + table(("model_type", "class", "unlike Llama"), families)


def _unlike(family: Family) -> str:
    """The fields of a family in which it is not as Llama."""
    names = ("qkv_bias", "out_bias", "mlp_bias", "gated", "norm", "norms", "qk_norm", "partly_rotated", "activations")
    names += ("learned_positions",)
    unlike = {name: value for name in names if (value := getattr(family, name)) != getattr(LLAMA, name)}
    if family.joined:
        unlike["joined"] = " and ".join(family.joined)
    return ", ".join(f"{name}: {value}" for name, value in unlike.items())


def commands() -> str:
    root = typer.main.get_command(app)
    return COMMANDS_HEAD + "".join(_command(root, click.Context(root, info_name="hetctl")))


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    """A section for each command below this one, groups by way of theirs."""
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        of = click.Context(inner, info_name=name, parent=context)
        if not hasattr(inner, "commands"):
            rows = [(code(_said(what)), plain(_said(says))) for what, says in _options(inner, of)]
            says = _said(" ".join(inspect.cleandoc(inner.help or "").split()))
            yield f"\n## {of.command_path}\n\n{says}\n\n" + table(("argument or option", ""), rows)
        yield from _command(inner, of)


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    records = (p.get_help_record(context) for p in command.params)
    return (record for record in records if record is not None and "--help" not in record[0])


def _said(text: str) -> str:
    """Help without rich's escapes."""
    return text.replace("\\[", "[")
