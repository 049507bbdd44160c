"""What to buy: the least that makes a model fit, links where the plan waits for them, prices, and large clusters."""

from dataclasses import replace
from time import process_time

import pytest

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.emulate import Machine, describe_cluster, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.planning.advise import Advice, Advised, advise, what_would_fit
from hetctl.trainer.planning.changes import more_devices, without
from hetctl.trainer.planning.hardware import CLASSES, Hardware
from hetctl.trainer.planning.planner import weigh
from hetctl.trainer.planning.search import Search
from hetctl.trainer.planning.would_fit import Asked
from hetctl.trainer.recipe import load_recipe

SMALL = (("model.name", "llama-160m"), ("model.seq_len", 1024), ("batch.global_batch", 32))


def asked(spec: str, *sets: tuple[str, object], prices: dict[str, float] | None = None) -> Asked:
    """A described cluster, a recipe, and what classes cost."""
    rows = [replace(CLASSES[name], price_per_hour=price) for name, price in (prices or {}).items()]
    table: Hardware = CLASSES.with_own(rows)
    return Asked(describe_cluster(parse_spec(spec, table), table), load_recipe(None, sets), table)


def advised(question: Asked, *, every_class: bool = True) -> Advised:
    made = weigh(question.cluster, question.recipe)
    return advise(question, made.problem, made.predictions[0], made.plan, every_class=every_class)


def of_kind(found: Advised, kind: str) -> list[Advice]:
    return [one for one in found.advice if one.kind == kind]


def fits(cluster: Cluster, question: Asked) -> bool:
    return bool(Search(question.problem(cluster, 0.5), keep=1).run().candidates)


def test_the_least_that_makes_a_model_fit_is_the_least() -> None:
    sets = ("model.name", "llama-8b"), ("model.seq_len", 4096), ("batch.global_batch", 16)
    question = asked("l4:2", *sets, prices={"l4": 0.5, "a100": 1.5})
    found = what_would_fit(question).advice
    assert [one.gain for one in found] == [None] * len(found)
    priced = [one for one in found if one.price_per_hour is not None]
    assert found[: len(priced)] == tuple(sorted(priced, key=lambda one: one.price_per_hour or 0))
    rest = [one.devices for one in found[len(priced) :]]
    assert rest == sorted(rest)
    for one, name in ((next(a for a in found if f" {n} " in a.what), n) for n in ("l4", "a100")):
        row = question.table[name]
        assert one.price_per_hour == pytest.approx(one.devices * (row.price_per_hour or 0))
        assert fits(more_devices(question.cluster, row, one.devices, per_host=2).cluster, question)
        fewer = one.devices - (1 if one.devices <= 2 else 2)  # beyond one host, whole hosts
        assert not fewer or not fits(more_devices(question.cluster, row, fewer, per_host=2).cluster, question)


def test_a_plan_that_waits_for_its_bridge_gets_a_faster_one_first() -> None:
    pins = ("parallelism.pipeline", 2), ("parallelism.schedule", "1f1b"), ("bridge.transport", "tcp")
    found = advised(asked("rtx4090:1,rtx3090:1;10GbE", *SMALL, *pins))
    first = found.advice[0]
    assert first.kind == "link"
    assert first.what.startswith("25 Gbit/s")
    assert (first.gain or 0) > 0.002
    assert first.price_per_hour is None
    assert any("Twice as many ports" in one.what for one in of_kind(found, "link"))


def test_ethernet_may_become_roce() -> None:
    pins = ("parallelism.pipeline", 2), ("parallelism.schedule", "1f1b")
    found = advised(asked("rtx4090:1,rtx3090:1;10GbE", *SMALL, *pins), every_class=False)
    gains = {one.what.split(" in place")[0]: one.gain or 0 for one in of_kind(found, "link")}
    assert gains["25 Gbit/s RoCE"] > gains["25 Gbit/s Ethernet"] > 0


def test_prices_order_and_unknown_ones_are_not_zero() -> None:
    free = advised(asked("h200:1,mi325x:1", *SMALL))
    assert {one.price_per_hour for one in free.advice} == {None}
    assert {one.tokens_per_price for one in free.advice} == {None}
    assert free.tokens_per_price is None
    prices = {"h200": 3.0, "mi325x": 2.0, "h100": 0.01}
    found = advised(asked("h200:1,mi325x:1", *SMALL, prices=prices))
    adds = of_kind(found, "add")
    known = [one for one in adds if one.price_per_hour is not None]
    assert " h100 " in known[0].what  # cheap beyond all others, though not the fastest
    assert [one.added_per_price for one in known] == sorted((one.added_per_price or 0 for one in known), reverse=True)
    assert adds[: len(known)] == known  # what has no price comes after
    unknown = adds[len(known) :]
    assert unknown
    assert {one.tokens_per_price for one in unknown} == {None}
    assert found.price_per_hour == 5.0
    before = (found.tokens_per_s or 0) * 3600 / 5.0
    assert found.tokens_per_price == pytest.approx(before)
    assert known[0].tokens_per_price == pytest.approx(known[0].tokens_per_s * 3600 / 5.01)


