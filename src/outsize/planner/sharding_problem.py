"""Choose one option for each class of nodes at the least cost: an integer program, solved exactly by HiGHS.

Variables: one binary per (class, option); for every edge between a producer and a consumer the flow from
produced to needed placements, whose sums are those binaries; for every value read by several consumers one
conversion per pair of placements, paid once however many need it.

    minimise   sum cost(option) x + sum cost(conversion) y
    subject to sum_options x[class] = 1
               sum_needed  f[a, :] = sum of x[producer] whose output is placed a
               sum_produced f[:, b] = sum of x[consumer] whose input is placed b
               y[a, b] >= f[a, b] of every consumer of the value
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from outsize.errors import PlanError

__all__ = ["ChoiceProblem", "Edge", "LimitError"]


class LimitError(PlanError):
    """No choice of operator splits keeps the limits."""


_SCALE = 1e6  # sum of all costs as HiGHS sees them: its tolerances are absolute


@dataclass(frozen=True, slots=True)
class Edge:
    """A value read by a consumer: placements by option of the producer and by option of the consumer."""

    producer: int
    produced: tuple[Hashable, ...]
    consumer: int
    needed: tuple[Hashable, ...]


@dataclass(slots=True)
class ChoiceProblem:
    """Grows by classes and values, then is solved once."""

    costs: list[float] = field(default_factory=list)
    is_integer: list[int] = field(default_factory=list)
    _rows: list[dict[int, float]] = field(default_factory=list)
    _lower: list[float] = field(default_factory=list)
    _upper: list[float] = field(default_factory=list)
    _options: dict[int, list[int]] = field(default_factory=dict)
    _amounts: dict[int, float] = field(default_factory=dict)  # of conversions, by variable

    def add_class(self, index: int, option_costs: Sequence[float]) -> None:
        """Add a class of which exactly one option is taken."""
        variables = [self._variable(cost, integer=True) for cost in option_costs]
        self._options[index] = variables
        self._constrain(dict.fromkeys(variables, 1.0), 1.0, 1.0)

    def add_value(
        self,
        edges: Sequence[Edge],
        conversion_cost: Callable[[Hashable, Hashable], float],
        converted_amount: Callable[[Hashable, Hashable], float],
    ) -> None:
        """Add a value with one edge for each consumer; each conversion is paid once, and may be infinite.

        ``converted_amount`` is what a conversion adds to the amount that :meth:`limit` limits.
        """
        paid: dict[tuple[Hashable, Hashable], int] = {}
        for edge in edges:
            flows = self._add_flows(edge, conversion_cost, is_only=len(edges) == 1)
            for pair, flow in flows.items():
                cost = conversion_cost(*pair)
                if len(edges) == 1:
                    paid[pair] = flow
                elif cost > 0:
                    if pair not in paid:
                        paid[pair] = self._variable(cost, integer=False)
                    self._constrain({paid[pair]: 1.0, flow: -1.0}, 0.0, np.inf)
        self._amounts |= {variable: converted_amount(*pair) for pair, variable in paid.items()}

    def limit(self, amounts: Mapping[int, Sequence[float]], most: float) -> None:
        """Keep the amounts of options chosen and of conversions paid at or below ``most`` together."""
        chosen = {
            variable: amount
            for index, values in amounts.items()
            for variable, amount in zip(self._options[index], values, strict=True)
        }
        self._constrain(self._amounts | chosen, -np.inf, most)

    def solve(self, time_limit_s: float = 60.0) -> dict[int, int]:
        """Return the option taken of each class.

        Raises:
            LimitError: no choice keeps all limits, or none was found in time.
        """
        costs = np.array(self.costs)
        result = milp(
            costs * (_SCALE / max(costs.sum(), 1e-30)),
            integrality=np.array(self.is_integer),
            bounds=Bounds(0.0, 1.0),
            constraints=LinearConstraint(self._matrix(), np.array(self._lower), np.array(self._upper)),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
        if result.x is None:
            raise LimitError(
                "No choice of operator splits keeps the limits.",
                why=str(result.message),
                attempt="a higher degree, or more memory per device",
            )
        return {
            index: max(range(len(variables)), key=lambda option: result.x[variables[option]])
            for index, variables in self._options.items()
        }

    # -- building -------------------------------------------------------------------------------

    def _variable(self, cost: float, *, integer: bool) -> int:
        self.costs.append(cost)
        self.is_integer.append(int(integer))
        return len(self.costs) - 1

    def _constrain(self, row: dict[int, float], lower: float, upper: float) -> None:
        self._rows.append(row)
        self._lower.append(lower)
        self._upper.append(upper)

    def _add_flows(
        self, edge: Edge, conversion_cost: Callable[[Hashable, Hashable], float], *, is_only: bool
    ) -> dict[tuple[Hashable, Hashable], int]:
        sources = self._by_placement(edge.producer, edge.produced)
        targets = self._by_placement(edge.consumer, edge.needed)
        flows: dict[tuple[Hashable, Hashable], int] = {}
        for source in sources:
            for target in targets:
                cost = conversion_cost(source, target)
                if np.isfinite(cost):
                    flows[source, target] = self._variable(cost if is_only else 0.0, integer=False)
        for side, ends in enumerate((sources, targets)):
            for end, options in ends.items():
                row = {flow: 1.0 for pair, flow in flows.items() if pair[side] == end}
                row |= dict.fromkeys(options, -1.0)
                self._constrain(row, 0.0, 0.0)
        return flows

    def _by_placement(self, index: int, placements: Sequence[Hashable]) -> dict[Hashable, list[int]]:
        found: dict[Hashable, list[int]] = defaultdict(list)
        for variable, placement in zip(self._options[index], placements, strict=True):
            found[placement].append(variable)
        return found

    def _matrix(self) -> csr_array:
        rows = [row for row, entries in enumerate(self._rows) for _ in entries]
        columns = [column for entries in self._rows for column in entries]
        values = [value for entries in self._rows for value in entries.values()]
        return csr_array((values, (rows, columns)), shape=(len(self._rows), len(self.costs)))
