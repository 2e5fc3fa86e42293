"""vLLM's own ways of drafting, to be measured beside ours; what a user can get wrong is found here.

    ngram                the tokens that followed the last few where these stood before, in prompt or answer
    mtp                  the target's own head for the tokens after the next
    eagle3=CHECKPOINT    an EAGLE-3 drafter for this target: a folder, or a name on the hub

Each makes as many drafts a step as the chain that it stands beside, or K with `ngram:K`.  Needs no vllm.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.errors import UserError
from recipes.load import resolve_model
from recipes.schema import Positive, Section, Target
from recipes.target_config import find_config, find_folder
from serve.headers import read_headers

METHODS = ("ngram", "mtp", "eagle3")
_GIVEN = re.compile(r"(?P<method>[a-z0-9]+)(:(?P<drafts>[1-9]\d*))?(=(?P<model>.+))?")
_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""The longest of so many last tokens that stood before; vLLM's default, 5 alone, finds less."""
_MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")
_MTP_PREFIX = "mtp."
"""Of the head's tensors, where a config has the first of those names."""


class Baseline(Section):
    name: str
    """As the report has it: `ngram` or `ngram:K`."""
    num_drafts: Positive
    """A step."""
    speculative: dict[str, Any]
    """vLLM's speculative_config."""


def read_baselines(texts: Sequence[str], target: Target, num_drafts: int) -> list[Baseline]:
    """As `read_baseline`, each once: with the same name a report could not tell them apart."""
    baselines = [read_baseline(text, target, num_drafts) for text in texts]
    names = [baseline.name for baseline in baselines]
    if len(set(names)) < len(names):
        raise UserError(f"baselines {', '.join(names)}: write each once")
    return baselines


def read_baseline(text: str, target: Target, num_drafts: int) -> Baseline:
    """`text` as users write it; `num_drafts` where it says no number.

    Raises UserError for what vLLM does not have, and for what this target cannot be drafted with.
    """
    given = _GIVEN.fullmatch(text)
    if given is None or given["method"] not in METHODS:
        raise UserError(f"baseline {text!r}: expected ngram, mtp or eagle3=CHECKPOINT{_explain(text)}")
    method = given["method"]
    if (method == "eagle3") != (given["model"] is not None):
        raise UserError(
            f"baseline {text!r}: eagle3 needs a CHECKPOINT, as eagle3=FOLDER, and no other has one"
        )
    count = int(given["drafts"] or num_drafts)
    speculative = {"method": method, "num_speculative_tokens": count} | _find_options(text, given, target)
    return Baseline(name=text.partition("=")[0], num_drafts=count, speculative=speculative)


def _find_options(text: str, given: re.Match[str], target: Target) -> dict[str, Any]:
    """Of the method alone."""
    if given["method"] == "ngram":
        return _LOOKUP
    if given["method"] == "mtp":
        _require_mtp(text, target)
        return {}
    return {"model": _find_checkpoint(text, given["model"])}


def _explain(text: str) -> str:
    if text.partition(":")[0] != "suffix":
        return ""
    return "; vLLM 0.32's V2 model runner, which every engine here has, does not draft by suffixes"


def _find_checkpoint(text: str, model: str) -> str:
    path = find_config(resolve_model(model), None)
    if not path.is_file():
        raise UserError(f"baseline {text!r}: found no {path.name} in {path.parent}")
    return resolve_model(model)


def _require_mtp(text: str, target: Target) -> None:
    path = find_config(target.model, target.revision)
    config = json.loads(path.read_text(encoding="utf-8"))
    of_text = config.get("text_config", {})
    layers = [name for name in _MTP_LAYERS if config.get(name) or of_text.get(name)]
    if not layers:
        raise UserError(
            f"baseline {text!r}: target {target.model} has no MTP head, its config.json has none of"
            f" {', '.join(_MTP_LAYERS)}"
        )
    folder = find_folder(target.model)
    if layers[0] == _MTP_LAYERS[0] and folder is not None and target.load_format == "auto":
        _require_tensors(text, folder)


def _require_tensors(text: str, folder: Path) -> None:
    """Fine-tuned copies often keep the config's word for it and lose the head."""
    if not any(name.startswith(_MTP_PREFIX) for name in read_headers(folder)):
        raise UserError(
            f"baseline {text!r}: target {folder} says that it has an MTP head, and there is no tensor"
            f" {_MTP_PREFIX}* in its files: it was lost when they were written"
        )
