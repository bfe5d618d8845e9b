"""A bare NIXL WRITE of the same bytes, to hold kvpush's figures against.

Uses the native part of NIXL's own Python package, the one that belongs to the library kvpush
opened. Where it can't be imported there is nothing to compare with.
"""

from __future__ import annotations

import importlib
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from kvpush import _core

__all__ = ["BareAgent", "load_bindings"]

_NOTIFICATION = "bare"
_NAP_S = 20e-6


def load_bindings(library: str) -> ModuleType | None:
    """NIXL's Python bindings beside `library`, or None."""
    names = re.findall(r"nixl_cu\d+", str(Path(library).parent))
    for name in names[-1:]:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError:
            return None
    return None


class BareAgent:
    """One NIXL agent without anything of kvpush around it."""

    def __init__(
        self, bindings: ModuleType, name: str, backend: str, address: int, length: int
    ) -> None:
        # As kvpush's own agent: no threads of NIXL's, no locks.
        self._nixl = bindings
        self._agent: Any = bindings.nixlAgent(name, bindings.nixlAgentConfig(False))
        _, self._memory = self._agent.getPluginParams(backend)
        params, _ = self._agent.getPluginParams(backend)
        self._backend = self._agent.createBackend(backend, params)
        descriptors = bindings.nixlRegDList(bindings.DRAM_SEG, [(address, length, 0, "")])
        self._agent.registerMem(descriptors, [self._backend])
        self._peer = ""

    def metadata(self) -> bytes:
        """For the other agent."""
        return bytes(self._agent.getLocalMD())

    def meet(self, metadata: bytes) -> None:
        """Load the other agent's metadata."""
        name = self._agent.loadRemoteMD(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else str(name)

    def write(self, plan: _core.CopyPlan, limit_s: float) -> tuple[float, float]:
        """One WRITE of the plan's runs. Returns seconds to prepare and from post to completion."""
        return self.write_runs(plan.runs, limit_s)

    def write_runs(self, runs: Any, limit_s: float) -> tuple[float, float]:
        """The same of an array of runs: local address, remote address, length."""
        nixl = self._nixl
        local = runs[:, [0, 2, 0]].copy()
        remote = runs[:, [1, 2, 1]].copy()
        local[:, 2] = 0
        remote[:, 2] = 0
        start = time.perf_counter()
        handle = self._agent.createXferReq(
            nixl.NIXL_WRITE,
            nixl.nixlXferDList(nixl.DRAM_SEG, local),
            nixl.nixlXferDList(nixl.DRAM_SEG, remote),
            self._peer,
            _NOTIFICATION,
            [self._backend],
        )
        begin = time.perf_counter()
        state = self._agent.postXferReq(handle)
        while state == nixl.NIXL_IN_PROG:
            if time.perf_counter() - begin > limit_s:
                raise TimeoutError(f"the bare NIXL WRITE did not complete within {limit_s:g} s")
            state = self._agent.getXferStatus(handle)
        took_s = time.perf_counter() - begin
        self._agent.releaseXferReq(handle)
        if state != nixl.NIXL_SUCCESS:
            raise RuntimeError(f"the bare NIXL WRITE ended with {state}")
        return begin - start, took_s

    def await_write(self, limit_s: float) -> None:
        """Wait for the other agent's WRITE: some transports move only when both sides look."""
        until = time.monotonic() + limit_s
        while True:
            if self._agent.getNotifs({}, [self._backend]):
                return
            if time.monotonic() > until:
                raise TimeoutError(f"no bare NIXL WRITE arrived within {limit_s:g} s")
            time.sleep(_NAP_S)