def test_what_costs_more_than_it_gives_may_go() -> None:
    dear = advised(asked("h200:2,mi325x:2", *SMALL, prices={"h200": 90.0, "mi325x": 1.0}))
    gone = of_kind(dear, "remove")
    assert [one.what for one in gone] == ["Leaving out h200"]
    assert gone[0].price_per_hour == -180.0
    assert (gone[0].gain or 0) < 0
    assert (gone[0].tokens_per_price or 0) > (dear.tokens_per_price or 0)


def test_hosts_that_the_plan_leaves_idle_may_go_at_no_loss() -> None:
    pins = ("parallelism.data", 1), ("parallelism.pipeline", 1), ("parallelism.tensor", 1)
    found = advised(asked("h200:2,t4:1", *SMALL, *pins))
    (gone,) = of_kind(found, "remove")
    assert (gone.what, gone.devices, gone.gain) == ("Leaving out t4 that the plan leaves idle", -1, 0.0)


def test_memory_that_binds_is_offered_as_the_larger_sibling() -> None:
    sets = ("model.name", "llama-8b"), ("model.seq_len", 4096), ("batch.global_batch", 48)
    found = advised(asked("a100-40g:4", *sets, prices={"a100-40g": 1.0, "a100": 1.5}))
    (memory,) = [one for one in of_kind(found, "memory") if one.what.startswith("a100 ")]
    assert memory.what == "a100 in place of the 4 a100-40g of a100-40g"
    assert memory.price_per_hour == pytest.approx(2.0)
    assert (memory.gain or 0) > 0


def test_a_host_joins_the_island_of_its_vendor_and_fabric() -> None:
    question = asked("h200:8/ib400,mi325x:8/roce200;25GbE", *SMALL)
    grown = more_devices(question.cluster, CLASSES["b200"], 8, per_host=8).cluster
    grown.validate(where="grown")
    assert [(i.name, len(i.members)) for i in grown.islands] == [("h200", 16), ("mi325x", 8)]
    other = more_devices(question.cluster, CLASSES["max1100"], 8, per_host=8).cluster
    other.validate(where="with an island")
    assert [i.name for i in other.islands] == ["h200", "mi325x", "max1100"]
    ways = {t.kind: t for t in next(k for k in other.links if k.islands == ("max1100", "mi325x")).transports}
    assert ways["tcp"].rate_bytes_per_s == 25e9 / 8  # over what joins the others
    assert not ways["native"].usable
    assert fits(other, question)


def test_a_single_island_can_be_joined_by_another_vendor() -> None:
    question = asked("h200:8", *SMALL)
    grown = more_devices(question.cluster, CLASSES["mi300x"], 8, per_host=8).cluster
    assert next(t.kind for t in grown.links[0].transports if t.usable) == "rdma"
    assert fits(grown, question)


def test_links_carry_what_the_hosts_that_are_left_carry() -> None:
    question = asked("h200:16,mi325x:16;25GbE", *SMALL)
    first = [m for m in question.cluster.islands[0].members if m.host == "h200-0"]
    smaller = without(question.cluster, first, "less", question.table).cluster
    rates = [next(t for t in c.links[0].transports if t.kind == "tcp") for c in (question.cluster, smaller)]
    assert [t.rate_bytes_per_s for t in rates] == [2 * 25e9 / 8, 25e9 / 8]


def test_a_thousand_devices_take_as_long_as_some_plans() -> None:
    sets = ("model.name", "llama-70b"), ("model.seq_len", 4096), ("batch.global_batch", 4096)
    question = asked("h200:512,mi325x:512", *sets)
    start = process_time()
    made = weigh(question.cluster, question.recipe)
    planned = process_time()
    found = advise(question, made.problem, made.predictions[0], made.plan)
    assert process_time() - planned < 100 * (planned - start)  # some 20 on a quiet core: 15 changes, each planned
    added = of_kind(found, "add")
    assert added
    assert {one.devices for one in added} == {64}  # fewer could not be seen


def test_the_same_question_has_the_same_answer() -> None:
    prices = {"h200": 3.0, "a100": 1.0}
    first, second = (advised(asked("h200:2", *SMALL, prices=prices)) for _ in range(2))
    assert first.advice
    assert first == second


def test_only_classes_that_keep_the_precision_are_offered() -> None:
    found = advised(asked("h200:1", *SMALL, prices={"v100": 0.01, "h200": 3.0}))
    assert not any(" v100 " in one.what for one in found.advice)


def test_nothing_that_is_bought_changes_an_emulation() -> None:
    question = asked("h200:1,mi325x:1", *SMALL)
    machine = Machine("here", "gloo", (2**32, 2**32))
    emulated = label_machine(parse_spec("h200:1,mi325x:1", CLASSES), machine)
    with pytest.raises(ConfigError, match="this machine's"):
        what_would_fit(replace(question, cluster=emulated))
