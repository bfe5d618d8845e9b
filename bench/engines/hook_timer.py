"""Times every hook of a connector object, as vLLM's main thread pays for it."""

from __future__ import annotations

import threading
import time
from array import array
from typing import Any

import numpy as np

# Called per request or step by vLLM, whichever of them a release has.
_HOOKS = {
    "scheduler": (
        "on_new_request",
        "get_num_new_matched_tokens",
        "get_external_cache_hit_sources",
        "get_loaded_kv_cache_group_ids",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished",
        "request_finished_all_groups",
        "register_finished_partial_tail",
        "take_events",
        "has_pending_block_frees",
        "has_pending_push_work",
        "get_finished_count",
    ),
    "worker": (
        "bind_connector_metadata",
        "clear_connector_metadata",
        "handle_preemptions",
        "finish_forward",
        "start_load_kv",
        "wait_for_save",
        "get_finished",
        "get_transfer_results",
        "get_block_ids_with_load_errors",
        "get_kv_connector_stats",
        "get_kv_connector_kv_cache_events",
        "build_connector_worker_meta",
    ),
}


class HookTimer:
    """Collects durations per hook and per engine step.

    Only the outermost of nested hooks counts, and only calls of the thread that made the timer.
    Time is the clock's, which includes waiting for the GIL and for a core; steps with a model run
    also have the thread's own CPU time. Each timed call pays under a microsecond for the clocks, on
    every connector alike.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._samples: dict[str, array[int]] = {}
        self._inside = False
        self._step_ns = 0
        self._step_cpu_ns = 0
        self._idle_steps = array("q")
        self._model_steps = array("q")
        self._model_steps_cpu = array("q")

    def wrap(self, connector: Any, side: str) -> None:
        """Time the hooks that vLLM calls on this object from now on."""
        for name in _HOOKS[side]:
            hook = getattr(connector, name, None)
            if hook is not None:
                setattr(connector, name, self._timed(f"{side}.{name}", hook))

    def _timed(self, label: str, hook: Any) -> Any:
        samples = self._samples.setdefault(label, array("q"))
        clock, cpu_clock = time.perf_counter_ns, time.thread_time_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return hook(*args, **kwargs)
            self._inside = True
            cpu_begin = cpu_clock()
            begin = clock()
            try:
                return hook(*args, **kwargs)
            finally:
                took = clock() - begin
                self._step_cpu_ns += cpu_clock() - cpu_begin
                self._inside = False
                samples.append(took)
                self._step_ns += took

        return timed

    def end_step(self, *, ran_model: bool) -> None:
        """Close the account of one step and of what was called since the one before."""
        (self._model_steps if ran_model else self._idle_steps).append(self._step_ns)
        if ran_model:
            self._model_steps_cpu.append(self._step_cpu_ns)
        self._step_ns = self._step_cpu_ns = 0

    def reset(self) -> None:
        """Forget everything."""
        for samples in self._samples.values():
            del samples[:]
        for steps in (self._model_steps, self._model_steps_cpu, self._idle_steps):
            del steps[:]
        self._step_ns = self._step_cpu_ns = 0

    def report(self) -> dict[str, Any]:
        """Microseconds: per hook, per step with a model run, and per step without."""
        return {
            "hooks": {label: _summary(values) for label, values in self._samples.items()},
            "model_steps": _summary(self._model_steps),
            "model_steps_cpu": _summary(self._model_steps_cpu),
            "idle_steps": _summary(self._idle_steps),
        }


def _summary(values: array[int]) -> dict[str, float]:
    if not values:
        return {"calls": 0, "sum_us": 0.0, "mean_us": 0.0, "p50_us": 0.0, "p99_us": 0.0}
    micros = np.asarray(values, dtype=np.float64) / 1e3
    p50, p99 = np.percentile(micros, [50, 99])
    return {
        "calls": len(values),
        "sum_us": float(micros.sum()),
        "mean_us": float(micros.mean()),
        "p50_us": float(p50),
        "p99_us": float(p99),
    }
