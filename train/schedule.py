"""The learning rate as a function of the step: linear warm-up, then cosine or constant."""

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
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    floor = peak * optimizer.final_learning_rate_share
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
