"""The server's admin routes, for whoever holds its key: there only when `serve/run.py --admin` asks for them.

    POST /admin/drafter {"ckpt": FOLDER}     another checkpoint of the same target drafts (admin_drafter.py)
    POST /admin/sleep, /admin/wake           gives the GPU's memory back for a while      (admin_sleep.py)
    POST /admin/capture {"folder": FOLDER}   keeps the tap states of served requests      (admin_capture.py)
    GET  /admin/drafter, sleep, capture      what is so now

Sent as `Authorization: Bearer KEY`.  An ASGI middleware, which is vLLM's formal hook for routes of one's own.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse

from recipes.errors import UserError
from serve.admin_capture import Capture
from serve.admin_drafter import Drafter
from serve.admin_sleep import Rest, Sleep, Wake

KEY_VARIABLE = "DRAFTSMITH_ADMIN_KEY"
SHORTEST_KEY = 16
PREFIX = "/admin/"

App = Callable[[Any, Any, Any], Awaitable[None]]


class Route(Protocol):
    """What one path answers; `state` is vLLM's app.state, where its engine client is."""

    form: str
    """Of the body, for whoever got it wrong."""

    def read(self, body: Any) -> Any:
        """What is asked for.  Raises ValueError, KeyError or TypeError for a body of another form."""

    async def get(self, state: Any) -> dict[str, Any]: ...

    async def post(self, state: Any, asked: Any) -> dict[str, Any]:
        """Raises UserError for what cannot be done now."""


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
        rest = Rest()
        self._routes: Mapping[str, Route] = {
            "drafter": Drafter(rest),
            "sleep": Sleep(rest),
            "wake": Wake(rest),
            "capture": Capture(),
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> JSONResponse:
        if not self._has_key(request):
            return _error(401, "this route needs the server's admin key")
        route = self._routes.get(request.url.path.removeprefix(PREFIX))
        if route is None:
            return _error(404, f"no such route: {request.url.path}")
        if request.method == "GET":
            return JSONResponse(await route.get(request.app.state))
        if request.method == "POST":
            return await _act(route, request)
        return _error(405, "GET or POST")

    def _has_key(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme == "Bearer" and hmac.compare_digest(given.encode(), self._key)


async def _act(route: Route, request: Request) -> JSONResponse:
    try:
        asked = route.read(json.loads(await request.body() or b"{}"))
    except (ValueError, KeyError, TypeError):
        return _error(400, f"the body has to be {route.form}")
    try:
        return JSONResponse(await route.post(request.app.state, asked))
    except UserError as refusal:
        return _error(409, str(refusal))


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)
