"""The optimal schedule of a small graph: a mixed integer program, solved by HiGHS.

*Problem.* That of every solver here: which ops run again at which stages, so that no run needs
more bytes than the limit and the extra time is least.

*Method.* Liveness, as a compiler computes it, with unknowns for answers. A sweep goes over every
run that may take place, from the last to the first, and carries a column for each storage: 1 if
the copy that exists at this moment is read later. A read raises it to at least the column of the
run that reads; a run of the maker hands what it does not serve to the copy before. The bytes that
exist during a run are then a sum of bytes times columns, which one row holds to the limit. Where
a run does not take place, its row asks nothing new: what exists there still exists at the next
run that does. Only the columns of runs are binary; once those are chosen, the least values of
the others are whole by themselves. This is Checkmate's program (Jain et al. 2020,
https://arxiv.org/abs/1910.02653), with columns only where a life may end.

*Numbers.* Bytes reach 1e11, and HiGHS works to a tolerance. So every answer is judged by `State`.
A set that is over the limit after all is cut off by a cover inequality (storages that do not fit
together are not alive together), and the program is solved again.

*Bound.* None needed: the answer is optimal. The time to it grows with the graph, and much faster
where the limit is so low that ops run more than twice.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from fxrecals.errors import OptionError
from fxrecals.solve import refine
from fxrecals.solve.problem import Problem
from fxrecals.solve.state import Snapshot, State

if TYPE_CHECKING:
    import highspy

ZERO, ONE = 0, 1
"""The columns that are always 0 and always 1."""

MOST_RUNS = 10_000
"""Recomputes to choose from beyond which the program is not written: it would fill the memory."""

LARGEST = 1000
"""Coefficient up to which a row is in whole numbers. Other rows have 1 as their largest: with more,
HiGHS's relative and absolute tolerances differ, and it may not come to an end."""

WHOLE = 0.999
"""From where on a column counts as 1: HiGHS's tolerance of 1e-6 adds up along a chain of rows."""

OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    "mip_abs_gap": 0.0,
    "mip_rel_gap": 0.0,
}
"""Of HiGHS: the same answer on every machine, and no gap between answer and bound."""


@dataclass(frozen=True)
class Answer:
    """What a search has found.

    Attributes:
        runs: the cheapest set of recomputes found, or None.
        bound_seconds: no set within the limit takes less extra time; infinite if none fits.
        proved: whether the search came to its end. `runs` is then optimal, or None because no
            set fits; otherwise the deadline came first.
    """

    runs: Snapshot | None
    bound_seconds: float
    proved: bool


def cheapest(problem: Problem, limit: int, *, seconds: float = math.inf) -> Snapshot | None:
    """The set of recomputes of least extra time within `limit` bytes; None if there is none.

    After `seconds` it is the best set found by then, or None; `search` tells the two apart.

    Raises:
        OptionError: highspy is not installed, or there is too much to choose from.
    """
    return search(problem, limit, seconds=seconds).runs


def search(problem: Problem, limit: int, *, seconds: float = math.inf) -> Answer:
    """As `cheapest`, with a bound on the extra time and whether the answer is proved.

    The same problem and limit give the same answer, unless the deadline comes first.

    Raises:
        OptionError: highspy is not installed, or there is too much to choose from.
    """
    return _search(problem, limit, [op.seconds for op in problem.ops], monotonic() + seconds)


def lowest(problem: Problem) -> tuple[int, Snapshot]:
    """The least peak that any set of recomputes has, in bytes, and one that has it.

    Raises:
        OptionError: highspy is not installed, or there is too much to choose from.
    """
    free = [0.0] * problem.end
    runs: Snapshot = {}
    least, peak = 0, State(problem).peak_bytes
    while least < peak:
        middle = (least + peak) // 2
        found = _search(problem, middle, free, math.inf).runs
        if found is None:
            least = middle + 1
        else:
            runs, peak = found, State(problem, found).peak_bytes
    return peak, runs


def _search(problem: Problem, limit: int, prices: Sequence[float], deadline: float) -> Answer:
    liveness = _Liveness(problem)
    program = liveness.program
    for point in liveness.points:
        program.limit(point, limit)
    costs = {column: prices[op] for column, (op, _) in liveness.runs.items()}
    while True:
        found = _minimise(program, costs, deadline - monotonic())
        if found.values is None:
            return Answer(None, found.bound, found.proved)
        state = State(problem, liveness.chosen(found.values))
        if state.peak_bytes <= limit:
            refine.spend(state, limit, refine.by_seconds, effort=sys.maxsize)
            return Answer(state.snapshot(), min(found.bound, state.seconds), found.proved)
        covers = list(_covers(liveness.points, limit, found.values))
        assert covers, "the program and the state disagree"
        for cover in covers:
            program.at_most(dict.fromkeys(cover, 1.0), len(cover) - 1)


def _covers(
    points: Iterable[Counter[int]], limit: int, values: Sequence[float]
) -> Iterator[list[int]]:
    """Columns that a solution has at 1, although their bytes together are over the limit."""
    for point in points:
        cover: list[int] = []
        total = 0
        for column, nbytes in point.most_common():
            if total <= limit and values[column] >= WHOLE:
                cover.append(column)
                total += nbytes
        if total > limit:
            yield cover


