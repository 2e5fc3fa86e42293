"""The recipe in TensorBoard: a text page of all of it, and the settings by which runs are compared (HPARAMS).

Both lie in the run's own folder, beside its curves, of which some are the metrics there.  Called by
train/distill.py on the main rank: as a run begins, once however often it is resumed, and as it ends.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from recipes.schema import Recipe
from recipes.yaml_text import format_yaml

METRICS = ("accept_real/chain", "accept_real/tree", "accept_sim/chain")
_SUFFIX = ".recipe"  # of these event files
_COMPARED = (  # fields, and sections that are compared whole
    *("target.model", "target.dtype"),
    *("drafter.num_hidden_layers", "drafter.layer_types", "drafter.sliding_window", "drafter.block_size"),
    *("drafter.target_layer_ids", "drafter.intermediate_size"),
    *("data.num_prompts", "data.policy", "data.sampling.temperature", "data.sampling.max_tokens"),
    *("train.steps", "train.sequences_per_step", "train.num_anchors", "train.objective", "train.seed"),
    *("train.optimizer.learning_rate", "train.optimizer.schedule"),
    *("rounds.count", "rounds.budget", "eval.tree_budget"),
)


def show_recipe(recipe: Recipe) -> None:
    """Once: what an earlier run of the same folder showed stays as it is."""
    folder = _folder(recipe)
    if any(folder.glob(f"*{_SUFFIX}")):
        return
    experiment, session_start, _ = hparams(compared_settings(recipe), dict.fromkeys(METRICS))
    with SummaryWriter(str(folder), filename_suffix=_SUFFIX) as writer:
        writer.add_text("recipe", recipe_page(recipe))
        for summary in (experiment, session_start):
            writer.file_writer.add_summary(summary)


def end_session(recipe: Recipe) -> None:
    """The run reached its end."""
    session_end = hparams({}, {})[2]
    with SummaryWriter(str(_folder(recipe)), filename_suffix=_SUFFIX) as writer:
        writer.file_writer.add_summary(session_end)


def recipe_page(recipe: Recipe) -> str:
    """Markdown."""
    return f"```yaml\n{format_yaml(recipe.model_dump(mode='json'))}```\n"


def compared_settings(recipe: Recipe) -> dict[str, bool | float | str]:
    """Dotted path -> value; a list is text, as its entries one after the other."""
    leaves = _leaves("", recipe.model_dump(mode="json"))
    return {path: value for path, value in leaves if _is_compared(path)}


def _is_compared(path: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in _COMPARED)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, bool | float | str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{path}{name}.", inner)
    else:
        yield path[:-1], " ".join(map(str, value)) if isinstance(value, list) else value


def _folder(recipe: Recipe) -> Path:
    return recipe.output_dir / "tensorboard"
