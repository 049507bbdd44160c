"""What to buy, as a table for people and for the page: unknown prices stay unknown."""

from __future__ import annotations

from rich.table import Table

from hetctl.comm.contract.units import show_seconds
from hetctl.console import Sink
from hetctl.trainer.planning.advise import Advice, Advised

HEAD = ("change", "step", "tokens/s", "gain", "price per hour", "tokens per price, of it", "of the whole")


def show_advice(sink: Sink, advised: Advised) -> None:
    """Print the table, and what it was chosen from."""
    table = Table(*HEAD, title="what to buy, change or leave out", title_justify="left")
    for row in advice_rows(advised):
        table.add_row(*row)
    for part in (table, advice_sentence(advised)):
        sink.say(part)


def advice_rows(advised: Advised) -> list[tuple[str, ...]]:
    """The cells of each row, as in HEAD; the first row is the cluster as it is, where a plan fits it."""
    rows = [_row(one) for one in advised.advice]
    if advised.tokens_per_s is None or advised.step_time_s is None:
        return rows
    now = ("as it is", show_seconds(advised.step_time_s), _number(advised.tokens_per_s), "")
    return [(*now, _price(advised.price_per_hour), "", _number(advised.tokens_per_price)), *rows]


def advice_sentence(advised: Advised) -> str:
    """How much was looked at, and what it means where nothing is listed."""
    fits = "" if advised.tokens_per_s else " so that the model fits"
    found = "" if advised.advice else f" Nothing was found{fits or ' that helps noticeably'}."
    unpriced = "" if advised.price_per_hour else " Prices per hour stand in hardware.yaml (price)."
    how = "what is there, the largest or fastest, and those that give most for their price"
    return f"Of {advised.looked_at} device classes {advised.planned} were planned with: {how}.{found}{unpriced}"


def _row(one: Advice) -> tuple[str, ...]:
    compared = one.gain is not None and one.kind != "remove"
    return (
        one.what,
        show_seconds(one.step_time_s),
        _number(one.tokens_per_s),
        "" if one.gain is None else f"{one.gain:+.1%}",
        _price(one.price_per_hour, signed=True),
        _number(one.added_per_price) if compared else "",
        _number(one.tokens_per_price),
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


def _price(value: float | None, *, signed: bool = False) -> str:
    return "unknown" if value is None else f"{value:{'+' if signed else ''},.2f}"
