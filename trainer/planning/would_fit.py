"""What would make a model fit that does not: the fewest devices, shorter samples, another model; all found by planning.

Whether something fits is asked of one replica where that can be had: it needs the least memory and is found soonest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.errors import HetctlError
from hetctl.comm.contract.units import count_of
from hetctl.trainer.families.registry import trained_families
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.planning.changes import Change, more_devices, usual_host
from hetctl.trainer.planning.hardware import CLASSES, Hardware
from hetctl.trainer.planning.problem import Problem, read_problem
from hetctl.trainer.planning.profile import Profile
from hetctl.trainer.planning.search import Candidate, Search
from hetctl.trainer.recipe import Recipe

AT_ALL = 0.5  # tolerance: whether something fits needs no fast plan
MOST_ASKED = 256  # devices: whether other things fit on more takes long to find out
MOST_ADDED = 256  # devices, or twice those there are, that are added to make a model fit
PLENTY = 1 << 50  # bytes that no model needs
SHORTEST = 512  # tokens: shorter samples are not proposed


@dataclass(frozen=True, eq=False)
class Asked:
    """What is planned again for every change, and which classes may be bought."""

    cluster: Cluster
    recipe: Recipe
    table: Hardware  # with the classes that a person said
    speeds: Mapping[str, float] | None = None
    profile: Profile | None = None

    @classmethod
    def of(cls, cluster: Cluster, recipe: Recipe, speeds: Mapping[str, float] | None, profile: Profile | None) -> Asked:
        """Of a cluster with the classes that it knows itself."""
        return cls(cluster, recipe, CLASSES.with_own(cluster.classes), speeds, profile)

    def problem(self, changed: Cluster, tolerance: float) -> Problem:
        """The same question on another cluster. Raises HetctlError where the recipe's wishes do not go with it."""
        present = {d.device_class for h in changed.hosts for d in h.devices}
        speeds = {name: speed for name, speed in (self.speeds or {}).items() if name in present}
        problem = read_problem(changed, self.recipe, speeds=speeds, profile=self.profile)
        return replace(problem, tolerance=max(problem.tolerance, tolerance))

    def of_model(self, name: str, seq_len: int) -> Asked:
        """The same question of another model, or of shorter samples."""
        return replace(self, recipe=replace(self.recipe, model=replace(self.recipe.model, name=name, seq_len=seq_len)))

    def in_one_replica(self) -> Asked:
        """The same with one pipeline for all that is used, unless replicas are pinned."""
        wish = self.recipe.parallelism
        wish = replace(wish, data=1) if wish.data == "auto" else wish
        return replace(self, recipe=replace(self.recipe, parallelism=wish))


def candidates_with(problem: Problem, extra: int) -> list[Candidate]:
    """Plans with `extra` bytes more on every device."""
    pools = tuple(replace(p, rates=replace(p.rates, memory_bytes=p.rates.memory_bytes + extra)) for p in problem.pools)
    return Search(replace(problem, pools=pools), keep=1).run().candidates


def rough_plans(asked: Asked, cluster: Cluster) -> list[Candidate]:
    """Some plan on a changed cluster, quickly found rather than fast; none where nothing fits."""
    try:
        return candidates_with(asked.problem(cluster, AT_ALL), 0)
    except HetctlError:
        return []


def in_one_replica(problem: Problem) -> Problem | None:
    """The problem where one pipeline holds all that is used; None where no memory would make that possible."""
    one = replace(problem, pins=replace(problem.pins, replicas=problem.pins.replicas or 1))
    return one if candidates_with(one, PLENTY) else None


def what_it_takes(asked: Asked) -> str:
    """A hint: with which optimiser, how many more devices, which samples, which known model it would; or none."""
    if sum(len(i.members) for i in asked.cluster.islands) > MOST_ASKED:
        return ""
    found = [*filter(None, (_in_8_bits(asked), _more_devices(asked), _shorter_samples(asked)))]
    ways = [f"it would fit with {' or with '.join(found)}"] if found else []
    model = _largest_model(asked)
    return "; ".join([*ways, *([f"the largest known model that fits here is {model}"] if model else [])])


def least_added(asked: Asked, row: DeviceClass) -> Change | None:
    """The fewest more devices of a class with which a plan fits; None where many are too few.

    Up to a host's number any count is tried, beyond whole hosts, by doubling their number and then bisection: what fits
    on some devices fits on more, which may stay idle.
    """
    per_host = usual_host(asked.cluster)
    most = max(MOST_ADDED, 2 * sum(len(i.members) for i in asked.cluster.islands))
    counts = [*range(1, per_host), *range(per_host, most + 1, per_host)]

    def fits(index: int) -> Change | None:
        change = more_devices(asked.cluster, row, counts[index], per_host=per_host)
        return change if _fits(asked, change.cluster) else None

    low, high = -1, per_host - 1
    while not (found := fits(high)):
        if high == len(counts) - 1:
            return None
        low, high = high, min(2 * high - per_host + 2, len(counts) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        better = fits(middle)
        low, high, found = (low, middle, better) if better else (middle, high, found)
    return found


def _fits(asked: Asked, cluster: Cluster | None = None) -> bool:
    """Whether any plan does, on a changed cluster where one is given."""
    return bool(rough_plans(asked, cluster or asked.cluster))


def _in_8_bits(asked: Asked) -> str:
    """The optimiser's moments, where they are not yet."""
    rule = asked.recipe.optimizer
    small = replace(asked.recipe, optimizer=replace(rule, name="adamw_8bit"))
    return "optimizer.name=adamw_8bit" if rule.name == "adamw" and _fits(replace(asked, recipe=small)) else ""


def _more_devices(asked: Asked) -> str:
    """More of the class with the most memory that is there. An emulation's devices are what this machine has."""
    if asked.cluster.source == "emulated":
        return ""
    names = [asked.cluster.device(m).device_class for i in asked.cluster.islands for m in i.members]
    row = max((asked.table[name] for name in names), key=lambda row: row.memory_bytes)
    change = least_added(asked, row)
    if change is None:
        return ""
    hosts = len(change.cluster.hosts) - len(asked.cluster.hosts)
    in_all = names.count(row.name) + change.devices
    return f"{change.devices} more {row.name} in {count_of(hosts, 'host')} ({in_all} in all)"


def _shorter_samples(asked: Asked) -> str:
    """By halves; whether the shortest would do is asked first."""
    model = asked.recipe.model
    halves = [model.seq_len >> k for k in range(1, model.seq_len.bit_length()) if model.seq_len >> k >= SHORTEST]
    if not halves or not _fits(asked.of_model(model.name, halves[-1])):
        return ""
    longest = next((n for n in halves[:-1] if _fits(asked.of_model(model.name, n))), halves[-1])
    return f"model.seq_len={longest}"


def _largest_model(asked: Asked) -> str:
    """The largest that hetctl knows, trains, and that fits, with samples as long as it takes."""
    trained = {family.model_type for family in trained_families()}
    smaller = (s for s in SHAPES.values() if s.family in trained and s.parameters < asked.recipe.shape().parameters)
    for shape in sorted(smaller, key=lambda shape: -shape.parameters):
        seq_len = min(asked.recipe.model.seq_len, shape.max_seq_len)
        if _fits(asked.of_model(shape.name, seq_len)):
            return f"{shape.name} at {seq_len} tokens"
    return ""
