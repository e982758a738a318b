"""Heat map of tasks by step, coloured by mean reward."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harbortrainer.view.format import reward
from harbortrainer.view.queries import TrialFilter
from harbortrainer.view.trial_view import UNDECIDED_STEP, Cell, TaskLabel

MAX_HEAT_COLUMNS = 36
ROWS = 60
"""Tasks on a page of the map."""
ORDERS = ("name", "reward", "gain", "played")


@dataclass(frozen=True, slots=True)
class HeatCell:
    """One task in one column."""

    style: str
    """Style class: `h0` to `h10`, `lost` without a graded trial, `blank` without a trial."""
    title: str
    query: str
    """Address parameters of its trials."""
    text: str = ""
    """The mean reward in at most three characters; a cross without a graded trial."""
    failed: bool = False
    """Whether a trial has no reward."""


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One task."""

    task: str
    query: str
    """Address parameters of its trials."""
    mean: float | None
    gain: float | None
    """Mean of the later half of the columns minus mean of the earlier half."""
    graded: int
    ungraded: int
    cells: Sequence[HeatCell]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A page of tasks."""

    columns: Sequence[str]
    """Heading of each column: its first step."""
    rows: Sequence[HeatRow]
    tasks: int
    """Number of tasks on all pages."""


def heat_map(
    cells: Mapping[tuple[TaskLabel, int], Cell], *, kind: str, order: str = "name", page: int = 1, search: str = ""
) -> HeatMap:
    """Return one page of the map.

    Args:
        cells: Results by task and step.
        kind: `train` or `eval`, for the links of the cells.
        order: One of `ORDERS`; tasks without a value come last.
        page: Page from 1.
        search: Text that the task's name must contain.
    """
    cells = {key: cell for key, cell in cells.items() if key[1] != UNDECIDED_STEP}
    steps = sorted({step for _, step in cells})
    size = max(1, -(-len(steps) // MAX_HEAT_COLUMNS))
    spans = [steps[start : start + size] for start in range(0, len(steps), size)]
    span_of = {step: index for index, span in enumerate(spans) for step in span}
    grid: dict[TaskLabel, dict[int, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for (task, step), cell in cells.items():
        if search.lower() in task.name.lower():
            grid[task][span_of[step]].append(cell)
    names = sorted(
        grid, key=lambda task: _sort_key(order, task, [merged(own) for _, own in sorted(grid[task].items())])
    )
    on_page = names[(page - 1) * ROWS : page * ROWS]
    return HeatMap(
        [str(span[0]) for span in spans], [_row(task, grid[task], spans, kind) for task in on_page], len(grid)
    )


def merged(cells: Sequence[Cell]) -> Cell:
    """Merge cells, with the same weight for every trial."""
    graded = sum(cell.graded for cell in cells)
    total = sum((cell.mean or 0.0) * cell.graded for cell in cells)
    return Cell(total / graded if graded else None, graded, sum(cell.ungraded for cell in cells))


def gain_of(cells: Sequence[Cell]) -> float | None:
    """Return the later half's mean minus the earlier half's, over columns with a graded trial; None under two."""
    graded = [cell for cell in cells if cell.graded]
    early, late = merged(graded[: len(graded) // 2]), merged(graded[(len(graded) + 1) // 2 :])
    return None if early.mean is None or late.mean is None else late.mean - early.mean


def _sort_key(order: str, task: TaskLabel, cells: Sequence[Cell]) -> tuple[float, TaskLabel]:
    whole = merged(cells)
    figure = {"reward": whole.mean, "gain": gain_of(cells), "played": float(whole.graded + whole.ungraded)}.get(order)
    if order == "name":
        return 0.0, task
    return (float("inf") if figure is None else -figure if order != "reward" else figure), task


def _row(task: TaskLabel, own: Mapping[int, list[Cell]], spans: Sequence[Sequence[int]], kind: str) -> HeatRow:
    by_span = {index: merged(cells) for index, cells in own.items()}
    whole = merged(list(by_span.values()))
    cells = [_cell_of(task, by_span.get(index), span, kind) for index, span in enumerate(spans)]
    gain = gain_of([by_span[index] for index in sorted(by_span)])
    query = TrialFilter(kind=kind, task=task.name, source=task.source).query()
    return HeatRow(str(task), query, whole.mean, gain, whole.graded, whole.ungraded, cells)


def _cell_of(task: TaskLabel, cell: Cell | None, span: Sequence[int], kind: str) -> HeatCell:
    steps = str(span[0]) if len(span) == 1 else f"{span[0]}..{span[-1]}"
    if cell is None:
        return HeatCell("blank", "", "")
    ungraded = f", {cell.ungraded} not graded" if cell.ungraded else ""
    title = f"{task}, {steps}: {reward(cell.mean)} over {cell.graded} graded{ungraded}"
    query = TrialFilter(kind=kind, task=task.name, source=task.source, step=steps).query()
    return HeatCell(heat_style(cell.mean), title, query, short_reward(cell.mean), cell.ungraded > 0)


def short_reward(mean: float | None) -> str:
    """Return a mean reward for a narrow cell.

    Example:
        >>> [short_reward(value) for value in (None, 0.0, 0.04, 0.5, 0.96, 1.0, -0.3, 12.0)]
        ['✕', '0', '.0', '.5', '1.', '1', '-.3', '12']
    """
    if mean is None:
        return "✕"
    if mean == int(mean):
        return f"{mean:.0f}"
    text = f"{mean:.1f}"
    return text.replace("0.", ".", 1) if abs(mean) < 1 and not text.endswith("1.0") else text.removesuffix("0")


def heat_style(mean: float | None) -> str:
    """Return the style class of a mean reward, clamped to 0 and 1."""
    return "lost" if mean is None else f"h{round(10 * min(1.0, max(0.0, mean)))}"
