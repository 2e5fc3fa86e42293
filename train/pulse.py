"""What the engine says of a drafter at the beginning of a round: shown, drawn, and held against training.

The main rank's only; it is handed finished numbers and computes ratios.
"""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from recipes.errors import MachineError
from recipes.manifest import Captured, Pulse, RoundManifest
from recipes.schema import Recipe
from train.loop import Distilled
from train.rounds import Round

_SUFFIX = ".rounds"  # of these event files, beside the training's
_CAUSES = (
    "taps: was the drafter trained on the layers that the engine captures? (data.check_sequences compares)",
    "template: are prompts rendered in training as the engine renders them?",
    "window and layer types: does the checkpoint's config.json say what was trained? (serve/run.py --check)",
    "positions and mask id: tests/test_serve_parity.py compares trainer and engine slot by slot",
    "text seen many times: simulation is on training text, so train on more prompts in fewer passes",
)


def show_round(report: RoundManifest, which: Round, drafter: Distilled | None, recipe: Recipe) -> None:
    """One line for people, and TensorBoard's points."""
    draw_round(report, which, drafter, recipe)
    Console(soft_wrap=True, highlight=False).print(f"{which}: {describe(report)}")


def draw_round(report: RoundManifest, which: Round, drafter: Distilled | None, recipe: Recipe) -> None:
    """TensorBoard's points: the drafter's at its step, the data's at the one that the round begins with."""
    with SummaryWriter(str(recipe.output_dir / "tensorboard"), filename_suffix=_SUFFIX) as writer:
        if drafter is not None:
            num_drafts = recipe.drafter.block_size - 1
            for tag, value in drafter_points(report, drafter.simulated_acceptance, num_drafts):
                writer.add_scalar(tag, value, drafter.step)
        for tag, value in data_points(report):
            writer.add_scalar(tag, value, which.steps.start)


def is_drawn(output_dir: Path) -> bool:
    """Whether a round has points."""
    return any((output_dir / "tensorboard").glob(f"*{_SUFFIX}"))


def drafter_points(report: RoundManifest, simulated: float, num_drafts: int) -> Iterator[tuple[str, float]]:
    """Tag -> value; real acceptance at the first of eval's temperatures, as in the report."""
    for pulse in leading(report.pulses):
        yield f"accept_real/{'chain' if pulse.is_chain else 'tree'}", pulse.acceptance_length
        if pulse.is_chain:
            nowhere = [0] * (num_drafts - len(pulse.reached))
            for depth, count in enumerate([*pulse.reached, *nowhere], start=1):
                yield f"accept_real/depth_{depth}", count / pulse.steps
            yield "accept_gap", simulated - pulse.acceptance_length


def data_points(report: RoundManifest) -> Iterator[tuple[str, float]]:
    """Tag -> value."""
    if report.emitted_tokens:
        yield "data/tokens_per_step", report.tokens_per_step
        yield "data/tokens_per_second", report.tokens_per_second
        if report.occupancy is not None:
            yield "data/occupancy", report.occupancy
        yield "time/generate_s", report.engine_seconds / report.num_engines
    for what in ("start", "wake", "swap", "pulse", "sleep"):
        seconds = getattr(report, f"{what}_seconds")
        if seconds is not None:
            yield f"time/{what}_s", seconds
    if report.captured is not None:
        yield from capture_points(report.captured)


def capture_points(captured: Captured) -> Iterator[tuple[str, float]]:
    yield "capture/sequences", captured.sequences
    yield "capture/tokens", captured.tokens
    yield "capture/gib", captured.shard_bytes / 2**30
    yield "capture/dropped", sum(captured.dropped.values())
    for reason, count in captured.dropped.items():
        yield f"capture/dropped_{reason}", count
    if captured.least_cosine is not None:
        yield "capture/least_cosine", captured.least_cosine


def leading(pulses: list[Pulse]) -> list[Pulse]:
    return [pulse for pulse in pulses if pulse.temperature == pulses[0].temperature]


def describe(report: RoundManifest) -> str:
    accepted = [
        f"{'chain' if pulse.is_chain else 'trees'} {pulse.acceptance_length:.2f} (T = {pulse.temperature:g})"
        for pulse in report.pulses
    ]
    parts = [f"the engine accepts {', '.join(accepted)}"] if accepted else []
    if report.emitted_tokens:
        speed = f"{report.tokens_per_step:.2f} a step, {report.tokens_per_second:,.0f} a second"
        parts.append(f"{report.emitted_tokens} tokens at {speed}")
    return "; ".join(parts) or "its data was there"


def check_gap(report: RoundManifest, simulated: float, most: float | None) -> None:
    """Raises MachineError where the engine accepts so much less than training simulates; None: never."""
    chains = [pulse for pulse in leading(report.pulses) if pulse.is_chain]
    if most is None or not chains:
        return
    real = chains[0].acceptance_length
    if simulated - real > most:
        raise MachineError(
            f"training simulates an acceptance length of {simulated:.2f}, the engine measures {real:.2f}:"
            f" a gap above rounds.most_gap {most}; in the order in which to look:\n  " + "\n  ".join(_CAUSES)
        )
