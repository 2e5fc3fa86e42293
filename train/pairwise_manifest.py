"""What a pairwise head's files say of themselves: the head beside a drafter, and the state of a training.

Written by `train/pairwise_home.py` and `train/pairwise_state.py`; the model card reads the former.
"""

from pathlib import Path

from recipes.manifest import Count, Manifest, Origin, Record, Sha256, read_manifest
from serve.drafter_config import PAIRWISE_NAME
from serve.plan import MANIFEST_NAME


class Simulated(Record):
    """Tokens a step, the target's own included, if held-out text were decoded; pooled over steps."""

    chain: float
    trees: list[float]
    """By number of nodes, as in `pairwise.budgets`."""


class HeadOrigin(Manifest):
    """Of a head, finished or not; the recipe's `pairwise` says how it is trained."""

    drafter: Origin
    """The frozen one."""
    shards: Sha256
    """`train.resume.shards_digest` of the data."""
    step: Count
    """Optimizer steps taken."""


class HeadManifest(HeadOrigin):
    """draftsmith.json beside a head."""

    held_out_sequences: Count
    """Of the shards' sequences: those that it never saw."""
    held_out_blocks: Count
    before: Simulated
    """The drafter without the head."""
    after: Simulated


def head_manifest_path(ckpt: Path) -> Path:
    """Below a checkpoint, as the head itself."""
    return ckpt / PAIRWISE_NAME.parent / MANIFEST_NAME


def read_head_manifest(ckpt: Path) -> HeadManifest | None:
    """None where a checkpoint has no head."""
    path = head_manifest_path(ckpt)
    return read_manifest(path, HeadManifest) if path.exists() else None
