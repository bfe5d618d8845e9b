"""The process of one engine: vLLM's `LLMEngine` stepped as its own core process would be.

Commands come over a pipe between steps, events go back after each step. The loop follows vLLM's:
wait for a command when there is nothing to do, step while there is, and sleep a millisecond after
a step that ran no model but left work (a transfer under way).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.engines.settings import EngineSettings

HOST = "127.0.0.1"

_PR_SET_PDEATHSIG = 1
# How often an idle engine looks whether it was told to end.
_IDLE_LOOK_S = 0.1
# vLLM's own core process sleeps this long after a step without a model run.
_IDLE_STEP_S = 0.001


def run(settings: EngineSettings, connection: Connection, log: str, model: str) -> None:
    """Entry point of the child process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ.update(_environment(settings))
    try:
        engine = InProcessEngine(settings, connection, Path(model))
        connection.send(("ready", engine.facts()))
        engine.loop()
        engine.shutdown()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        connection.send(("died", traceback.format_exc()))
        raise
    finally:
        connection.close()


def _environment(settings: EngineSettings) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(settings.side_port),
        **settings.env,
    }


class InProcessEngine:
    """One engine and the loop around it; used by its process's main thread alone."""

    def __init__(self, settings: EngineSettings, connection: Connection, model: Path) -> None:
        from bench.engines.model import register

        self.settings = settings
        self._connection = connection
        register(settings.model)
        self.engine = _make_engine(settings, model)
        self.core = self.engine.engine_core.engine_core
        self._ran_model = False
        self._steps = 0
        self._model_steps = 0
        self._preemptions = 0
        self._prefix_hit_tokens = 0
        self._known: dict[str, int] = {}
        self._failed: list[str] = []
        self._stopping = False
        self._terminating = False
        self._follow_core()
        signal.signal(signal.SIGTERM, self._on_term)
        self._timer = self._time_hooks() if settings.time_hooks else None
        self._stamper = self._stamp() if settings.model.stamp else None
        self._stages = self._time_stages() if settings.time_stages else None
        self._blocks: dict[str, list[int]] = {}
        if settings.resident_cache:
            self._touch_cache()
        if settings.record_blocks:
            self._record_blocks()

    def _follow_core(self) -> None:
        """See what vLLM's step says beside its outputs: whether the model ran.

        And count what its scheduler does to requests without saying so.
        """
        step = self.core.step_fn
        scheduler = self.core.scheduler
        preempt, look_up = (
            scheduler._preempt_request,
            scheduler.kv_cache_manager.get_computed_blocks,
        )

        def followed() -> Any:
            outputs, ran = step()
            self._ran_model = ran
            return outputs, ran

        def preempted(*args: Any, **kwargs: Any) -> Any:
            self._preemptions += 1
            return preempt(*args, **kwargs)

        def looked_up(*args: Any, **kwargs: Any) -> Any:
            found = look_up(*args, **kwargs)
            self._prefix_hit_tokens += found[1]
            return found

        self.core.step_fn = followed
        scheduler._preempt_request = preempted
        scheduler.kv_cache_manager.get_computed_blocks = looked_up

    def _time_hooks(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from bench.engines.hook_timer import HookTimer

        if not has_kv_transfer_group():
            return None
        timer = HookTimer()
        timer.wrap(self.core.scheduler.connector, "scheduler")
        timer.wrap(get_kv_transfer_group(), "worker")
        return timer

    def _time_stages(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from bench.engines.stage_timer import StageTimer

        if not has_kv_transfer_group():
            return None
        timer = StageTimer()
        timer.follow(self.core.scheduler.connector, get_kv_transfer_group())
        return timer

    def _stamp(self) -> Any:
        from bench.engines.model import TimedForCausalLM
        from bench.engines.stamps import Stamper

        runner = self.engine.model_executor.driver_worker.worker.model_runner
        layers = list(runner.model.layers)
        stamper = Stamper(runner, layers, self.settings.model.stamp, self.settings.seed)
        TimedForCausalLM.stamper = stamper
        return stamper

    def _touch_cache(self) -> None:
        runner = self.engine.model_executor.driver_worker.worker.model_runner
        for layer in runner.model.layers:
            layer.kv_cache.zero_()

    def _record_blocks(self) -> None:
        """Remember which blocks a request had when it gives them back."""
        manager = self.core.scheduler.kv_cache_manager
        free = manager.free

        def followed(request: Any) -> None:
            self._blocks[request.request_id] = list(manager.get_block_ids(request.request_id)[0])
            free(request)

        manager.free = followed

    def facts(self) -> dict[str, Any]:
        """What the driver wants to know of a started engine."""
        config = self.engine.vllm_config
        return {
            "engine_id": config.kv_transfer_config.engine_id if config.kv_transfer_config else "",
            "async_scheduling": config.scheduler_config.async_scheduling,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "free_blocks": self._free_blocks(),
            "pid": os.getpid(),
        }

    def loop(self) -> None:
        """Until told to stop or the driver is gone."""
        while not self._stopping:
            wait_s = 0.0 if self._has_work() else _IDLE_LOOK_S
            try:
                while self._connection.poll(wait_s):
                    self._obey(self._connection.recv())
                    wait_s = 0.0
            except EOFError:
                return
            if self._terminating:
                self._end_requests()
                return
            if self._has_work():
                self._step()

    def _on_term(self, *_: object) -> None:
        self._terminating = True

    def _end_requests(self) -> None:
        """As vLLM's core process does on SIGTERM: abort what lives, step while work is left."""
        from vllm.v1.request import RequestStatus

        self.core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        while self._has_work():
            self._step()

    def _has_work(self) -> bool:
        return bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def _step(self) -> None:
        self._ran_model = False
        outputs = self.engine.step()
        if self._timer is not None:
            self._timer.end_step(ran_model=self._ran_model)
        now = time.perf_counter()
        self._steps += 1
        self._model_steps += self._ran_model
        events = [self._event(output) for output in outputs]
        if events:
            self._connection.send(("tokens", now, events))
        if not self._ran_model and self._has_work():
            time.sleep(_IDLE_STEP_S)

    def _event(self, output: Any) -> tuple[str, int, str, Any]:
        """(request, new tokens, how it ended or "", parameters for the decode leg)."""
        completion = output.outputs[0]
        total = len(completion.token_ids)
        request = output.request_id
        fresh = total - self._known.get(request, 0)
        self._known[request] = total
        if output.finished:
            del self._known[request]
            return request, fresh, completion.finish_reason or "?", output.kv_transfer_params
        return request, fresh, "", None

    def _obey(self, command: tuple[Any, ...]) -> None:
        getattr(self, f"_do_{command[0]}")(*command[1:])

    def _do_add(
        self, request: str, tokens: list[int], max_tokens: int, params: dict[str, Any] | None
    ) -> None:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        self.engine.add_request(request, TokensPrompt(prompt_token_ids=tokens), sampling)

    def _do_abort(self, request: str) -> None:
        self.engine.abort_request([request])
        self._known.pop(request, None)

    def _do_reset(self) -> None:
        """Forget what was measured so far."""
        self._steps = self._model_steps = 0
        self._blocks.clear()
        if self._stages is not None:
            self._stages.marks.clear()
        if self._timer is not None:
            self._timer.reset()

    def _do_report(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._connection.send(
            (
                "report",
                {
                    "cpu_s": usage.ru_utime + usage.ru_stime,
                    "rss_kib": usage.ru_maxrss,
                    "steps": self._steps,
                    "model_steps": self._model_steps,
                    "free_blocks": self._free_blocks(),
                    "preemptions": self._preemptions,
                    "prefix_hit_tokens": self._prefix_hit_tokens,
                    "hooks": self._timer.report() if self._timer is not None else None,
                    "stamps": self._stamper.report() if self._stamper is not None else None,
                    "connector": self._connector_stats(),
                    "blocks": dict(self._blocks),
                    "stages": dict(self._stages.marks) if self._stages is not None else None,
                },
            )
        )

    def _connector_stats(self) -> dict[str, Any] | None:
        role = getattr(self.core.scheduler.connector, "_scheduler", None)
        return role.stats() if role is not None and hasattr(role, "stats") else None

    def _free_blocks(self) -> int:
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _do_reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def _do_stop(self) -> None:
        self._stopping = True

    def shutdown(self) -> None:
        """End the engine; transfers in flight drain."""
        self.engine.engine_core.shutdown()


def _make_engine(settings: EngineSettings, model: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    transfer: Any = None
    if settings.connector is not None:
        from vllm.config import KVTransferConfig

        connector = settings.connector
        transfer = KVTransferConfig(
            kv_connector=connector.name,
            kv_connector_module_path=connector.module_path,
            kv_role=settings.role,
            kv_connector_extra_config=dict(connector.extra_config),
            kv_load_failure_policy=connector.load_failure_policy,
        )
    arguments = EngineArgs(
        model=str(model),
        served_model_name="timed",
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=settings.model.dtype,
        max_model_len=settings.model.max_model_len,
        enforce_eager=True,
        block_size=settings.block_size,
        num_gpu_blocks_override=settings.num_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        enable_prefix_caching=settings.prefix_caching,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        seed=settings.seed,
        kv_transfer_config=transfer,
    )
    return LLMEngine.from_engine_args(arguments)
