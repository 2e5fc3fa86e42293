"""The learning rate as a function of the step: linear warm-up, then cosine, constant or stable and decay.

Stable and decay (WSD, arXiv 2404.06395): the peak is held until the last `decay_share` of the steps, so that
a run stopped before them goes on under more steps as if these had been asked for.  Over them the rate falls
by the square root of the way gone: Haegele et al. (arXiv 2405.18392) find that better than a straight line,
and a fifth of the steps enough to reach what a cosine over all of them does.
"""

import math

from recipes.schema import Optimizer


def learning_rate_at(step: int, steps: int, optimizer: Optimizer) -> float:
    """The rate of optimizer step `step` (0-based) of `steps`."""
    warmup_steps = round(steps * optimizer.warmup_share)
    peak = optimizer.learning_rate
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if optimizer.schedule == "constant":
        return peak
    floor = peak * optimizer.final_learning_rate_share
    return floor + (peak - floor) * _height(step, steps, warmup_steps, optimizer)


def _height(step: int, steps: int, warmup_steps: int, optimizer: Optimizer) -> float:
    """1 at the peak, 0 where the schedule ends: at the step after the last."""
    if optimizer.schedule == "cosine":
        progress = (step - warmup_steps) / max(1, steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))
    decay_steps = max(1, round(steps * optimizer.decay_share))
    progress = max(0, step - (steps - decay_steps)) / decay_steps
    return 1 - math.sqrt(progress)
