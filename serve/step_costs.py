"""What an engine's steps cost, as a file: two curves of sizes and milliseconds, and whose they are.

    {"draft": [[requests, ms], ...], "verify": [[rows, ms], ...], "of": {"gpu": "NVIDIA H200", ...}}

Sizes ascend; between two of them a step costs what the larger does, since CUDA graphs are padded to it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipes.errors import UserError

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class StepCosts:
    draft: Curve
    """Of the drafter, by requests of a step."""
    verify: Curve
    """Of the target, by its rows."""
    of: Mapping[str, str] = field(default_factory=dict)
    """The engine that they were measured on; empty: nobody says."""


def read_costs(path: Path) -> StepCosts:
    """Raises UserError for a file that holds something else."""
    try:
        costs = parse_costs(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} holds no step costs ({error!r}): expected"
            ' {"draft": [[requests, ms], ...], "verify": [[rows, ms], ...]}'
        ) from None
    for name, curve in (("draft", costs.draft), ("verify", costs.verify)):
        sizes = [size for size, _ in curve]
        if not sizes or sizes != sorted(set(sizes)) or min(ms for _, ms in curve) <= 0:
            raise UserError(f"{path}: {name} needs ascending sizes and milliseconds above 0, found {curve}")
    return costs


def parse_costs(told: Mapping[str, Any]) -> StepCosts:
    """Of what `tell_costs` made."""
    draft, verify = ([(int(size), float(ms)) for size, ms in told[name]] for name in ("draft", "verify"))
    return StepCosts(draft, verify, dict(told.get("of", {}).items()))


def tell_costs(costs: StepCosts) -> dict[str, Any]:
    return asdict(costs)


def keep_costs(costs: StepCosts, path: Path) -> None:
    """Whole or not at all, whoever else writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(tell_costs(costs)))
    part.replace(path)
