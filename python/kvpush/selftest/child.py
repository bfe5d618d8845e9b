"""A child process that carries out commands, and what its parent sees of it.

Every wait of the parent has a limit and also ends when the child does, so a child that dies or
hangs becomes an error. A child whose parent is gone reads the end of its pipe and ends too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

__all__ = [
    "Child",
    "ChildError",
    "ChildFailedError",
    "ChildTimeoutError",
    "SelfTestError",
    "serve",
]

_KILL_LIMIT_S = 10.0
"""A killed process is gone at once; this only keeps a bug from hanging us."""


class SelfTestError(RuntimeError):
    """The self-test could not be finished."""


class ChildError(SelfTestError):
    """The child died or did not answer in time."""


class ChildTimeoutError(ChildError):
    """The child lives, but did not answer in time."""


class ChildFailedError(SelfTestError):
    """The child raised an exception; it lives on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


def serve(connection: Connection, target: Any) -> None:
    """In the child: call the methods of `target` that the parent names, until it hangs up."""
    # Ctrl-C reaches the whole foreground group: the parent ends its children itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = (True, getattr(target, method)(**arguments))
        except Exception as error:  # noqa: BLE001 - the parent decides what it means
            reply = (False, (type(error).__name__, str(error)))
        try:
            connection.send(reply)
        except BrokenPipeError:
            return


class Child:
    """Starts `main(connection, *arguments)` in a process of its own, which should serve().

    Use as a context manager: at the end the process is killed if it still lives.
    """

    def __init__(
        self, name: str, main: Callable[..., None], *arguments: Any, method: str = "spawn"
    ) -> None:
        self.name = name
        context: Any = multiprocessing.get_context(method)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=main, args=(theirs, *arguments), name=name, daemon=True
        )
        self.process.start()
        theirs.close()  # so that its end shows when the child dies

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, method: str, /, **arguments: Any) -> None:
        """Ask for something; exactly one receive() must follow."""
        try:
            self.connection.send((method, arguments))
        except OSError as error:
            raise ChildError(self._obituary(method)) from error

    def receive(self, what: str, limit_s: float) -> Any:
        """Take the answer to the oldest send()."""
        until = time.monotonic() + limit_s
        while True:
            left_s = until - time.monotonic()
            ready = wait([self.connection, self.process.sentinel], max(left_s, 0.0))
            if self.connection in ready:
                break
            if ready:
                raise ChildError(self._obituary(what))
            if left_s <= 0:
                raise ChildTimeoutError(
                    f"the {self.name} process did not finish '{what}' within {limit_s:g} s"
                )
        try:
            ok, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise ChildError(self._obituary(what)) from error
        if not ok:
            raise ChildFailedError(*value)
        return value

    def call(self, method: str, wait_s: float, /, **arguments: Any) -> Any:
        """Call a method of the child's object and return what it returned."""
        self.send(method, **arguments)
        return self.receive(method, wait_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        if self.process.pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def close(self) -> None:
        """End the process, by force if need be. Idempotent."""
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(_KILL_LIMIT_S)

    def _obituary(self, what: str) -> str:
        self.process.join(_KILL_LIMIT_S)
        code = self.process.exitcode
        how = f"exit status {code}"
        if code is not None and code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name})"
        return f"the {self.name} process ended during '{what}' with {how}; its stderr has the cause"
