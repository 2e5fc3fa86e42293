"""The evaluation server: vLLM's OpenAI API for a target, drafted for by a checkpoint.

    python serve/run.py --ckpt CKPT [--recipe R | --target MODEL] [--budget N|chain|auto] [--reserve-chain N]
        [--stock] [--check]

Only reads aloud; vllm is imported once the environment is right.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from recipes.errors import UserError, run_command
from serve.admin import require_admin_key
from serve.engine import (
    CHAIN,
    PLAIN_BUDGET,
    SECTION,
    Budget,
    child_environment,
    engine_arguments,
    make_stock,
    read_budget,
)
from serve.heap import modules_stay
from serve.lifetime import follow_parent
from serve.plan import Plan, Request, make_plan
from serve.ports import require_free_port
from serve.served import describe_served
from serve.show import show_plan, show_verdict

if __name__ == "__mp_main__":  # an engine process, which multiprocessing spawned from this file
    follow_parent(os.getppid())
    with modules_stay():
        from vllm import LLM  # noqa: F401 - what an engine process imports anyway, a little later


def main(  # noqa: PLR0913, PLR0917 - one per option
    ckpt: Annotated[Path | None, typer.Option(help="The drafter's checkpoint folder.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Target and engine settings of this recipe.")] = None,
    target: Annotated[str | None, typer.Option(help="The target: a folder or a hub name.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Nodes of a draft tree (default: 15); 0: plain decoding; chain: vLLM's own chain;"
            " auto: in each step as many as are worth their cost."
        ),
    ] = None,
    reserve_chain: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Nodes of the greedy chain that each tree begins with (default: the recipe's); not with"
            " --budget auto.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8000,
    stock: Annotated[bool, typer.Option("--stock", help="Nothing of ours in the engine.")] = False,
    admin: Annotated[
        bool,
        typer.Option(
            "--admin", help="Routes that change the running server; needs a key in the environment."
        ),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Only verify that the checkpoint fits.")] = False,
    settings: Annotated[Path | None, typer.Option(hidden=True)] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a target with its drafter, or check that the two fit."""
    if parent is not None:
        follow_parent(parent)
    if not check:
        require_free_port(host, port)
    if stock and admin:
        raise UserError("--stock leaves out what --admin needs: give one of them")
    nodes, adapts = _read_budget(budget, stock)
    plan = make_plan(Request(ckpt, recipe, target, settings, nodes, adapts, reserve_chain))
    if check:
        show_verdict(plan)
        return
    swappable = _swappable(plan) if admin else None
    arguments = engine_arguments(
        plan.target, plan.serve, plan.ckpt, plan.budget, swappable, adapts=adapts, sleeps=admin
    )
    if plan.baseline:
        arguments["speculative_config"] = plan.baseline.speculative
    environment = child_environment()
    if stock:
        make_stock(arguments, environment)
    show_plan(plan, host, port, has_admin=admin)
    _set_environment(environment)
    if admin:
        _add_capture(arguments, plan)
    # only now: vllm reads the environment when it is imported
    with modules_stay():
        from serve.openai_api import run_api_server  # noqa: PLC0415

    run_api_server(arguments, host, port, has_admin=admin)


def _swappable(plan: Plan) -> Mapping[str, Any]:
    require_admin_key()
    if plan.ckpt is None or plan.budget == PLAIN_BUDGET:
        raise UserError("--admin swaps drafters: give it --ckpt, and no --budget 0")
    return describe_served(plan.ckpt, plan.target, plan.fingerprint).options()


def _add_capture(arguments: Mapping[str, Any], plan: Plan) -> None:
    """The engine can capture what its drafter sees."""
    from serve.capture import capture_options  # noqa: PLC0415 - torch reads the environment as well

    assert plan.drafter is not None  # or nothing would be swappable
    arguments["additional_config"][SECTION] |= capture_options(plan.drafter.target_layer_ids)[SECTION]


def _read_budget(text: str | None, stock: bool) -> Budget:
    if stock and text not in {None, str(PLAIN_BUDGET), CHAIN}:
        raise UserError("--stock has no trees: give --budget or --stock")
    return read_budget(CHAIN if stock and text is None else text)


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
