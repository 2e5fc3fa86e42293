"""The target's embedding and head, read from its safetensors without loading the target.

Both are frozen: the drafter's blocks begin with the one and end with the other.
"""

# V=vocabulary  D=hidden

from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from recipes.errors import UserError
from recipes.load import resolve_model
from recipes.schema import Target
from serve.headers import INDEX_NAME, read_json

# A text model, a vision-language wrapper, and the wrapper's older layout.
EMBEDDING_NAMES = [
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
]
HEAD_NAMES = ["lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight"]
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True)
class TargetParts:
    embedding_VD: torch.Tensor
    head_VD: torch.Tensor
    """The embedding itself where the target ties them."""

    def to(self, device: torch.device, dtype: torch.dtype) -> "TargetParts":
        embedding_VD = self.embedding_VD.to(device, dtype)
        tied = self.head_VD is self.embedding_VD
        return TargetParts(embedding_VD, embedding_VD if tied else self.head_VD.to(device, dtype))


def load_target_parts(target: Target) -> TargetParts:
    """On the CPU, in the precision of the target's files.

    Raises UserError when the target has no safetensors, no embedding, or no head and does not tie it.
    """
    files = _WeightFiles(resolve_model(target.model), target.revision)
    config = read_json(files.find("config.json"))
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
    embedding_VD = files.load(EMBEDDING_NAMES, "embedding")
    return TargetParts(embedding_VD, embedding_VD if tied else files.load(HEAD_NAMES, "head"))


class _WeightFiles:
    """A model's safetensors, in one file or behind an index, in a folder or on the hub."""

    def __init__(self, model: str, revision: str | None):
        self.model, self.revision = model, revision
        index = self.find_optional(INDEX_NAME)
        self.file_of = None if index is None else read_json(index)["weight_map"]

    def find_optional(self, name: str) -> Path | None:
        if Path(self.model).is_dir():
            path = Path(self.model) / name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(self.model, name, revision=self.revision))
        except (EntryNotFoundError, LocalEntryNotFoundError):
            return None
        except HfHubHTTPError as error:
            raise UserError(f"target {self.model}: cannot fetch {name}: {error}") from error

    def find(self, name: str) -> Path:
        path = self.find_optional(name)
        if path is None:
            raise UserError(f"target {self.model}: expected {name} there, found none")
        return path

    def load(self, names: list[str], what: str) -> torch.Tensor:
        """The first of `names` that is there."""
        if self.file_of is None:
            return self._load_from(self.find(SINGLE_FILE), names, what)
        held = [name for name in names if name in self.file_of]
        if not held:
            raise self._absent(names, what, list(self.file_of))
        return self._load_from(self.find(self.file_of[held[0]]), held, what)

    def _load_from(self, path: Path, names: list[str], what: str) -> torch.Tensor:
        try:
            with safe_open(path, framework="pt") as weights:
                present = list(weights.keys())
                held = [name for name in names if name in present]
                if not held:
                    raise self._absent(names, what, present)
                return weights.get_tensor(held[0])
        except SafetensorError as broken:
            raise UserError(f"{path} is damaged or cut short ({broken}): fetch it again") from broken

    def _absent(self, names: list[str], what: str, present: list[str]) -> UserError:
        alike = [name for name in present if "embed" in name or "head" in name][:3]
        return UserError(
            f"target {self.model}: expected its {what} under one of {', '.join(names)}; "
            f"found {', '.join(alike) or 'nothing like it'} among {len(present)} tensors"
        )
