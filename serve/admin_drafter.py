"""/admin/drafter: another checkpoint of the same target drafts, in any known format, while requests go on.

The workers' part is `serve/seam/swapping.py`; called by `serve/admin.py`.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from recipes.errors import UserError
from serve.admin_sleep import Rest
from serve.adopt import adopt


class Drafter:
    form = '{"ckpt": FOLDER}'

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._ckpt: str | None = None

    def read(self, body: Any) -> Path:
        return Path(body["ckpt"]).resolve()

    async def get(self, state: Any) -> dict[str, Any]:
        return {"ckpt": self._ckpt or state.vllm_config.speculative_config.model}

    async def post(self, state: Any, asked: Path) -> dict[str, Any]:
        adopted = await asyncio.to_thread(adopt, asked)
        async with self._rest.turn:
            self._rest.require_awake()
            start = time.monotonic()
            await self._swap(state.engine_client, str(adopted.ckpt))
            seconds = time.monotonic() - start
        converted = {"format": adopted.format, "notes": list(adopted.notes)} if adopted.format else {}
        return {"ckpt": str(adopted.ckpt), "seconds": seconds} | converted

    async def _swap(self, engine: Any, ckpt: str) -> None:
        answers = await engine.collective_rpc("swap_drafter", args=(ckpt,))
        refusals = [said["refused"] for said in answers if "refused" in said]
        if refusals:
            raise UserError(refusals[0])
        # what the old drafter left in the caches; running requests begin anew, with what they have
        await engine.reset_prefix_cache(reset_running_requests=True)
        self._ckpt = ckpt
