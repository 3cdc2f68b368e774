"""A mixed-integer linear programme in numbers, solved exactly by HiGHS on one thread (so that the same numbers give the same answer).

Callers scale their numbers: a total of some 1e3 … 1e5 in objective and rows leaves HiGHS's absolute tolerances (1e-9 here) far below
anything that matters. What HiGHS returns is a candidate: callers round it and check it in exact integers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np
from highspy._core import _Highs  # the public class prints a banner when it is made and runs in a thread of its own

INFINITY = float("inf")

EXACT = 1e-10  # a relative gap that is none
_TIGHT, _LOOSE = 1e-9, 1e-7  # absolute tolerances


@dataclass(frozen=True)
class Outcome:
    """The best point found (None where the programme has none), its objective, and a proven lower bound of every point's objective."""

    values: tuple[float, ...] | None
    objective: float
    bound: float


class IntegerProgram:
    """Variables, rows `lower <= sum coefficient * variable <= upper`, and one objective to minimise; may be changed and solved again."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._integer: list[bool] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self._highs: _Highs | None = None

    def variable(self, lower: float = 0.0, upper: float = INFINITY, *, integer: bool = False) -> int:
        """Add a variable and return its number."""
        self._lower.append(lower)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._lower) - 1

    def binary(self) -> int:
        return self.variable(0.0, 1.0, integer=True)

    def row(self, coefficients: Mapping[int, float], *, lower: float = -INFINITY, upper: float = INFINITY) -> int:
        """Add a row and return its number."""
        self._rows.append((dict(coefficients), lower, upper))
        return len(self._rows) - 1

    def bound_row(self, row: int, *, lower: float = -INFINITY, upper: float = INFINITY) -> None:
        """Change the bounds of a row."""
        self._rows[row] = (self._rows[row][0], lower, upper)
        if self._highs is not None:
            self._highs.changeRowBounds(row, lower, upper)

    def minimise(self, objective: Mapping[int, float], *, seconds: float = INFINITY, gap: float = EXACT) -> Outcome:
        """Minimise; after `seconds` of search, or within a relative `gap` of the bound, the best point so far is returned."""
        columns = len(self._lower)
        if not columns:
            return Outcome((), 0.0, 0.0)
        highs = self._built()
        costs = np.zeros(columns)
        for column, cost in objective.items():
            costs[column] = cost
        highs.clearSolver()
        highs.changeColsCost(columns, np.arange(columns, dtype=np.int32), costs)
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("time_limit", highs.getRunTime() + seconds)  # its clock runs on over several solves
        ran = highs.run()
        if ran == highspy.HighsStatus.kError:
            highs.setOptionValue("threads", 0)  # HiGHS has one set of threads per process; somebody else's, of another size, is there already
            ran = highs.run()
        if ran == highspy.HighsStatus.kError:
            _tolerate(highs, _LOOSE)  # its answer was beyond the tolerance by rounding, so it was thrown away
            ran = highs.run()
        if ran == highspy.HighsStatus.kError:
            raise ArithmeticError("HiGHS could not run on the programme")
        status, info = highs.getModelStatus(), highs.getInfo()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Outcome(None, INFINITY, INFINITY)
        bound = info.mip_dual_bound if any(self._integer) else info.objective_function_value
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            if status == highspy.HighsModelStatus.kTimeLimit:
                return Outcome(None, INFINITY, bound)
            raise ArithmeticError(f"HiGHS stopped with status {status.name}: the numbers of the programme are out of scale")
        values = np.asarray(highs.getSolution().col_value)
        return Outcome(tuple(values.tolist()), float(costs @ values), bound)

    def _built(self) -> _Highs:
        if self._highs is not None:
            return self._highs
        highs = _Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("parallel", "off")
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("mip_heuristic_run_feasibility_jump", False)  # 10 of the 11 ms that the smallest programme takes
        highs.setOptionValue("mip_abs_gap", 1e-7)
        _tolerate(highs, _TIGHT)
        columns, rows = len(self._lower), len(self._rows)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = columns, rows
        model.col_cost_ = np.zeros(columns)
        model.col_lower_, model.col_upper_ = np.array(self._lower), np.array(self._upper)
        model.integrality_ = [highspy.HighsVarType.kInteger if i else highspy.HighsVarType.kContinuous for i in self._integer]
        model.row_lower_ = np.array([row[1] for row in self._rows], dtype=float)
        model.row_upper_ = np.array([row[2] for row in self._rows], dtype=float)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *(len(row[0]) for row in self._rows)], dtype=np.int32)
        model.a_matrix_.index_ = np.array([column for row in self._rows for column in row[0]], dtype=np.int32)
        model.a_matrix_.value_ = np.array([value for row in self._rows for value in row[0].values()], dtype=float)
        if highs.passModel(model) == highspy.HighsStatus.kError:
            raise ArithmeticError("HiGHS refuses the numbers of the programme")
        self._highs = highs
        return highs


def _tolerate(highs: _Highs, tolerance: float) -> None:
    for name in ("primal_feasibility_tolerance", "dual_feasibility_tolerance", "mip_feasibility_tolerance"):
        highs.setOptionValue(name, tolerance)
