"""Kills what its parent started, if the parent ends without doing so itself.

The parent keeps a pipe to this process open and writes ``+<process group>`` and
``-<process group>`` lines to it. When the pipe closes, for whatever reason (kill -9 included),
every process group still on the list gets SIGKILL. SIGKILL also ends stopped processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class Guardian:
    """The parent's end. One per process; not thread-safe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, process_group: int) -> None:
        """Kill this process group should the calling process end."""
        self._tell(f"+{process_group}\n")

    def forget(self, process_group: int) -> None:
        """Take a process group that has ended off the list (its number may be used again)."""
        self._tell(f"-{process_group}\n")

    def close(self) -> None:
        """End the guardian; it kills what is still on its list."""
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(line.encode())
            stdin.flush()


def main() -> None:
    """Read the list until the parent is gone, then kill what is left on it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
