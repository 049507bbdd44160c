"""The pages in a real browser: nothing goes wrong, nothing is fetched, and axe finds nothing that keeps people out.

Screenshots at three widths are left in build/pages. Needs chromium, and playwright with axe for it:
`apt-get install chromium`, `pip install playwright axe-playwright-python`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetctl.runs.serve_report import report_server
from tests.hetctl.render.pages import FAILURE, plan_html, planning, run_folder, run_html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
axe = pytest.importorskip("axe_playwright_python.base", reason="no axe: pip install axe-playwright-python")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]
SHOTS = Path(__file__).parents[3] / "build" / "pages"
WIDTHS = {"phone": 390, "laptop": 1280, "print": 800}  # pixels


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, made, slow = tmp_path_factory.mktemp("pages"), planning(), planning("h200:8,mi325x:8,a100:8", samples=96)
    done, failed = run_folder(folder / "done", made), run_folder(folder / "failed", made, steps=3, failure=FAILURE)
    texts = {
        "plan": plan_html(made),
        "large-plan": plan_html(slow),
        "run": run_html(done, made.plan),
        "failed-run": run_html(failed, made.plan, "failed", resume="hetctl resume runs/latest", checkpoint_step=2),
    }
    found = {name: folder / f"{name}.html" for name in texts}
    for name, path in found.items():
        path.write_text(texts[name])
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


def opened(browser: Any, path: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    """A page, and what went wrong with it so far or will."""
    page, wrong = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme), []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
    page.goto(path.as_uri())
    return page, wrong


@pytest.mark.parametrize("name", ["plan", "large-plan", "run", "failed-run"])
@pytest.mark.parametrize(("where", "scheme"), [("phone", "light"), ("laptop", "dark"), ("print", "light")])
def test_a_page_is_whole_everywhere(browser: Any, pages: dict[str, Path], name: str, where: str, scheme: str) -> None:
    page, wrong = opened(browser, pages[name], WIDTHS[where], scheme)
    if where == "print":
        page.emulate_media(media="print")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}-{where}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it is wider than the screen"
    assert page.locator("canvas").count() == {"run": 2, "failed-run": 2}.get(name, 0)
    page.evaluate(axe.AXE_SCRIPT)
    found = page.evaluate("axe.run()")["violations"]
    assert [(v["id"], v["help"], [n["html"][:200] for n in v["nodes"]]) for v in found] == []
    assert wrong == []
    page.close()


def test_the_timeline_zooms_and_commands_are_copied(browser: Any, pages: dict[str, Path]) -> None:
    page, wrong = opened(browser, pages["failed-run"], 1280, "light")
    ticks = page.locator(".ticks span").last
    whole = ticks.inner_text()
    page.get_by_role("button", name="zoom in").click()
    assert ticks.inner_text() != whole
    page.get_by_role("button", name="all").click()
    assert ticks.inner_text() == whole
    first = page.locator(".command").first
    first.get_by_role("button").click()
    first.get_by_role("button", name="copied").or_(first.get_by_role("button", name="selected")).wait_for()
    assert wrong == []
    page.close()


def test_a_served_page_follows_its_run(browser: Any, tmp_path: Path) -> None:
    """From before its first step, without being loaded again."""
    folder = run_folder(tmp_path / "run", planning(), steps=0)
    with report_server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        page, wrong = browser.new_page(), []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.evaluate("window.same = true")
        assert page.locator("canvas").count() == 0
        for step in (1, 2, 3):
            folder.append_metrics({"step": step, "loss": 2.0, "tokens": 16384, "tokens_per_s": 9000.0})
        page.get_by_text("3 steps of llama-1b").wait_for()
        assert page.locator("canvas").count() == 2
        page.get_by_role("button", name="zoom in").click()
        assert page.evaluate("window.same"), "what a person zoomed or scrolled to stays"
        assert wrong == []
        page.close()
        server.shutdown()
        thread.join()


def test_hovering_a_chart_shows_values_with_their_unit(browser: Any, pages: dict[str, Path]) -> None:
    page, wrong = opened(browser, pages["run"], 1280, "light")
    page.locator(".chart").last.locator(".u-over").hover()
    page.get_by_text("tokens/s", exact=False).and_(page.locator(".u-value")).wait_for()
    assert wrong == []
    page.close()
