"""One rank with its KV in GPU memory, in a process of its own, led by the test."""

from __future__ import annotations

import os
import secrets
import time
from multiprocessing.connection import Connection
from typing import Any

from kvpush import _core
from kvpush._nixl import find_library, prepare_environment
from kvpush.selftest.child import serve
from kvpush.vllm.device_events import CudaEvents

LIMIT_S = 60.0
LAYERS, BLOCKS, TOKENS, ELEMENT_BYTES = 2, 64, 16, 256
FINGERPRINT = b"fingerprint 0001"


class DeviceHost:
    """Lives in the child; every public method is a command of the test."""

    def open(self) -> bytes:
        """Make the memory and an engine over it."""
        import torch

        prepare_environment()
        self._torch = torch
        shape = (LAYERS, BLOCKS, 2, TOKENS, ELEMENT_BYTES)
        self._memory = torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda:0")
        self._events = CudaEvents(torch.cuda.Event)
        torch.cuda.synchronize()
        session = secrets.randbits(63) | 1
        self._engine = _core.Engine(
            _core.EngineConfig(
                agent_name=f"gpu-{os.getpid()}",
                session=session,
                engine_id=f"gpu-{os.getpid()}",
                nixl_library=str(find_library()),
                push_granularity_tokens=TOKENS,
            )
        )
        base, size = self._memory.data_ptr(), self._memory.numel()
        self._engine.start(self._regions(), [(base, size, "device", 0)])
        self._seen: list[Any] = []
        return self._engine.peer_info()

    def _regions(self) -> list[_core.Region]:
        layer_bytes, block_bytes, component_bytes, token_bytes, _ = self._memory.stride()
        return [
            _core.Region(
                layer=f"layer.{layer}",
                dtype="uint8",
                base=self._memory.data_ptr() + layer * layer_bytes,
                block_stride=block_bytes,
                num_blocks=BLOCKS,
                memory="device",
                tokens_per_block=TOKENS,
                tokens_per_page=TOKENS,
                page_stride=block_bytes,
                token_stride=token_bytes,
                components=2,
                component_stride=component_bytes,
                heads=1,
                total_heads=1,
                head_stride=ELEMENT_BYTES,
                element_bytes=ELEMENT_BYTES,
            )
            for layer in range(LAYERS)
        ]

    def connect(self, producer: bytes) -> list[int]:
        own = self._engine.peer_info()
        return list(self._engine.connect([producer], [own], 0, LIMIT_S))

    def grant(self, sessions: list[int], ids: list[int], tokens: int) -> None:
        self._engine.grant(1, "r", FINGERPRINT, 77, sessions, (0, tokens), [(0, ids)], LIMIT_S)

    def compute(
        self, ids: list[int], value: int, watermark: int, *, final: bool, cycles: int
    ) -> int:
        """Queue a step that takes a while, then offer what it will have computed."""
        torch = self._torch
        torch.cuda._sleep(cycles)
        for block in ids:
            self._memory[:, block] = value
        event = self._events.record(self._engine.fences_passed())
        assert event
        first = watermark // TOKENS - len(ids)
        offer = (1, "r", FINGERPRINT, [(first, ids)], watermark, final)
        fence = int(self._engine.offer_all([offer], event))
        self._events.lent(fence)
        return fence

    def wait(self) -> str:
        """How the one grant or offer has ended."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for event in self._engine.poll():
                if event.ticket == 1:
                    return f"{event.kind} {event.reason} {event.detail}".strip()
            time.sleep(0.001)
        raise TimeoutError(str(self._engine.counters()))

    def wait_bytes_written(self, least: int) -> int:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            written = int(self._engine.counters()["bytes_written"])
            if written >= least:
                return written
            time.sleep(0.001)
        raise TimeoutError(str(self._engine.counters()))

    def fences_passed(self) -> int:
        return int(self._engine.fences_passed())

    def values(self, ids: list[int]) -> list[list[int]]:
        """The different bytes in each block."""
        self._torch.cuda.synchronize()
        return [self._memory[:, block].unique().tolist() for block in ids]

    def close(self) -> None:
        self._engine.shutdown(5.0)


def main(connection: Connection) -> None:
    """Entry point of the child."""
    serve(connection, DeviceHost())
