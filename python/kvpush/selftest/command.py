"""The command: progress on a terminal, the table or the JSON, the exit status."""

from __future__ import annotations

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvpush.errors import NixlNotFoundError
from kvpush.selftest.child import SelfTestError
from kvpush.selftest.report import Report, print_report
from kvpush.selftest.run import new_report, run_selftest

__all__ = ["EXIT_FAILED", "EXIT_WRONG_BYTES", "run"]

EXIT_WRONG_BYTES = 1
EXIT_FAILED = 2


def run(backend: str, *, as_json: bool, quick: bool, limit_s: float) -> int:
    """Run the self-test and print what it found. Returns the exit status."""
    console = Console()
    errors = Console(stderr=True)
    report = new_report(backend)
    try:
        _run_with_progress(report, errors, quick=quick, limit_s=limit_s)
    except (NixlNotFoundError, SelfTestError, ValueError) as error:
        report.ok = False
        report.error = str(error)
    if as_json:
        typer.echo(msgspec.json.encode(report))
    elif report.rows:
        print_report(report, console)
    if report.error:
        errors.print(f"kvpush selftest: {report.error}", soft_wrap=True, markup=False)
        return EXIT_FAILED
    return 0 if report.ok else EXIT_WRONG_BYTES


def _run_with_progress(report: Report, errors: Console, *, quick: bool, limit_s: float) -> None:
    """Fill the report; a bar goes to the terminal's stderr, if it is one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        run_selftest(report, quick=quick, limit_s=limit_s, progress=show)
