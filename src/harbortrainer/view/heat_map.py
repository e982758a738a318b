"""Tasks by steps: where the policy got better, where it never does, and what was played when."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harbortrainer.view.shown_trial import OPEN, Cell
from harbortrainer.view.spoken import reward
from harbortrainer.view.trial_filter import TrialFilter

MOST_COLUMNS_WIDE = 36
ROWS = 60
"""Tasks on a page."""
ORDERS = ("name", "reward", "gain", "played")


@dataclass(frozen=True, slots=True)
class HeatCell:
    """One task in one column."""

    style: str
    """Its colour: `h0` to `h10`, `lost` where nothing could be graded, `blank` where it was not played."""
    title: str
    query: str
    """Of the address of its trials."""


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One task."""

    task: str
    mean: float | None
    gain: float | None
    """Mean of the later half of its columns minus that of the earlier half."""
    graded: int
    lost: int
    cells: Sequence[HeatCell]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A page of tasks."""

    columns: Sequence[str]
    """What stands over each column: a step, or the first of several."""
    rows: Sequence[HeatRow]
    tasks: int
    """In all."""


def heat_map(
    cells: Mapping[tuple[str, int], Cell], *, kind: str, order: str = "name", page: int = 1, search: str = ""
) -> HeatMap:
    """A page of the map.

    Args:
        cells: By task and step.
        kind: Of the trials; the cells' links ask for it.
        order: One of `ORDERS`; what has no figure comes last.
        page: From 1.
        search: Only tasks whose name holds it.
    """
    cells = {place: cell for place, cell in cells.items() if place[1] != OPEN}
    steps = sorted({step for _, step in cells})
    size = max(1, -(-len(steps) // MOST_COLUMNS_WIDE))
    spans = [steps[start : start + size] for start in range(0, len(steps), size)]
    span_of = {step: index for index, span in enumerate(spans) for step in span}
    grid: dict[str, dict[int, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for (task, step), cell in cells.items():
        if search.lower() in task.lower():
            grid[task][span_of[step]].append(cell)
    names = sorted(grid, key=lambda task: _place(order, task, [merged(own) for _, own in sorted(grid[task].items())]))
    chosen = names[(page - 1) * ROWS : page * ROWS]
    return HeatMap(
        [str(span[0]) for span in spans], [_row(task, grid[task], spans, kind) for task in chosen], len(grid)
    )


def merged(cells: Sequence[Cell]) -> Cell:
    """Several cells as one, every trial counting the same."""
    graded = sum(cell.graded for cell in cells)
    total = sum((cell.mean or 0.0) * cell.graded for cell in cells)
    return Cell(total / graded if graded else None, graded, sum(cell.lost for cell in cells))


def gain_of(cells: Sequence[Cell]) -> float | None:
    """The later half's mean minus the earlier half's, over columns with a graded trial; None under two."""
    graded = [cell for cell in cells if cell.graded]
    early, late = merged(graded[: len(graded) // 2]), merged(graded[(len(graded) + 1) // 2 :])
    return None if early.mean is None or late.mean is None else late.mean - early.mean


def _place(order: str, task: str, cells: Sequence[Cell]) -> tuple[float, str]:
    whole = merged(cells)
    figure = {"reward": whole.mean, "gain": gain_of(cells), "played": float(whole.graded + whole.lost)}.get(order)
    if order == "name":
        return 0.0, task
    return (float("inf") if figure is None else -figure if order != "reward" else figure), task


def _row(task: str, own: Mapping[int, list[Cell]], spans: Sequence[Sequence[int]], kind: str) -> HeatRow:
    by_span = {index: merged(cells) for index, cells in own.items()}
    whole = merged(list(by_span.values()))
    cells = [_cell_of(task, by_span.get(index), span, kind) for index, span in enumerate(spans)]
    gain = gain_of([by_span[index] for index in sorted(by_span)])
    return HeatRow(task, whole.mean, gain, whole.graded, whole.lost, cells)


def _cell_of(task: str, cell: Cell | None, span: Sequence[int], kind: str) -> HeatCell:
    steps = str(span[0]) if len(span) == 1 else f"{span[0]}..{span[-1]}"
    if cell is None:
        return HeatCell("blank", "", "")
    lost = f", {cell.lost} lost" if cell.lost else ""
    title = f"{task}, {steps}: {reward(cell.mean)} over {cell.graded}{lost}"
    query = TrialFilter(kind=kind, task=task, step=steps).query()
    return HeatCell(heat_style(cell.mean), title, query)


def heat_style(mean: float | None) -> str:
    """The class of a mean reward; rewards beyond 0 and 1 have the colours of the ends."""
    return "lost" if mean is None else f"h{round(10 * min(1.0, max(0.0, mean)))}"
