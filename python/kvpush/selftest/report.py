"""What the self-test found: the figures, as a table and as JSON."""

from __future__ import annotations

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["Report", "Row", "print_report"]


_US_PER_MS = 1_000
_KIB = 1_024
_TABLE_CHARS = 160
"""The width the table needs; a narrower terminal wraps its lines rather than its cells."""


class Row(msgspec.Struct, kw_only=True):
    """One request. Times and rates are medians over `repetitions`."""

    request: str
    layers: int
    blocks: int
    tokens: int
    producer_blocks: str
    consumer_blocks: str
    repetitions: int
    bytes: int
    descriptors_before: int
    descriptors: int
    plan_us: float
    post_us: float
    transfer_us: float
    grant_to_received_us: float
    transfer_gb_per_s: float
    bare_prepare_us: float | None
    bare_write_us: float | None
    bare_ratio: float | None
    """Bare time, preparation included, over `transfer_us`: above 1, kvpush is faster."""
    transfer_best_us: float
    bare_best_us: float | None
    bare_best_ratio: float | None
    """The same from the fastest of each: what counts on a machine with other work to do."""
    bytes_wrong: int


class Report(msgspec.Struct, kw_only=True):
    """All of a run."""

    ok: bool
    mismatches: int
    """Bytes that differ, over all transfers."""
    error: str
    """Why the run ended early; empty if it did not."""
    first_mismatch: str
    backend: str
    nixl_library: str
    nixl_versions: dict[str, str]
    kvpush_version: str
    duration_s: float
    rows: list[Row]


def _time(micros: float | None) -> str:
    """A time in the unit in which it reads best."""
    if micros is None:
        return "-"
    if micros < _US_PER_MS:
        return f"{micros:.0f} us"
    return f"{micros / _US_PER_MS:.2f} ms"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _size(count: int) -> str:
    """Bytes in the unit in which they read best."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < _KIB:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _KIB
    return f"{value:.2f} GiB"


def print_report(report: Report, console: Console) -> None:
    """The table and one closing line."""
    console.width = max(console.width, _TABLE_CHARS)
    console.print(f"kvpush selftest: {report.backend}, host memory, medians", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("request", no_wrap=True)
    columns = ("layers", "bytes", "descriptors", "plan", "post", "transfer", "end to end", "GB/s")
    for name in (*columns, "bare WRITE", "bare/ours", "at best", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = 0
    for row in report.rows:
        if previous not in (0, row.layers):
            table.add_section()
        previous = row.layers
        bare = row.bare_write_us
        table.add_row(
            row.request,
            str(row.layers),
            _size(row.bytes),
            f"{row.descriptors_before} -> {row.descriptors}",
            _time(row.plan_us),
            _time(row.post_us),
            _time(row.transfer_us),
            _time(row.grant_to_received_us),
            f"{row.transfer_gb_per_s:.2f}",
            _time(None if bare is None else bare + (row.bare_prepare_us or 0.0)),
            _ratio(row.bare_ratio),
            _ratio(row.bare_best_ratio),
            f"[red]{row.bytes_wrong}[/red]" if row.bytes_wrong else "0",
        )
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in report.nixl_versions.items())
    console.print(f"NIXL: {report.nixl_library} ({versions or 'version unknown'})", soft_wrap=True)
    if report.ok:
        console.print(f"[green]ok[/green]: every byte is right, in {report.duration_s:.1f} s")
    elif report.mismatches:
        console.print(
            f"[red]failed[/red]: {report.mismatches} bytes are wrong; the first: "
            f"{report.first_mismatch}",
            soft_wrap=True,
        )
