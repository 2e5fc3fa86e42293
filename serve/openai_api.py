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

from serve.engine import SECTION
from serve.seam.metrics import install_metrics


def run_api_server(engine_arguments: Mapping[str, Any], host: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM.  `engine_arguments` are EngineArgs' keywords."""
    if "tree" in engine_arguments["additional_config"].get(SECTION, {}):
        install_metrics()
    uvloop.run(run_server(_server_arguments(engine_arguments, host, port)))


def _server_arguments(engine_arguments: Mapping[str, Any], host: str, port: int) -> Namespace:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    ours = {**engine_arguments, "host": host, "port": port, "disable_uvicorn_access_log": True}
    unknown = ours.keys() - vars(arguments).keys()
    assert not unknown, f"vLLM's server has no arguments {sorted(unknown)}"
    vars(arguments).update(ours)
    validate_parsed_serve_args(arguments)
    return arguments
