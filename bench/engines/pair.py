"""Drives prefill and decode engines in processes of their own, and times every request.

Use from one thread. Whatever ends this process, its engines end too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from bench.engines.child import HOST, run
from bench.engines.settings import ConnectorSettings, EngineSettings, ModelSettings, write_config
from bench.harness.servers import free_port

# Seconds on idle cores; other work may share them.
START_LIMIT_S = 240.0
STOP_LIMIT_S = 20.0
ANSWER_LIMIT_S = 60.0


class EngineError(RuntimeError):
    """An engine did not start, or died."""


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    # Read when torch is imported, so set before the fork server imports it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    context.set_forkserver_preload(["bench.engines.preload"])
    return context


class EngineProcess:
    """The driver's end of one engine."""

    def __init__(self, settings: EngineSettings, logs: Path, model: Path, *, life: int = 1) -> None:
        self.settings = settings
        self.life = life
        self.log = logs / (f"{settings.name}.log" if life == 1 else f"{settings.name}-{life}.log")
        self.facts: dict[str, Any] = {}
        self._model = model
        context = _context()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=run,
            args=(settings, theirs, str(self.log), str(model)),
            name=settings.name,
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until the engine steps; raise with the log's place if it does not."""
        if not self.connection.poll(limit_s):
            raise EngineError(f"{self.settings.name} did not start in {limit_s:.0f} s: {self.log}")
        kind, value = self._receive()
        if kind != "ready":
            raise EngineError(f"{self.settings.name} did not start: {self.log}\n{value}")
        self.facts = value

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise EngineError(f"{self.settings.name} died; its log: {self.log}") from error

    def send(self, *command: Any) -> None:
        """Give a command; the engine takes it between two steps."""
        try:
            self.connection.send(command)
        except (BrokenPipeError, ConnectionError) as error:
            raise EngineError(f"{self.settings.name} died; its log: {self.log}") from error

    def receive(self) -> Any:
        """One message; raises when the engine has died."""
        message = self._receive()
        if message[0] == "died":
            raise EngineError(f"{self.settings.name} died; its log: {self.log}\n{message[1]}")
        return message

    def stop(self) -> None:
        """End the engine, by force if it does not end itself."""
        with contextlib.suppress(EngineError):
            self.send("stop")
        self.process.join(STOP_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """End the engine as a crash would."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def signal(self, number: int) -> None:
        """Send the engine's process a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def again(self) -> EngineProcess:
        """Start an engine like this one, at the same address, with a log of its own."""
        return EngineProcess(self.settings, self.log.parent, self._model, life=self.life + 1)


@dataclass(frozen=True)
class Mode:
    """How a request is served: by which connector, and with the legs at once or in sequence."""

    name: str
    connector: ConnectorSettings | None
    legs: str  # together, sequence, decode
    prompt_tokens: int | None = None


@dataclass
class Timeline:
    """One request's times (seconds of the monotonic clock) and ends."""

    request: str
    prompt_tokens: int
    max_tokens: int
    arrival: float
    legs: str
    prefill_end: float = 0.0
    tokens: list[float] = field(default_factory=list)
    prefill_reason: str = ""
    decode_reason: str = ""

    @property
    def done(self) -> bool:
        """Whether all its legs have ended."""
        return bool(self.decode_reason) and (self.legs == "decode" or bool(self.prefill_reason))

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.tokens[0] - self.arrival

    @property
    def handoff_s(self) -> float:
        """From the end of the prefill leg to the first token of the decode leg."""
        return self.tokens[0] - self.prefill_end

    @property
    def tpot_s(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between tokens."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


class Pair:
    """A prefill and a decode engine; without a prefill engine where the mode needs none."""

    def __init__(self, mode: Mode, prefill: EngineProcess | None, decode: EngineProcess) -> None:
        self.mode = mode
        self.prefill = prefill
        self.decode = decode
        self.live: dict[str, Timeline] = {}
        self._down: set[str] = set()  # names of engines that were killed
        self._prompts: dict[str, tuple[list[int], int]] = {}
        self._reports: dict[str, Any] = {}

    @classmethod
    def start(
        cls,
        mode: Mode,
        logs: Path,
        *,
        model: ModelSettings | None = None,
        base: dict[str, Any] | None = None,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
    ) -> Pair:
        """Start the engines and wait until both step."""
        logs.mkdir(parents=True, exist_ok=True)
        model = model or ModelSettings()
        folder = write_config(model, logs / "model")
        base = {"model": model, "connector": mode.connector} | (base or {})
        wanted = []
        if mode.legs != "decode":
            wanted.append(("prefill", "kv_producer", prefill))
        wanted.append(("decode", "kv_consumer", decode))
        engines: list[EngineProcess] = []
        try:
            for name, role, more in wanted:
                fields = base | (more or {})
                settings = EngineSettings(
                    f"{mode.name}-{name}", role=role, side_port=free_port(), **fields
                )
                engines.append(EngineProcess(settings, logs, folder))
            for engine in engines:
                engine.wait_ready()
        except BaseException:
            for engine in engines:
                engine.kill()
            raise
        return cls(mode, engines[0] if len(engines) > 1 else None, engines[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def engines(self) -> list[EngineProcess]:
        return [engine for engine in (self.prefill, self.decode) if engine is not None]

    @property
    def up(self) -> list[EngineProcess]:
        """The engines that were not killed."""
        return [engine for engine in self.engines if engine.settings.name not in self._down]

    def stop(self) -> None:
        """Stop both engines."""
        for engine in self.up:
            engine.stop()

    # --- crashes -------------------------------------------------------------------------------

    def kill(self, engine: EngineProcess) -> None:
        """Kill an engine. Its legs end as "lost", and so do those sent to it before restart()."""
        engine.kill()
        self._down.add(engine.settings.name)
        for timeline in self.live.values():
            self._lose_leg(engine, timeline)

    def terminate(self, engine: EngineProcess, limit_s: float) -> int | None:
        """Have an engine end by itself, as SIGTERM does; returns its exit status.

        Its legs end as "lost". A stopped one goes on for it. None: it did not end in time.
        """
        engine.signal(signal.SIGTERM)
        engine.signal(signal.SIGCONT)
        self._down.add(engine.settings.name)
        for timeline in self.live.values():
            self._lose_leg(engine, timeline)
        until = time.monotonic() + limit_s
        while engine.process.is_alive() and time.monotonic() < until:
            self.pump(0.05)
        code: int | None = engine.process.exitcode
        engine.kill()
        return code

    def restart(self, engine: EngineProcess) -> list[Timeline]:
        """Start a killed engine again, at its address; returns requests that ended meanwhile."""
        fresh = engine.again()
        ended: list[Timeline] = []
        until = time.monotonic() + START_LIMIT_S
        while not fresh.connection.poll() and time.monotonic() < until:
            ended += self.pump(0.05)
        fresh.wait_ready(0)
        if engine is self.prefill:
            self.prefill = fresh
        else:
            self.decode = fresh
        self._down.remove(engine.settings.name)
        return ended

    def _lose_leg(self, engine: EngineProcess, timeline: Timeline) -> None:
        if engine is self.decode:
            timeline.decode_reason = timeline.decode_reason or "lost"
        elif timeline.legs != "decode":
            timeline.prefill_reason = timeline.prefill_reason or "lost"

    def _send(self, engine: EngineProcess, timeline: Timeline, *command: Any) -> None:
        if engine.settings.name in self._down:
            self._lose_leg(engine, timeline)
        else:
            engine.send(*command)

    # --- requests ------------------------------------------------------------------------------

    def submit(
        self,
        request: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        transfer_id: str | None = None,
        local: bool = False,
    ) -> Timeline:
        """Send a request; `local` has the decode engine compute its prompt itself."""
        legs = "decode" if local else self.mode.legs
        timeline = Timeline(request, len(prompt), max_tokens, time.perf_counter(), legs)
        self.live[request] = timeline
        tokens = list(prompt)
        shared = transfer_id or request
        if legs == "decode":
            self._send(self.decode, timeline, "add", request, tokens, max_tokens, None)
            return timeline
        assert self.prefill is not None
        params = self._prefill_params(shared)
        self._send(self.prefill, timeline, "add", request, tokens, 1, params)
        if legs == "together":
            params = self._decode_params(shared)
            self._send(self.decode, timeline, "add", request, tokens, max_tokens, params)
        else:
            self._prompts[request] = (tokens, max_tokens)
        return timeline

    def _prefill_params(self, transfer_id: str) -> dict[str, Any]:
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if self._ours:
            params["transfer_id"] = transfer_id
        return params

    def _decode_params(self, transfer_id: str) -> dict[str, Any]:
        assert self.prefill is not None
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": HOST,
            "remote_port": self.prefill.settings.side_port,
        }
        if self._ours:
            return params | {"transfer_id": transfer_id}
        return params | {
            "remote_engine_id": self.prefill.facts["engine_id"],
            "remote_request_id": transfer_id,
            "remote_block_ids": [],
            "tp_size": 1,
            "pp_size": 1,
        }

    @property
    def _ours(self) -> bool:
        return self.mode.connector is not None and self.mode.connector.module_path == "kvpush.vllm"

    def abort(self, request: str, *, prefill: bool = False, decode: bool = False) -> None:
        """Abort legs of a request. vLLM says nothing of an aborted leg, so it counts as ended."""
        timeline = self.live.get(request)
        if timeline is None:
            return
        if prefill and self.prefill is not None and not timeline.prefill_reason:
            self._send(self.prefill, timeline, "abort", request)
            timeline.prefill_reason = "abort"
        if decode and not timeline.decode_reason:
            self._send(self.decode, timeline, "abort", request)
            timeline.decode_reason = "abort"

    # --- events --------------------------------------------------------------------------------

    def pump(self, timeout_s: float) -> list[Timeline]:
        """Take what the engines have said within the time; returns requests that have ended."""
        connections: dict[Connection, EngineProcess] = {
            engine.connection: engine for engine in self.up
        }
        for ready in wait(list(connections), max(0.0, timeout_s)):
            engine = connections[ready]  # type: ignore[index]
            while engine.connection.poll():
                self._take(engine, engine.receive())
        ended = [timeline for timeline in self.live.values() if timeline.done]
        for timeline in ended:
            del self.live[timeline.request]
        return ended

    def _take(self, engine: EngineProcess, message: Any) -> None:
        if message[0] == "report":
            self._reports[engine.settings.name] = message[1]
            return
        _, now, events = message
        for request, fresh, reason, params in events:
            timeline = self.live.get(request)
            if timeline is None:
                continue
            if engine is self.prefill:
                self._take_prefill(timeline, now, reason, params)
            else:
                timeline.tokens.extend([now] * fresh)
                timeline.decode_reason = timeline.decode_reason or reason

    def _take_prefill(self, timeline: Timeline, now: float, reason: str, params: Any) -> None:
        if not reason or timeline.prefill_reason:
            return
        timeline.prefill_end, timeline.prefill_reason = now, reason
        if timeline.legs == "sequence":
            tokens, max_tokens = self._prompts.pop(timeline.request)
            self.decode.send("add", timeline.request, tokens, max_tokens, params)

    def drain(self, limit_s: float) -> list[Timeline]:
        """Wait until every request has ended."""
        ended: list[Timeline] = []
        deadline = time.monotonic() + limit_s
        while self.live:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(f"{len(self.live)} requests did not end: {list(self.live)[:5]}")
            ended += self.pump(min(left, 1.0))
        return ended

    # --- what engines say of themselves ---------------------------------------------------------

    def reset(self) -> None:
        """Have the engines forget what they measured."""
        for engine in self.up:
            engine.send("reset")

    def report(self) -> dict[str, dict[str, Any]]:
        """The figures of each engine that is up, by "prefill" and "decode"."""
        self._reports.clear()
        for engine in self.up:
            engine.send("report")
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while len(self._reports) < len(self.up):
            if time.monotonic() > deadline:
                raise EngineError("an engine gave no report")
            self.pump(0.1)
        sides = {"decode": self.decode, "prefill": self.prefill}
        return {
            side: self._reports[engine.settings.name]
            for side, engine in sides.items()
            if engine is not None and engine.settings.name in self._reports
        }
