"""The site that `make site` builds: whole, without a broken link, and nothing of it loaded from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the site needs mkdocs-material: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_it(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / name).exists() or name.name == "README.html", name
    assert "Your first run on two hosts" in (site / "readme.html").read_text()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not LOADED.findall(page.read_text()), page.name


def test_search_answers_on_pages_opened_as_files(site: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no browser to search in: apt-get install chromium")
    address = f"{(site / 'reference/recipe.html').as_uri()}?q=zero-bubble"
    words = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run([*words, address], capture_output=True, text=True).stdout
    assert "adding-a-schedule.html" in shown.partition("md-search-result__list")[2], shown[-2000:]
