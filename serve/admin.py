"""The server's admin routes, for whoever holds its key: there only when `serve/run.py --admin` asks for them.

    POST /admin/drafter {"ckpt": FOLDER}     loads another checkpoint of the same target, in any known format;
                                             requests go on
    GET  /admin/drafter                      which checkpoint drafts now

Sent as `Authorization: Bearer KEY`.  An ASGI middleware, which is vLLM's formal hook for routes of one's own.
"""

import asyncio
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from recipes.errors import UserError
from serve.adopt import Adopted, adopt

KEY_VARIABLE = "DRAFTSMITH_ADMIN_KEY"
SHORTEST_KEY = 16
PREFIX = "/admin/"

App = Callable[[Any, Any, Any], Awaitable[None]]


def require_admin_key() -> None:
    """Raises UserError unless the environment has a key; never says what it is."""
    length = len(os.environ.get(KEY_VARIABLE, ""))
    if length < SHORTEST_KEY:
        raise UserError(
            f"--admin needs a key of at least {SHORTEST_KEY} characters in the environment's {KEY_VARIABLE},"
            f" found {length or 'none'}"
        )


class AdminRoutes:
    """vLLM imports it by name (`--middleware`) and hands it the app."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ[KEY_VARIABLE].encode()
        self._turn = asyncio.Lock()
        self._ckpt: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> JSONResponse:
        if not self._has_key(request):
            return _error(401, "this route needs the server's admin key")
        if request.url.path != f"{PREFIX}drafter":
            return _error(404, f"no such route: {request.url.path}")
        if request.method == "GET":
            return JSONResponse({"ckpt": self._ckpt or _first_ckpt(request)})
        if request.method != "POST":
            return _error(405, "GET or POST")
        return await self._load(request)

    async def _load(self, request: Request) -> JSONResponse:
        try:
            ckpt = Path(json.loads(await request.body())["ckpt"]).resolve()
        except (ValueError, KeyError, TypeError):
            return _error(400, 'the body has to be {"ckpt": FOLDER}')
        try:
            adopted = await asyncio.to_thread(adopt, ckpt)
        except UserError as misfit:
            return _error(409, str(misfit))
        return await self._swap(request.app.state.engine_client, adopted)

    def _has_key(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme == "Bearer" and hmac.compare_digest(given.encode(), self._key)

    async def _swap(self, engine: Any, adopted: Adopted) -> JSONResponse:
        ckpt = str(adopted.ckpt)
        async with self._turn:
            start = time.monotonic()
            answers = await engine.collective_rpc("swap_drafter", args=(ckpt,))
            refusals = [said["refused"] for said in answers if "refused" in said]
            if refusals:
                return _error(409, refusals[0])
            # what the old drafter left in the caches; running requests begin anew, with what they have
            await engine.reset_prefix_cache(reset_running_requests=True)
            self._ckpt = ckpt
            converted = {"format": adopted.format, "notes": list(adopted.notes)} if adopted.format else {}
            return JSONResponse({"ckpt": ckpt, "seconds": time.monotonic() - start} | converted)


def _first_ckpt(request: Request) -> str:
    return request.app.state.vllm_config.speculative_config.model


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)
