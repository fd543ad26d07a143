"""Small tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 130
Cell = str | int | float | None


def wide_console() -> Console:
    """Standard output; where it is no terminal, wide enough for a table of ten columns."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """A table with the names of its rows on the left and numbers on the right. None is shown as a dash.

    Example: `Console().print(table("Accuracy", ["", "base", "SFT"], [["held-out", 0.02, 0.48]]))`
    """
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        assert len(row) == len(columns), f"{len(row)} cells for {len(columns)} columns"
        made.add_row(*(cell(value) for value in row))
    return made


def cell(value: Cell) -> str:
    """A number with four significant digits at most, thousands separated: 12,345 · 0.4812 · 1.2e-06."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
