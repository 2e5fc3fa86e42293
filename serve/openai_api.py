"""vLLM's own OpenAI server, run in this process.  The environment must be set before this is imported."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import (
    FlexibleArgumentParser,
    make_arg_parser,
    validate_parsed_serve_args,
)

from serve.admin import AdminRoutes
from serve.engine import SECTION
from serve.seam.metrics import install_metrics

_ADMIN = f"{AdminRoutes.__module__}.{AdminRoutes.__name__}"


def run_api_server(
    engine_arguments: Mapping[str, Any], host: str, port: int, *, has_admin: bool = False
) -> None:
    """Serves until SIGINT or SIGTERM.  `engine_arguments` are EngineArgs' keywords.

    has_admin: with the routes of `serve.admin`.
    """
    if "tree" in engine_arguments["additional_config"].get(SECTION, {}):
        install_metrics()
    own = {"host": host, "port": port, "middleware": [_ADMIN] if has_admin else []}
    uvloop.run(run_server(_server_arguments({**engine_arguments, **own})))


def _server_arguments(given: Mapping[str, Any]) -> Namespace:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    ours = {**given, "disable_uvicorn_access_log": True}
    unknown = ours.keys() - vars(arguments).keys()
    assert not unknown, f"vLLM's server has no arguments {sorted(unknown)}"
    vars(arguments).update(ours)
    validate_parsed_serve_args(arguments)
    return arguments
