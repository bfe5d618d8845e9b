"""`kvpush selftest`: two processes, real NIXL, every byte compared."""

from __future__ import annotations

from kvpush.selftest.report import Report, Row, print_report
from kvpush.selftest.run import new_report, run_selftest

__all__ = ["Report", "Row", "new_report", "print_report", "run_selftest"]
