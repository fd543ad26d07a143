"""`conveyor report RUN`: where a run's time went, in tables, and its trace, timeline and page written anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from conveyor.config import UserError
from conveyor.report.page import write_pages
from conveyor.report.summary import Run, metrics_sheet, read_run, time_sheets
from conveyor.report.tables import table, wide_console
from conveyor.report.trace import write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="folder of a run, finished or going on")
    parser.add_argument("--step", type=int, metavar="N", help="tables and timeline of one step (default: all, and the last three)")


def _write(found: Run, step: int | None, trace: bool) -> None:
    try:
        if trace:
            write_trace(found.events, found.folder / "trace.json")
        write_pages(found, step)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None


def run(known: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Prints the tables and writes RUN/trace.json, RUN/timeline.png and RUN/report.html; returns the exit status.

    Raises:
        UserError: the folder holds no run that a report can be made of, or the run has no such step.
    """
    if overrides:
        raise UserError(f"--{next(iter(overrides))}: unknown argument")
    found = read_run(Path(known.folder))
    _check_step(found, known.step)
    console = wide_console()
    so_far = "" if found.finished else " so far: it is going on, or ended before its model was saved"
    console.print(f"{found.folder}: {len(found.metrics)} steps{so_far}", markup=False, highlight=False, soft_wrap=True)
    written = []
    if found.windows:
        for sheet in time_sheets(found, known.step):
            console.print(table(sheet.title, sheet.columns, sheet.rows))
        _write(found, known.step, trace=True)
        written = ["trace.json (opens in ui.perfetto.dev)", "timeline.png"]
    else:
        sheet = metrics_sheet(found.metrics)
        console.print(table(sheet.title, sheet.columns, sheet.rows))
    if not written:
        _write(found, known.step, trace=False)
    console.print(f"{found.folder}: wrote {', '.join([*written, 'report.html'])}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _check_step(found: Run, step: int | None) -> None:
    if step is None or step in found.windows:
        return
    if not found.windows:
        raise UserError(f"--step: {found.folder} has no timeline: its method has no stages")
    raise UserError(f"--step {step}: {found.folder} has steps {min(found.windows)} to {max(found.windows)}")
