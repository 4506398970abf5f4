"""The searches of ``plan(..., search=...)``: each chooses a mesh and the dims that ``model`` shards.

``enumerate`` estimates every plan of the space. The others search for strategies of the operators, on meshes of
``data`` and ``model``, and turn them into the table of rules that is closest. The options of the step, such as ZeRO and
recomputation, are enumerated for that table in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from jaxpar.analysis.roofline import show_time
from jaxpar.errors import PlanError, did_you_mean, listing
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.operators.given import Shardings
from jaxpar.planning.operators.table import TableSearch, TensorTable
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.search import FULL
from jaxpar.planning.search.space import Space

SearchName = Literal["enumerate", "sharding_propagation", "recursive", "dynamic_programming"]
SEARCHES: tuple[SearchName, ...] = get_args(SearchName)
_ALL = "search: enumerate: every mesh and every option of the space, estimated in closed form"
_NOT_SEEN = (
    "not considered: pipelines, replicas, context parallelism, experts, dims over both axes, and sequence parallelism "
    "as a choice. search='enumerate' looks at those that the model allows"
)


@dataclass(frozen=True)
class SearchRequest:
    """Which search runs, and what is given to it.

    Attributes:
      name: of the search.
      shardings: for ``sharding_propagation``.

    Raises:
      PlanError: an unknown name, shardings for another search, or none for a propagation.
    """

    name: SearchName = "enumerate"
    shardings: Shardings = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in SEARCHES:
            raise PlanError(
                f"search must be one of {listing(SEARCHES)}, got {self.name!r}.{did_you_mean(self.name, SEARCHES)} "
                "Remedy: leave it out to estimate every plan."
            )
        if self.shardings and self.name != "sharding_propagation":
            raise PlanError(
                f"shardings must be given with search='sharding_propagation', got search={self.name!r}. "
                "Remedy: that search, or fixed={...} for fields of a plan."
            )
        if self.name == "sharding_propagation" and not self.shardings:
            raise PlanError(
                "search='sharding_propagation' must have shardings from which it derives the others, got none. "
                "Remedy: shardings={'mlp': 'model'}, or another search."
            )


@dataclass(frozen=True)
class ChosenSpace:
    """The plans that a search leaves to be estimated and compiled.

    Attributes:
      space: of the plans.
      notes: which search ran, what it looked at, and what it did not consider.
    """

    space: Space
    notes: tuple[str, ...]


def chosen_space(
    request: SearchRequest, trace: Callable[[], NamedProgram], model: CostModel, space: Space
) -> ChosenSpace:
    """Returns the plans that a search chooses among those of a space.

    Args:
      request: the search.
      trace: returns the traced loss.
      model: estimates plans.
      space: what may be chosen.

    Raises:
      PlanError: what is given or fixed cannot be searched for, or divides on no mesh.
    """
    if request.name == "enumerate":
        return ChosenSpace(space, (_ALL,))
    search = TableSearch(trace(), model, space, request.shardings)
    best, notes = _choose(search, request.name, model)
    exact = "" if not search.fixed else f"; not exact: {search.fixed} operators were fixed at their own best"
    notes.append(f"{best}: operators and redistribution {show_time(best.seconds)}{_bound(best, request.name)}")
    head = (
        f"search: {request.name}: {search.looked:,} strategies of {len(search.graph.operators)} operators, then "
        f"{len(search.options(best)):,} options of the step{exact}"
    )
    return ChosenSpace(search.space(best), (head, *notes, _NOT_SEEN))


def _choose(search: TableSearch, name: str, model: CostModel) -> tuple[TensorTable, list[str]]:
    """The table whose best plan that fits has the least estimated step, and a note for each that has none.

    The recursive search has one table. Others follow only where none of its plans fits.
    """
    limit, notes = model.topology.accelerator.hbm_bytes * FULL, list[str]()
    fitting, possible = list[tuple[float, int, TensorTable]](), list[TensorTable]()
    for table in search.tables(name):
        costs = [model.cost(plan) for plan in search.options(table)]
        steps = [cost.step for cost in costs if cost.peak_bytes <= limit]
        if costs:
            possible.append(table)
        if steps:
            fitting.append((min(steps), len(fitting), table))
            if name == "recursive":
                break
        else:
            notes.append(f"{table}: no plan {'fits in memory' if costs else 'is possible'}")
    if not possible:
        raise PlanError(
            f"search={name!r} found no plan: {'; '.join(notes)}. Remedy: a batch that divides over the devices, other "
            "shardings or fixed sizes, or search='enumerate'."
        )
    return (min(fitting)[2] if fitting else possible[0]), notes


def _bound(table: TensorTable, name: str) -> str:
    """How much less time strategies take that differ between the operators that share a dim."""
    if name != "dynamic_programming" or table.free.fixed:
        return ""
    more = table.seconds / table.free.seconds - 1.0 if table.free.seconds else 0.0
    return f", {more:.1%} more than with the best strategy for each operator by itself"
