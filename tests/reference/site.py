"""What `mkdocs.yml` cannot say: pages from outside docs/, and the decisions, of which there are many."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUTSIDE = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")  # on the site readme, contributing, changelog, security
EXAMPLE = re.compile(r"\[([^\]]+)\]\((?:\.\./)*examples/[^)]*\)")
LINK = re.compile(rf"\]\(((?:\.\./)*)({'|'.join(OUTSIDE)})\.md")


def on_config(config: Any) -> Any:
    """The decisions, closed, at the end of the navigation's last part."""
    decisions = sorted(page.name for page in (ROOT / "docs/decisions").glob("[0-9]*.md"))
    [last] = config.nav[-1].values()
    last.append({"Decisions": [f"decisions/{name}" for name in ("README.md", *decisions)]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """The pages from outside, whose links into docs/ lead to what is beside them on the site."""
    from mkdocs.structure.files import File

    for name in OUTSIDE:
        text = (ROOT / f"{name}.md").read_text().replace("](docs/", "](")
        files.append(File.generated(config, f"{name.lower()}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the pages from outside, one folder nearer than in the repository; examples are in that alone."""
    markdown = EXAMPLE.sub(r"`\1`", markdown)
    return LINK.sub(lambda found: f"]({found[1].removeprefix('../')}{found[2].lower()}.md", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The theme's stand-in for workers from here, not from the network."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "../" * page.url.count("/") + "assets/worker.js")


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """No page for what a web server does not find: it is read from files."""
    return "" if template_name == "404.html" else output_content
