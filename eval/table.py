"""A report as a person reads it: a table, the accepted drafts by depth as bars, and what is to be doubted."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eval.report import AtTemperature, Decoding, GreedyPart, Latency, LosslessPart, Report

Column = tuple[AtTemperature, str, Decoding]
Cell = Callable[[AtTemperature, Decoding], str]
ALARM = 1.05  # an acceptance length below this is no drafting at all
MOST_COLUMNS = 6  # of numbers, abreast in 80 characters
BAR_CELLS = 40  # of one bar, or of two side by side
_EIGHTHS = " ▏▎▍▌▋▊▉"
_BAR_STYLES = {"chain": "green", "tree": "cyan"}
_SUSPECTS = {
    "taps": "target_layer_ids name a layer's output; off by one reads its neighbour's",
    "mask id": "one mask_token_id in training, checkpoint and engine, a row that text never uses",
    "window": "sliding_window and the sliding layers' causal rule, the same in trainer and engine",
    "template": "the engine must render the prompts as the training data did",
    "runner": "a model runner that ignores the drafter's layer types; the engine's log names the runner",
}


def print_report(report: Report, console: Console) -> None:
    console.print(describe_run(report))
    for table in render_tables(report):
        console.print(table)
    console.print(render_depths(report))
    console.print()
    for line in _describe_rest(report):
        console.print(line, highlight=False)
    if report.lossless is not None:
        for verdict in describe_lossless(report.lossless):
            console.print(verdict)
    for doubt in describe_doubts(report):
        console.print(f"[yellow]note:[/] {doubt}")
    if report.chain.acceptance_length < ALARM:
        console.print(render_alarm(report))


def _describe_rest(report: Report) -> Iterator[str]:
    yield from describe_intervals(report)
    yield from describe_nodes(report)
    yield from describe_branching(report)
    yield from describe_memory(report)


def describe_run(report: Report) -> Text:
    """What was measured, on what."""
    s, engine = report.settings, report.engine
    drafter = _shorten(report.drafter.checkpoint) if report.drafter.checkpoint else "as served"
    trees = "" if s.budget is None else f", trees of {s.budget} nodes"
    where = ", ".join(filter(None, [f"vLLM {engine.vllm}", engine.runner, engine.device, engine.precision]))
    thinking = "" if s.thinking == "template" else f", thinking {s.thinking}"
    return Text.assemble(
        (f"drafter {drafter}, target {report.target.model}\n", "bold"),
        f"{s.n_prompts} prompts of {s.suite}, up to {s.max_tokens} tokens, {s.concurrency} at a time,",
        f" {s.block_size - 1} drafts a step{trees}{thinking}\n{where}",
    )


def _shorten(folder: str) -> str:
    """From the working directory on, where the folder lies in it."""
    path = Path(folder)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def render_tables(report: Report) -> Iterator[Table]:
    """Rows: what was measured; columns: the ways of decoding at each temperature, as many as fit abreast."""
    measured = report.by_temperature()
    abreast = max(1, MOST_COLUMNS // len(_ways(measured[0])))
    for start in range(0, len(measured), abreast):
        yield from _render_tables(measured[start : start + abreast])


def _render_tables(measured: list[AtTemperature]) -> Iterator[Table]:
    """What was decoded, and how long it took where that is known."""
    columns = [(at, name, decoding) for at in measured for name, decoding in _ways(at).items()]
    yield _render_rows(columns, _ROWS.items())
    if any(decoding.latency for _, _, decoding in columns):
        yield _render_rows(columns, _LATENCY_ROWS)


def _render_rows(columns: list[Column], rows: Iterable[tuple[str, Cell]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for at, name, _ in columns:
        table.add_column(_head(at, name), justify="right")
    for label, cell in rows:
        if cell is _speed_up and columns[0][0].plain is None:
            continue
        table.add_row(label, *(cell(at, decoding) for at, _, decoding in columns))
    return table


def _ways(at: AtTemperature) -> dict[str, Decoding]:
    """The ways of decoding that were measured, by name."""
    ways = {"plain": at.plain, **_ours(at), **at.baselines}
    return {name: decoding for name, decoding in ways.items() if decoding is not None}


def _ours(at: AtTemperature) -> dict[str, Decoding]:
    """Of the drafter that is measured."""
    return {"chain": at.chain} | ({} if at.tree is None else {"tree": at.tree})


def _drafting(at: AtTemperature) -> dict[str, Decoding]:
    return {name: decoding for name, decoding in _ways(at).items() if name != "plain"}


def _head(at: AtTemperature, name: str) -> str:
    return f"{name}\nT = {at.temperature:g}"


def _error(at: AtTemperature, decoding: Decoding) -> str:
    if decoding is at.plain:
        return ""  # a token a step, by definition
    return "unknown" if decoding.standard_error is None else f"±{decoding.standard_error:.2f}"


def _mean_of_means(at: AtTemperature, decoding: Decoding) -> str:
    mean = decoding.mean_of_request_means
    return "unknown" if mean is None else f"{mean:.2f}"


def _speed_up(at: AtTemperature, decoding: Decoding) -> str:
    assert at.plain is not None, "a report has plain runs at all its temperatures or at none"
    return f"{decoding.tokens_per_second / at.plain.tokens_per_second:.2f}x"


def _waited(read: Callable[[Latency], float]) -> Cell:
    """Three digits of milliseconds."""

    def cell(_: AtTemperature, decoding: Decoding) -> str:
        if decoding.latency is None:
            return "unknown"
        ms = read(decoding.latency)
        return f"{ms:.{max(0, 3 - len(str(int(ms))))}f}"

    return cell


_ROWS: dict[str, Cell] = {
    "acceptance length": lambda at, decoding: f"{decoding.acceptance_length:.2f}",
    "  standard error": _error,
    "  mean of requests": _mean_of_means,
    "tokens per second": lambda at, decoding: f"{decoding.tokens_per_second:.1f}",
    "  against plain": _speed_up,
    "verification steps": lambda at, decoding: f"{decoding.steps:,}",
    "committed tokens": lambda at, decoding: f"{decoding.committed_tokens:,}",
    "in repeated 8-grams": lambda at, decoding: f"{decoding.repeated_8gram_share:.1%}",
}
_LATENCY_ROWS: list[tuple[str, Cell]] = [
    ("ms a step", _waited(lambda latency: latency.step_ms)),
    ("ms a token, p50", _waited(lambda latency: latency.per_token.p50)),
    ("  p99", _waited(lambda latency: latency.per_token.p99)),
    ("ms between chunks, p50", _waited(lambda latency: latency.between_chunks.p50)),
    ("  p99", _waited(lambda latency: latency.between_chunks.p99)),
    ("ms to first token, p50", _waited(lambda latency: latency.first_token.p50)),
    ("  p99", _waited(lambda latency: latency.first_token.p99)),
]
"""The words are those of `eval/latency.py`."""


def render_depths(report: Report) -> Table:
    """Bars at the report's own temperature, the tree's beside the chain's; the others as numbers."""
    own, *others = report.by_temperature()
    barred = _ours(own)
    numbered = [(at, name, decoding) for at in others for name, decoding in _ours(at).items()]
    cells = BAR_CELLS // len(barred)
    title = "share of steps that accept at least k drafts"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("k", justify="right")
    for name in barred:
        table.add_column(_head(own, name), width=cells, style=_BAR_STYLES[name])
        table.add_column(justify="right")
    for at, name, _ in numbered:
        table.add_column(_head(at, name), justify="right")
    for index in range(len(own.chain.accepted_by_depth)):
        bars = _bar_cells([decoding.accepted_by_depth[index] for decoding in barred.values()], cells)
        shares = (f"{decoding.accepted_by_depth[index]:.1%}" for _, _, decoding in numbered)
        table.add_row(str(index + 1), *bars, *shares)
    return table


