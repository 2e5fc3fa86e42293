"""/admin/sleep and /admin/wake: the engine leaves the GPU to others for a while, and comes back.

vLLM's sleep of level 1: weights move to the host's memory, the KV cache is dropped.  Requests under way are
finished first (its pause mode "wait"; "abort" would cut them off, and "keep" would have them computed anew);
those that come later wait, unanswered, until the engine wakes.  Called by `serve/admin.py`.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from recipes.errors import UserError
from serve.engine import is_cuda

LEVEL, PAUSE = 1, "wait"


@dataclass
class Rest:
    """Whether the engine sleeps, and whose turn it is to change the engine."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_asleep: bool = False
    """The GPU's memory is free; not yet while requests are finished."""

    def require_awake(self) -> None:
        """Raises UserError while the weights are elsewhere."""
        if self.is_asleep:
            raise UserError("the engine is asleep, its weights are not on the GPU: POST /admin/wake first")


class Sleep:
    form = "{}"

    def __init__(self, rest: Rest) -> None:
        self._rest = rest

    def read(self, body: Any) -> None:
        if body != {}:
            raise ValueError(body)

    async def get(self, _: Any) -> dict[str, Any]:
        return {"asleep": self._rest.is_asleep}

    async def post(self, state: Any, asked: None) -> dict[str, Any]:
        _require_gpu()
        async with self._rest.turn:
            start = time.monotonic()
            await self._change(state.engine_client)
            return await self.get(state) | {"seconds": time.monotonic() - start}

    async def _change(self, engine: Any) -> None:
        if not self._rest.is_asleep:
            await engine.sleep(LEVEL, PAUSE)
            self._rest.is_asleep = True


class Wake(Sleep):
    async def _change(self, engine: Any) -> None:
        """Also where it is awake, for vLLM: a sleep that failed leaves the scheduler paused."""
        await engine.wake_up()
        self._rest.is_asleep = False


def _require_gpu() -> None:
    if not is_cuda():
        raise UserError(
            "only an engine on a GPU sleeps: vLLM's CPU build has no sleep mode to free memory with"
        )
