"""Continuing a text: with what layers have seen or anew, as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetctl.trainer.model.generation import generate
from tests.trainer.model.test_published_families import ours_from
from tests.trainer.model.transformers_families import VARIANTS, in_double, theirs

PROMPT = [5, 9, 11, 4, 7, 33, 8, 21]


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "phi3, longrope, long"])
def test_tokens_are_those_of_a_model_that_sees_all_anew_and_of_transformers(name: str, tmp_path: Path) -> None:
    with in_double():
        model = theirs(name)
    model.save_pretrained(tmp_path)
    shape, ours = ours_from(tmp_path)
    found = list(generate(ours, PROMPT, most=20))
    anew = list(PROMPT)
    for _ in range(20):
        with torch.no_grad():
            anew.append(int(ours(torch.tensor([anew]))[0, -1].argmax()))
    assert found == anew[len(PROMPT) :]
    with in_double(), torch.no_grad():
        whole = model(torch.tensor([anew])).logits[0, len(PROMPT) - 1 : -1]
    assert found == whole.argmax(-1).tolist()
    assert ours(torch.tensor([PROMPT])).shape == (1, len(PROMPT), shape.vocab), "it trains on as before"


def test_it_ends_at_the_end_token_and_within_the_models_positions(tmp_path: Path) -> None:
    with in_double():
        theirs("opt").save_pretrained(tmp_path)
    shape, ours = ours_from(tmp_path)
    endless = list(generate(ours, PROMPT, most=10_000))
    assert len(PROMPT) + len(endless) == shape.max_seq_len
    first = endless.index(endless[4])
    assert list(generate(ours, PROMPT, most=20, ends={endless[4]})) == endless[:first]
