"""What a target's own files say of it, without torch: its shape, its end tokens, whether a recipe fits it."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from recipes.errors import UserError
from recipes.schema import Recipe

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG_NAME = "config.json"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class TargetConfig:
    """The text model's shape, from config.json and generation_config.json."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    reserved_ids: frozenset[int]
    """Beginning, end and padding tokens: ids that occur in text, so that none of them can be the mask."""
    end_ids: frozenset[int]
    """Of these the end tokens: each ends the assistant's turn."""


def find_folder(name: str) -> Path | None:
    """A model's folder, looked up from the working directory, then from the repository root."""
    path = Path(name).expanduser()
    return next((base / path for base in _bases() if (base / path).is_dir()), None)


def _bases() -> tuple[Path, Path]:
    return Path.cwd(), REPOSITORY


def resolve_model(name: str) -> str:
    """The folder `name` stands for, or `name` itself if it looks like a hub name; else UserError."""
    folder = find_folder(name)
    if folder is not None:
        return str(folder)
    if _HUB_NAME.fullmatch(name):
        return name
    bases = " and ".join(dict.fromkeys(map(str, _bases())))
    raise UserError(
        f"model {name!r}: found no such folder (looked from {bases}); "
        "write the path of a folder with config.json, or a hub name such as Qwen/Qwen3.6-27B"
    )


def find_config(model: str, revision: str | None) -> Path:
    """config.json of a folder, or of a model on the hub, fetched if need be; else UserError."""
    folder = find_folder(model)
    if folder is not None:
        return folder / CONFIG_NAME
    try:
        return Path(hf_hub_download(model, CONFIG_NAME, revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"model {model!r}: found neither a folder of that name nor a model on the hub ({reason})"
        ) from error


def read_target_config(config_path: Path) -> TargetConfig:
    """Reads config.json and, where there is one, the generation_config.json beside it; else UserError."""
    config = _read_json(config_path)
    text = config.get("text_config", config)  # a vision-language wrapper keeps the text model's there
    missing = [
        key
        for key in ("hidden_size", "vocab_size", "num_hidden_layers")
        if not isinstance(text.get(key), int)
    ]
    if missing:
        raise UserError(f"{config_path}: expected a language model's config, found no {', '.join(missing)}")
    generation_path = config_path.with_name("generation_config.json")
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return TargetConfig(
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        num_hidden_layers=text["num_hidden_layers"],
        reserved_ids=_special_ids((config, text, generation), ("bos", "eos", "pad")),
        end_ids=_special_ids((config, text, generation), ("eos",)),
    )


def _special_ids(configs: Iterable[dict[str, Any]], kinds: Sequence[str]) -> frozenset[int]:
    values = [config.get(f"{kind}_token_id") for config in configs for kind in kinds]
    lists = [value if isinstance(value, list) else [value] for value in values if value is not None]
    return frozenset(token for tokens in lists for token in tokens)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent}: expected a model's folder, found no {path.name} in it") from error
    except ValueError as error:
        raise UserError(f"{path}: expected JSON, found {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


def check_against_target(recipe: Recipe) -> None:
    """Raises UserError with a line for everything in the recipe that its target's config.json forbids.

    A target on the hub is not looked at (its config is not here yet); a missing folder is an error.
    """
    folder = find_folder(resolve_model(recipe.target.model))
    if folder is None:
        return
    problems = _misfits(recipe, read_target_config(folder / CONFIG_NAME))
    if problems:
        raise UserError(
            "\n  ".join([f"the recipe does not fit its target {recipe.target.model}:", *problems])
        )


def _misfits(recipe: Recipe, config: TargetConfig) -> list[str]:
    problems = []
    drafter, last = recipe.drafter, config.num_hidden_layers - 1
    beyond = [layer for layer in drafter.target_layer_ids if layer >= last]
    if beyond:
        problems.append(
            f"drafter.target_layer_ids: expected ids from 0 to {last - 1} (engines disagree whether the "
            f"state of the last layer, {last}, is taken before or after the final norm), found {beyond}"
        )
    if drafter.mask_token_id >= config.vocab_size:
        problems.append(
            f"drafter.mask_token_id: expected an id below the vocabulary size {config.vocab_size}, "
            f"found {drafter.mask_token_id}"
        )
    if drafter.mask_token_id in config.reserved_ids:
        problems.append(
            "drafter.mask_token_id: expected a token that never occurs in text, found "
            f"{drafter.mask_token_id}, which begins, ends or pads it ({sorted(config.reserved_ids)} do)"
        )
    if recipe.target.revision is not None:
        problems.append(f"target.revision: expected none for a folder, found {recipe.target.revision!r}")
    return problems