class _Program:
    """Columns between 0 and 1, and rows that are at most their bounds."""

    def __init__(self) -> None:
        self.count = 2
        self.rows: list[Mapping[int, float]] = []
        self.bounds: list[float] = []

    def column(self) -> int:
        """A new column."""
        self.count += 1
        return self.count - 1

    def at_most(self, row: Mapping[int, float], bound: float) -> None:
        """A new row: coefficients by column, and the bound of their sum."""
        self.rows.append(row)
        self.bounds.append(bound)

    def limit(self, point: Counter[int], limit: int) -> None:
        """Where columns are 1, their bytes are at most `limit` together."""
        room = limit - point[ONE]
        row = {column: nbytes for column, nbytes in point.items() if column != ONE and nbytes}
        if sum(row.values()) <= room:
            return
        unit = math.gcd(*row.values()) or 1
        largest = max(row.values(), default=0)
        scale = unit if largest <= LARGEST * unit else largest
        self.at_most({c: nbytes / scale for c, nbytes in row.items()}, room // unit * unit / scale)

    def imply(self, column: int, others: Iterable[int]) -> None:
        """Where `column` is 1, one of the others is."""
        row = Counter({column: 1})
        row.subtract(others)
        self.at_most(row, 0)

    def either(self, a: int, b: int) -> int:
        """A column that is 1 where `a` or `b` is."""
        if min(a, b) <= ONE:
            return ONE if ONE in (a, b) else max(a, b)
        found = self.column()
        self.imply(a, [found])
        self.imply(b, [found])
        return found

    def both(self, a: int, b: int) -> int:
        """A column that is 1 where `a` and `b` are."""
        if min(a, b) <= ONE:
            return ZERO if ZERO in (a, b) else max(a, b)
        found = self.column()
        self.at_most({a: 1, b: 1, found: -1}, 1)
        return found

    def without(self, a: int, b: int) -> int:
        """A column that is 1 where `a` is and `b` is not."""
        if a == ZERO or b <= ONE:
            return ZERO if b == ONE else a
        found = self.column()
        self.imply(a, [found, b])
        return found


class _Liveness:
    """The program of a problem, but for the limit.

    Attributes:
        program: the columns, and what they mean for each other.
        runs: the op and the stage of each column that stands for a recompute.
        points: for each run that may take place and each load, the bytes that exist, by column.
    """

    def __init__(self, problem: Problem) -> None:
        self.program = _Program()
        self.runs: dict[int, tuple[int, int]] = {}
        self.points: list[Counter[int]] = []
        self._problem = problem
        # Columns at this moment of the sweep: whether a storage is read later, where not ZERO,
        # and whether an op has run again before.
        self._alive: dict[int, int] = {}
        self._renewed: dict[int, int] = {}
        # Of these the caller holds the first copy, and only later ones live and die.
        self._held = frozenset(
            storage
            for storage, positions in problem.held.items()
            if problem.maker[storage] == positions[0] < problem.forward_count
        )
        self._first = sorted(self._held)  # those whose first copy exists at this moment
        self._sweep_backward()
        self._sweep_forward()

    def chosen(self, values: Sequence[float]) -> Snapshot:
        """The recomputes that a solution chooses."""
        found: dict[int, tuple[int, ...]] = {}
        for column, (op, stage) in self.runs.items():
            if values[column] > 0.5:
                found[op] = (stage, *found.get(op, ()))
        return found

    def _sweep_backward(self) -> None:
        """Passes the stages, from the last to the first."""
        problem = self._problem
        for op in range(problem.forward_count):
            if self._fresh(op) and self._held.intersection(problem.makes[op]):
                self._renewed[op] = self.program.column()
        for storage, positions in problem.held.items():
            if storage not in self._held or len(positions) > 1:
                self._read(storage, ONE)
        for stage in reversed(range(problem.forward_count, problem.end)):
            self._run(stage, ONE, problem.reads[stage], problem.makes[stage])
            for op in reversed(range(problem.forward_count)):
                if problem.may_run_at(op, stage):
                    self._run_again(op, stage)
            self._renewed = {op: self._before(column) for op, column in self._renewed.items()}

    def _sweep_forward(self) -> None:
        """Passes the runs of the forward, from the last to the first."""
        problem = self._problem
        self._renewed.clear()
        for position in reversed(range(problem.forward_count)):
            for storage in problem.looks.get(position, ()):
                self._read(storage, ONE)
            makes = problem.makes[position]
            self._run(position, ONE, problem.reads[position], sorted({*makes} - self._held))
            self._first = [storage for storage in self._first if storage not in makes]

    def _run_again(self, op: int, stage: int) -> None:
        """Passes the recompute of `op` at `stage`, if it can be of use."""
        needs = [self._alive[storage] for storage in self._fresh(op) if storage in self._alive]
        if not needs:
            return
        if len(self.runs) == MOST_RUNS:
            expected = (
                f"'auto': 'exact' takes up to {MOST_RUNS} recomputes to choose from, and this "
                f"step of {len(self._problem.ops)} ops has more"
            )
            raise OptionError("solver", "exact", expected)
        column = self.program.column()
        self.runs[column] = op, stage
        self.program.imply(column, needs)
        if op in self._renewed:
            self.program.imply(column, [self._renewed[op]])
        state = self._problem.rng[op]
        reads, makes = self._problem.reads[op], self._problem.makes[op]
        if state >= 0:
            reads, makes = (*reads, state), tuple(s for s in makes if s != state)
        self._run(op, column, reads, makes)

    def _run(self, op: int, column: int, reads: Sequence[int], makes: Sequence[int]) -> None:
        """Passes a run, which takes place where `column` is 1."""
        for storage in reads:
            self._read(storage, column)
        exist = [(ONE, storage) for storage in self._first]
        exist += [(alive, s) for s, alive in self._alive.items() if s not in makes]
        for storage in makes:
            alive = self._alive.pop(storage, ZERO)
            made = ZERO if storage == self._problem.rng[op] else column  # a state only on demand
            exist.append((self.program.either(alive, made), storage))
            before = self.program.without(alive, column)
            if before != ZERO:
                self._alive[storage] = before
        for load in self._problem.loads:
            point = Counter({ONE: load.offset})
            point[column] += load.scratch[op]
            for present, storage in exist:
                point[present] += load.nbytes[storage]
            self.points.append(point)

    def _read(self, storage: int, column: int) -> None:
        """Passes a read, which takes place where `column` is 1."""
        if storage in self._held:
            renewed = self._renewed.get(self._problem.maker[storage], ZERO)
            column = self.program.both(column, renewed)
        if self._problem.nbytes[storage] and column != ZERO:
            self._alive[storage] = self.program.either(self._alive.get(storage, ZERO), column)

    def _fresh(self, op: int) -> list[int]:
        """The storages for whose sake `op` may run again."""
        nbytes, state = self._problem.nbytes, self._problem.rng[op]
        makes = self._problem.makes[op]
        return [s for s in makes if nbytes[s] and s != state and s not in self._held]

    def _before(self, renewed: int) -> int:
        """Whether an op has run again before a stage, if `renewed` is whether it has after it."""
        found = self.program.column()
        self.program.imply(found, [renewed])
        return found


class _Solution(NamedTuple):
    """What HiGHS found: values by column, a bound on the cost, and whether it came to its end."""

    values: Sequence[float] | None
    bound: float
    proved: bool


def _minimise(program: _Program, costs: Mapping[int, float], seconds: float) -> _Solution:
    """The solution of least cost in which the columns that have one are whole."""
    try:
        import highspy

        # `highspy.Highs` prints a banner before it can be told not to.
        from highspy._core import _Highs as Highs  # pyright: ignore[reportPrivateUsage]
    except ImportError:
        expected = "'auto', or 'exact' after pip install 'fxrecals[milp]'"
        raise OptionError("solver", "exact", expected) from None
    solver = Highs()
    for option, value in {**OPTIONS, "time_limit": max(0.0, seconds)}.items():
        solver.setOptionValue(option, value)
    scale = 1000 / (max(costs.values(), default=0.0) or 1.0)  # HiGHS's tolerances are absolute
    solver.passModel(_model(program, {column: scale * cost for column, cost in costs.items()}))
    solver.resetGlobalScheduler(True)  # threads that someone else asked for are no error then
    solver.run()
    statuses = highspy.HighsModelStatus
    if solver.getModelStatus() == statuses.kSolveError:
        # Presolve may have made a solution of a near miss.
        solver.clearSolver()
        solver.setOptionValue("presolve", "off")
        solver.run()
    status = solver.getModelStatus()
    solver.resetGlobalScheduler(True)
    if status == statuses.kInfeasible:
        return _Solution(None, math.inf, True)
    if status not in (statuses.kOptimal, statuses.kTimeLimit):
        raise RuntimeError(f"HiGHS stopped: {solver.modelStatusToString(status)}")
    info = solver.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible.value
    values = solver.getSolution().col_value if found else None
    return _Solution(values, max(0.0, info.mip_dual_bound / scale), status == statuses.kOptimal)


def _model(program: _Program, costs: Mapping[int, float]) -> highspy.HighsLp:
    """A program as HiGHS reads it."""
    import highspy

    lp, kinds = highspy.HighsLp(), highspy.HighsVarType
    lp.num_col_, lp.num_row_ = program.count, len(program.rows)
    lp.col_cost_ = [costs.get(column, 0.0) for column in range(program.count)]
    lp.col_lower_ = [float(column == ONE) for column in range(program.count)]
    lp.col_upper_ = [float(column != ZERO) for column in range(program.count)]
    lp.integrality_ = [
        kinds.kInteger if column in costs else kinds.kContinuous for column in range(program.count)
    ]
    lp.row_lower_ = [-math.inf] * len(program.rows)
    lp.row_upper_ = program.bounds
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = [0, *accumulate(map(len, program.rows))]
    lp.a_matrix_.index_ = [column for row in program.rows for column in row]
    lp.a_matrix_.value_ = [value for row in program.rows for value in row.values()]
    return lp
