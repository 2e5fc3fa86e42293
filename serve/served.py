"""What an engine with a drafter started with, so that another checkpoint can be held against it later.

Travels in vLLM's additional_config; needs no torch, since it is made before the engine's environment is.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.schema import Target
from serve.checkpoint import read_drafter_config


@dataclass(frozen=True)
class Served:
    config: Mapping[str, Any]
    """The drafter's config.json."""
    target: str
    """A folder or a hub name."""
    revision: str | None
    fingerprint: str | None
    """Of the target (`recipes.manifest.TargetIdentity`); None where nobody looked."""

    def options(self) -> dict[str, Any]:
        """As JSON; `Served(**options)` reads it back."""
        return asdict(self)


def describe_served(ckpt: Path, target: Target, fingerprint: str | None) -> Served:
    return Served(read_drafter_config(ckpt), target.model, target.revision, fingerprint)
