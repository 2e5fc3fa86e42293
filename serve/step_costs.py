"""What an engine's steps cost, as a file: two curves of sizes and milliseconds.

    {"draft": [[requests, ms], ...], "verify": [[rows, ms], ...]}

Sizes ascend; between two of them a step costs what the larger does, since CUDA graphs are padded to it.
"""

import json
import os
from pathlib import Path

from recipes.errors import UserError

Curve = list[tuple[int, float]]
Costs = dict[str, Curve]
NAMES = ("draft", "verify")
"""Of the drafter, by requests of a step; of the target, by its rows."""


def read_costs(path: Path) -> Costs:
    """Raises UserError for a file that holds something else."""
    try:
        parts = json.loads(path.read_text())
        costs = {name: [(int(size), float(ms)) for size, ms in parts[name]] for name in NAMES}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} holds no step costs ({error!r}): expected"
            ' {"draft": [[requests, ms], ...], "verify": [[rows, ms], ...]}'
        ) from None
    for name, curve in costs.items():
        sizes = [size for size, _ in curve]
        if not sizes or sizes != sorted(set(sizes)) or min(ms for _, ms in curve) <= 0:
            raise UserError(f"{path}: {name} needs ascending sizes and milliseconds above 0, found {curve}")
    return costs


def keep_costs(costs: Costs, path: Path) -> None:
    """Whole or not at all, whoever else writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(costs))
    part.replace(path)
