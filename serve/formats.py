"""DFlash drafters in every format in circulation, read into the one that this project writes.

Four layouts of config.json exist (`serve/format_config.py`); the tensors `layers.*`, `fc`, `hidden_norm` and
`norm` bear the same names in all (`serve/format_tensors.py`).  Reading opens headers only: weights are read
one at a time, by `PublishedCheckpoint.load`.  Called by `serve/adopt.py` and `serve/convert.py`.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from recipes.errors import UserError
from recipes.manifest import write_json
from serve.drafter_config import ARCHITECTURE, CONFIG_NAME, expected_tensors
from serve.drafter_fit import STORED_DTYPES, tensor_differences
from serve.format_config import Format, Json, refuse_unread, rewrite_config
from serve.format_tensors import WEIGHTS_NAME, leave_out, read_places, stored_dtype
from serve.headers import TensorHeader, read_json

if TYPE_CHECKING:
    import torch

_ARCHITECTURES = (ARCHITECTURE, "Qwen3DFlashDraftModel")  # the latter: NeMo Automodel, pull request 2913
_OPEN_SPEC = {"open_spec_config_version": "0.0.0", "architectures": ["DflashDraftModel"]}
_OTHER_MODELS = {  # part of a name in config.json, in lower case -> what it is; the first match counts
    "eagle": "an EAGLE head",
    "medusa": "a Medusa head",
    "mtp": "a multi-token-prediction head",
    "dflash2": "a DFlash2 drafter, which is served as it is, but neither converted nor trained",
    "dspark": "a DSpark drafter, whose anchor drafts as well",
    "domino": "a Domino drafter",
    "lilicorr": "a LiLiCorr drafter",
    "laguna": "a Laguna drafter, which has gates that DFlash has not",
    "forcausallm": "a whole language model",
    "forconditionalgeneration": "a whole model",
}


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A drafter in our published format, wherever its bytes lie."""

    config: Json
    """As `serve.checkpoint.published_config` writes it, less `num_target_layers` if the file does not say it,
    and with `is_causal` if the kinds of the layers alone would mean another mask."""
    tensors: Mapping[str, TensorHeader]
    """Those of `expected_tensors(config)`, in that order."""
    notes: tuple[str, ...]
    """What was converted or left out, a sentence each."""
    files: Mapping[str, Path]
    """The file of each tensor."""

    def load(self, name: str) -> "torch.Tensor":
        """One tensor, on the CPU, as it is stored."""
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)


def recognise(folder: Path) -> Format:
    """The format of a folder's config.json; raises UserError that says what it is instead."""
    if not folder.is_dir():
        raise UserError(f"{folder}: found no such folder; name a drafter's, with {CONFIG_NAME} and weights")
    raw = read_json(folder / CONFIG_NAME)
    if raw.items() >= _OPEN_SPEC.items():
        return Format.OPEN_SPEC
    if raw.get("speculators_model_type") == "dflash":
        return Format.SPECULATORS
    foreign = raw.keys() & {"open_spec_config_version", "speculators_model_type"}
    if not foreign and raw.get("architectures") in [[name] for name in _ARCHITECTURES]:
        return Format.PUBLISHED if raw.get("dflash_config") else Format.PUBLISHED_OLD
    formats = ", ".join(Format)
    raise UserError(f"{folder} is no DFlash drafter in a known format ({formats}): {_describe(raw)}")


def _describe(raw: Json) -> str:
    keys = ("open_spec_config_version", "speculators_model_type", "architectures", "model_type")
    said = ", ".join(f"{key} {raw[key]!r}" for key in keys if raw.get(key))
    kind = next((what for part, what in _OTHER_MODELS.items() if part in said.lower()), "something unknown")
    return f"its {CONFIG_NAME} says {said or 'no architectures'}: {kind}"


def read_checkpoint(folder: Path) -> PublishedCheckpoint:
    """A drafter in any known format, as the published one.

    Raises UserError for a folder that holds none, or a damaged, incomplete, ambiguous or unservable one.
    """
    source, layout = str(folder), recognise(folder)
    config, flat, config_notes = rewrite_config(layout, read_json(folder / CONFIG_NAME), source)
    headers, files = read_places(folder)
    tensors, tensor_notes = leave_out(headers, files, config, layout)
    expected = expected_tensors(config)
    stored, dtype_notes = stored_dtype([tensors[n].dtype for n in expected if n in tensors], flat, source)
    refuse_unread(source, tensor_differences(tensors, expected, STORED_DTYPES[stored]))
    return PublishedCheckpoint(
        config={**config, "dtype": stored},
        tensors={name: tensors[name] for name in expected},
        notes=(*config_notes, *dtype_notes, *tensor_notes),
        files={name: files[name] for name in expected},
    )


# Of a checkpoint that was read


def check_finite(checkpoint: PublishedCheckpoint) -> None:
    """Reads every tensor once.  Raises UserError that names those with NaN or infinite values."""
    counts = {name: int((~checkpoint.load(name).isfinite()).sum()) for name in checkpoint.tensors}
    source = ", ".join(sorted({str(path) for path in checkpoint.files.values()}))
    refuse_unread(source, (f"{name} has {n} values that are not finite" for name, n in counts.items() if n))


def require_absent(folder: Path) -> None:
    """Raises UserError where something of this name is there."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is already there: name another folder, or move it away")


def write_published(checkpoint: PublishedCheckpoint, folder: Path) -> None:
    """config.json and model.safetensors in a new folder, which appears once both are on the disk.

    Holds one tensor in memory at a time.  Raises UserError for a folder that exists, and for float16 weights,
    which `serve.tensor_file` does not write.
    """
    require_absent(folder)
    if checkpoint.config["dtype"] == "float16":
        raise UserError("the drafter is stored in float16, which is not written: get it in bfloat16")
    # only now: torch, which nothing above needs
    import torch  # noqa: PLC0415

    from serve.tensor_file import TensorParts, sync_path, write_tensors  # noqa: PLC0415

    dtype = getattr(torch, checkpoint.config["dtype"])
    parts = {
        name: TensorParts(dtype, header.shape, _load_late(checkpoint, name))
        for name, header in checkpoint.tensors.items()
    }
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        write_json(temporary / CONFIG_NAME, checkpoint.config)
        write_tensors(temporary / WEIGHTS_NAME, parts, {"format": "pt"})
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_path(folder.parent)


def _load_late(checkpoint: PublishedCheckpoint, name: str) -> "Iterator[torch.Tensor]":
    """The tensor as its one part, read when it is written."""
    yield checkpoint.load(name)
