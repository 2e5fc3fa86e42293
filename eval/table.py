"""A report as a person reads it: a table, the accepted drafts by depth as bars, and what is to be doubted."""

from collections.abc import Callable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eval.report import AtTemperature, Decoding, LosslessPart, Report

ALARM = 1.05  # an acceptance length below this is no drafting at all
BAR_CELLS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SUSPECTS = {
    "taps": "target_layer_ids name a layer's output; off by one reads its neighbour's",
    "mask id": "one mask_token_id in training, checkpoint and engine, a row that text never uses",
    "window": "sliding_window and the sliding layers' causal rule, the same in trainer and engine",
    "template": "the engine must render the prompts as the training data did",
    "runner": "a model runner that ignores the drafter's layer types; the engine's log names the runner",
}


def print_report(report: Report, console: Console) -> None:
    console.print(describe_run(report))
    console.print(render_table(report))
    console.print(render_depths(report))
    console.print()
    if report.lossless is not None:
        console.print(describe_lossless(report.lossless))
    for doubt in describe_doubts(report):
        console.print(f"[yellow]note:[/] {doubt}")
    if report.chain.acceptance_length < ALARM:
        console.print(render_alarm(report))


def describe_run(report: Report) -> Text:
    """What was measured, on what."""
    s, engine = report.settings, report.engine
    drafter = _shorten(report.drafter.checkpoint) if report.drafter.checkpoint else "as served"
    where = ", ".join(filter(None, [f"vLLM {engine.vllm}", engine.runner, engine.device, engine.precision]))
    return Text.assemble(
        (f"drafter {drafter}, target {report.target.model}\n", "bold"),
        f"{s.n_prompts} prompts of {s.suite}, up to {s.max_tokens} tokens, {s.concurrency} at a time,",
        f" {s.block_size - 1} drafts a step\n{where}",
    )


def _shorten(folder: str) -> str:
    """From the working directory on, where the folder lies in it."""
    path = Path(folder)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def render_table(report: Report) -> Table:
    """Rows: what was measured; columns: plain and chain at each temperature."""
    measured = report.by_temperature()
    columns = [(at, decoding) for at in measured for decoding in (at.plain, at.chain) if decoding is not None]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for at, decoding in columns:
        name = "plain" if decoding is at.plain else "chain"
        table.add_column(f"{name}\nT = {at.temperature:g}", justify="right")
    for label, cell in _ROWS.items():
        if cell is _speed_up and report.plain is None:
            continue
        table.add_row(label, *(cell(at, decoding) for at, decoding in columns))
    return table


def _length(at: AtTemperature, decoding: Decoding) -> str:
    if not decoding.standard_error:
        return f"{decoding.acceptance_length:.2f}"
    return f"{decoding.acceptance_length:.2f} ±{decoding.standard_error:.2f}"


def _mean_of_means(at: AtTemperature, decoding: Decoding) -> str:
    mean = decoding.mean_of_request_means
    return "unknown" if mean is None else f"{mean:.2f}"


def _speed_up(at: AtTemperature, decoding: Decoding) -> str:
    assert at.plain is not None, "a report has plain runs at all its temperatures or at none"
    return f"{decoding.tokens_per_second / at.plain.tokens_per_second:.2f}x"


_ROWS: dict[str, Callable[[AtTemperature, Decoding], str]] = {
    "acceptance length": _length,
    "  mean of requests": _mean_of_means,
    "tokens per second": lambda at, decoding: f"{decoding.tokens_per_second:.1f}",
    "  against plain": _speed_up,
    "verification steps": lambda at, decoding: f"{decoding.steps:,}",
    "committed tokens": lambda at, decoding: f"{decoding.committed_tokens:,}",
    "in repeated 8-grams": lambda at, decoding: f"{decoding.repeated_8gram_share:.1%}",
}


def render_depths(report: Report) -> Table:
    """A bar per depth for the report's own temperature, whose column comes first; the others as numbers."""
    measured = report.by_temperature()
    table = Table(box=None, padding=(0, 1))
    table.add_column("k drafts", justify="right")
    table.add_column("share of steps that accept at least k", width=BAR_CELLS)
    for at in measured:
        table.add_column(f"T = {at.temperature:g}", justify="right")
    for k, share in enumerate(report.chain.accepted_by_depth, start=1):
        shares = [at.chain.accepted_by_depth[k - 1] for at in measured]
        table.add_row(str(k), Text(draw_bar(share), style="green"), *(f"{each:.1%}" for each in shares))
    return table


def draw_bar(share: float, cells: int = BAR_CELLS) -> str:
    """A bar of `share` of `cells` character cells, to an eighth of a cell."""
    whole, eighths = divmod(round(share * cells * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()


def describe_lossless(lossless: LosslessPart) -> Text:
    same = lossless.n_prompts - lossless.n_diverging
    verdict = "lossless" if lossless.lossless else "NOT LOSSLESS"
    line = f"{verdict} at T = 0: {same} of {lossless.n_prompts} responses equal plain decoding's"
    if lossless.n_diverging:
        line += f"; of {lossless.n_diverging} that differ, {lossless.n_near_ties} part at a near-tie"
        line += f" (at most {lossless.near_tie_nats:g} nats; gaps: {_gaps(lossless)})"
    return Text(line, style="green" if lossless.lossless else "bold red")


def _gaps(lossless: LosslessPart) -> str:
    gaps = [each.gap for each in lossless.divergences]
    return ", ".join(f"{gap:.3f}" if isinstance(gap, float) else gap for gap in gaps)


def describe_doubts(report: Report) -> list[str]:
    """What keeps a number from meaning quite what it says."""
    doubts = []
    for at in report.by_temperature():
        if at.chain.coalesced:
            doubts.append(
                f"T = {at.temperature:g}: the server merged the chunks of several steps; steps and depths are"
                " the engine's own counters, which do not cut the last step at the response's end"
            )
        if at.chain.undrafted_steps:
            doubts.append(f"T = {at.temperature:g}: {at.chain.undrafted_steps} steps had no draft to verify")
    if report.engine.device == "cpu":
        doubts.append("speed on a CPU, where Triton's kernels are interpreted, says nothing about a GPU")
    return doubts


def render_alarm(report: Report) -> Panel:
    headline = Text(
        f"{report.chain.acceptance_length:.3f} tokens a step, where 1 is no drafting at all."
        " A drafter that trained well and is accepted nowhere is fed wrongly; look at\n"
    )
    suspects = Table(box=None, show_header=False, padding=(0, 1))
    for name, what in _SUSPECTS.items():
        suspects.add_row(Text(name, style="bold"), what)
    title = f"acceptance length below {ALARM:g}"
    return Panel(Group(headline, suspects), title=title, border_style="bold red")
