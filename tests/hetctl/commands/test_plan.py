"""`hetctl plan --advise`: one document, a table that says unknown, and what would fit beside exit code 5."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetctl.comm.contract.errors import Infeasible
from hetctl.commands.options import RunOptions
from hetctl.commands.plan import plan

COMMAND = plan.__wrapped__  # type: ignore[attr-defined]  # with its options together
TINY = RunOptions(emulate="h200:1", model="llama-160m", seq_len=512, global_batch=8, device=["h200=price:3"])
LARGE = RunOptions(emulate="l4:1", model="llama-8b", seq_len=4096, global_batch=8, device=["l4=price:0.5"])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_advice_is_in_the_document_and_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    COMMAND(TINY, explain=True, advise=True, html=tmp_path / "plan.html", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["advice"]["price_per_hour"] == 3.0
    assert {one["price_per_hour"] for one in document["advice"]["advice"]} >= {None, 3.0}
    assert any("h200 gives" in sentence for sentence in document["explanation"])
    page = (tmp_path / "plan.html").read_text()
    assert "What to buy" in page
    assert "<td>unknown</td>" in page


def test_where_nothing_fits_the_error_comes_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Infeasible) as caught:
        COMMAND(LARGE, advise=True)
    said = capsys.readouterr()
    assert caught.value.exit_code == 5
    assert "l4 to l4" in said.out
    assert "unknown" in said.out
    with pytest.raises(Infeasible) as caught:
        COMMAND(LARGE, advise=True, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert caught.value.documented
    assert document["exit_code"] == 5
    assert document["advice"]["advice"][0]["price_per_hour"] > 0