def _bar_cells(shares: list[float], cells: int) -> Iterator[str]:
    for share in shares:
        yield draw_bar(share, cells)
        yield f"{share:.1%}"


def draw_bar(share: float, cells: int = BAR_CELLS) -> str:
    """A bar of `share` of `cells` character cells, to an eighth of a cell."""
    whole, eighths = divmod(round(share * cells * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()


def describe_intervals(report: Report) -> Iterator[str]:
    """How far the acceptance lengths are known; nothing for older reports."""
    known = [
        f"{name} {decoding.interval[0]:.2f} to {decoding.interval[1]:.2f} at T = {at.temperature:g}"
        for at in report.by_temperature()
        for name, decoding in _drafting(at).items()
        if decoding.interval
    ]
    if known:
        yield f"acceptance length with 95 %, by a bootstrap over prompts: {', '.join(known)}"


def describe_memory(report: Report) -> Iterator[str]:
    if report.gpu_gib:
        taken = ", ".join(f"{name} {gib:.1f}" for name, gib in report.gpu_gib.items())
        yield f"GiB that each engine took of the GPUs, its cache included: {taken}"


def describe_nodes(report: Report) -> Iterator[str]:
    """How large the trees were that the engine verified; nothing where there were none."""
    trees = {at.temperature: at.tree.nodes_per_step for at in report.by_temperature() if at.tree}
    if trees:
        sizes = ", ".join(f"{nodes:.1f} at T = {temperature:g}" for temperature, nodes in trees.items())
        yield f"nodes that a tree's step verified, of {report.settings.budget}: {sizes}"


def describe_branching(report: Report) -> Iterator[str]:
    """What the trees held where the chain failed."""
    found = report.branching
    if found is None or not found.failed:
        return
    deep = "" if found.depth_after is None else f" and go on {found.depth_after:.2f} deep"
    yield (
        f"where the greedy chain fails, {found.failed} of the {found.shared_steps} steps at T = 0 that both"
        f" began, trees hold the target's token in {found.held / found.failed:.1%}{deep};"
        f" their spine is too short in {found.short / found.failed:.1%}"
    )


def describe_lossless(lossless: LosslessPart) -> Iterator[Text]:
    """A verdict on the chain, and one on the tree."""
    for name, part in {"chain": lossless, "tree": lossless.tree}.items():
        if part is not None:
            yield _describe_greedy(name, part, lossless)


def _describe_greedy(name: str, part: GreedyPart, lossless: LosslessPart) -> Text:
    same = lossless.n_prompts - part.n_diverging
    verdict = "lossless" if part.has_only_near_ties else "NOT LOSSLESS"
    line = f"{name} {verdict} at T = 0: {same} of {lossless.n_prompts} responses equal plain decoding's"
    if part.n_diverging:
        line += f"; of {part.n_diverging} that differ, {part.n_near_ties} part at a near-tie"
        line += f" (at most {lossless.near_tie_nats:g} nats; gaps: {_gaps(part)})"
    return Text(line, style="green" if part.has_only_near_ties else "bold red")


def _gaps(part: GreedyPart) -> str:
    gaps = [each.gap for each in part.divergences]
    return ", ".join(f"{gap:.3f}" if isinstance(gap, float) else gap for gap in gaps)


def describe_doubts(report: Report) -> Iterator[str]:
    """What keeps a number from meaning quite what it says."""
    drafting = {
        f"{name} at T = {at.temperature:g}": decoding
        for at in report.by_temperature()
        for name, decoding in _drafting(at).items()
    }
    merged = [where for where, decoding in drafting.items() if decoding.coalesced]
    if merged:
        yield (
            f"{', '.join(merged)}: the server merged the chunks of several steps; steps and depths are"
            " the engine's own counters, which do not cut the last step at the response's end"
        )
    for where, decoding in drafting.items():
        if decoding.undrafted_steps:
            yield f"{where}: {decoding.undrafted_steps} steps had no draft to verify"
    if report.engine.device == "cpu":
        yield "speed on a CPU, where Triton's kernels are interpreted, says nothing about a GPU"


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
