"""/admin/capture: the tap states and token ids of requests that begin from now on, a file for each.

The files are `serve/capture.py`'s, written by the engine's runner; called by `serve/admin.py`.
"""

import asyncio
from pathlib import Path
from typing import Any

from recipes.errors import UserError

NOTHING = {"folder": None, "sequences": 0, "tokens": 0}
"""Of a server that captured nothing yet."""


class Capture:
    form = '{"folder": FOLDER}, or {"folder": null} to stop'

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def read(self, body: Any) -> Path | None:
        return None if body["folder"] is None else Path(body["folder"]).resolve()

    async def get(self, state: Any) -> dict[str, Any]:
        """Of the last capture; its folder is null once it stopped, and a fault that stopped it is "error"."""
        return await _call(state.engine_client, "capture_status")

    async def post(self, state: Any, asked: Path | None) -> dict[str, Any]:
        async with self._turn:
            if asked is None:
                return await _call(state.engine_client, "stop_capture")
            await self._start(state, asked)
            return await self.get(state)

    async def _start(self, state: Any, folder: Path) -> None:
        under_way = (await self.get(state))["folder"]
        if under_way is not None:
            raise UserError(f'capturing into {under_way} already: stop that first, with {{"folder": null}}')
        await asyncio.to_thread(_make_folder, folder)
        await _call(state.engine_client, "start_capture", str(folder), True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holds_files = any(folder.iterdir())
    except OSError as fault:
        raise UserError(f"{folder}: no such folder can be made ({fault.strerror})") from fault
    if holds_files:
        raise UserError(f"{folder} is not empty, and nothing is overwritten: name another folder")


async def _call(engine: Any, method: str, *arguments: str | bool) -> dict[str, Any]:
    """Of the workers the first captures for all; the others say None."""
    answers = await engine.collective_rpc(method, args=arguments)
    return next((said for said in answers if said is not None), NOTHING)
