"""Exits with a clear message when this Python is too old. Old Pythons must be able to parse it."""

import sys

MESSAGE = "kvpush needs Python 3.11 or later; %s is %d.%d. Name another: make PYTHON=python3.12 ..."

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(MESSAGE % (sys.executable, sys.version_info[0], sys.version_info[1]))
