"""A bench is a table of cells, each measured once: parameters in, figures out.

A cell is written as one JSON line as soon as it is measured. A bench that is started again measures only
what is not there yet; to measure a cell again, delete its line, or give another folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rich.table import Table

Value: TypeAlias = str | int | float
Values: TypeAlias = Mapping[str, Value]


class Cell(NamedTuple):
    """What was measured, and under which parameters."""

    parameters: Values
    figures: Values


class Results:
    """The cells of one bench, in `<folder>/<bench>.jsonl`; kept in memory alone where the folder is None."""

    def __init__(self, bench: str, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"{bench}.jsonl"
        self._known: dict[str, Cell] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                self._remember(Cell(**json.loads(line)))

    def measure(self, parameters: Values, measure: Callable[[], Values]) -> Cell:
        """The cell with these parameters, measured now unless it is there already."""
        known = self._known.get(_key(parameters))
        if known is not None:
            return known
        cell = Cell(dict(parameters), dict(measure()))
        self._remember(cell)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(cell._asdict()) + "\n")
        return cell

    def _remember(self, cell: Cell) -> None:
        self._known[_key(cell.parameters)] = cell


def to_json(cells: Sequence[Cell]) -> str:
    """All cells as one JSON array."""
    return json.dumps([cell._asdict() for cell in cells], indent=1)


def to_table(cells: Sequence[Cell], title: str) -> Table:
    """One row for each cell, one column for each parameter that differs and each figure."""
    names = [
        name
        for name in cells[0].parameters
        if len(cells) == 1 or len({cell.parameters.get(name) for cell in cells}) > 1
    ]
    table = Table(*names, *cells[0].figures, title=title)
    for cell in cells:
        values = [cell.parameters[name] for name in names] + list(cell.figures.values())
        table.add_row(*map(_shown, values))
    return table


def _shown(value: Value) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _key(parameters: Values) -> str:
    return json.dumps(dict(parameters), sort_keys=True)
