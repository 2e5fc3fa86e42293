"""The tensors of a drafter in any known format: where they lie, and which of them are the drafter's own.

Reads headers, and values only where an id map must be looked at.  Called by `serve/formats.py`.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from recipes.errors import UserError
from serve.drafter_fit import STORED_DTYPES
from serve.format_config import Format, Json, refuse_unread
from serve.headers import INDEX_NAME, TensorHeader, read_headers, read_json

WEIGHTS_NAME = "model.safetensors"
MASK_EMBEDDING_NAME = "mask_embedding.pt"

_COPIES = {
    # speculators' frozen copies of the target's (its models/dflash/core.py) -> their shape, as config keys
    "embed_tokens.weight": ("vocab_size", "hidden_size"),
    "lm_head.weight": ("vocab_size", "hidden_size"),
    "verifier_lm_head.weight": ("vocab_size", "hidden_size"),
    "verifier_norm.weight": ("hidden_size",),
}
_VOCABULARY_MAPS = ("d2t", "t2d")
_BUFFER = "rotary_emb.inv_freq"
_UNREAD_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf")


def read_places(folder: Path) -> tuple[dict[str, TensorHeader], dict[str, Path]]:
    """Header and file of every tensor.  Raises UserError for pickles and damage."""
    if (folder / MASK_EMBEDDING_NAME).exists():
        raise UserError(f"{folder} has a {MASK_EMBEDDING_NAME}: a trained mask vector is not served here")
    paths = sorted(_indexed_files(folder / INDEX_NAME) or folder.glob("*.safetensors"))
    unread = sorted(path.name for pattern in _UNREAD_FILES for path in folder.glob(pattern))
    if unread and not paths:
        raise UserError(
            f"{folder} has its weights in {', '.join(unread)}, which is not opened (pickles can run code):"
            f" save them as {WEIGHTS_NAME}, with safetensors.torch.save_file"
        )
    headers = read_headers(folder)
    places = [(name, path) for path in paths for name in _names(path)]
    counts = Counter(name for name, _ in places)
    refuse_unread(str(folder), (f"{name} is in {count} files" for name, count in counts.items() if count > 1))
    return headers, dict(places)


def _indexed_files(index: Path) -> set[Path]:
    """The files that an index names; empty without one."""
    if not index.is_file():
        return set()
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map: copy or export it again")
    return {index.with_name(file) for file in weight_map.values()}


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="np") as file:
        return list(file.keys())


def leave_out(
    headers: Mapping[str, TensorHeader], files: Mapping[str, Path], config: Json, layout: Format
) -> tuple[dict[str, TensorHeader], list[str]]:
    """The drafter's own tensors, and a note on the others."""
    foreign = layout in (Format.SPECULATORS, Format.OPEN_SPEC)
    shapes = {name: tuple(config[key] for key in keys) for name, keys in _COPIES.items()}
    copies = [name for name in headers if foreign and headers[name].shape == shapes.get(name)]
    maps = [name for name in _VOCABULARY_MAPS if name in headers]
    for name in maps:
        _refuse_other_vocabulary(name, files[name], config["vocab_size"])
    buffers = [name for name in headers if name.endswith(_BUFFER)]
    reasons = (
        (copies, "frozen copies of the target's, by the format"),
        (maps, "the draft vocabulary is the target's, id by id"),
        (buffers, "computed from rope_parameters"),
    )
    notes = [f"{', '.join(names)} left out: {reason}" for names, reason in reasons if names]
    gone = {*copies, *maps, *buffers}
    return {name: header for name, header in headers.items() if name not in gone}, notes


def _refuse_other_vocabulary(name: str, path: Path, vocab_size: int) -> None:
    """d2t is target id minus draft id, t2d whether a target id is drafted: all 0 and all 1 change nothing."""
    with safe_open(path, framework="np") as file:
        values = file.get_tensor(name)
    if values.shape != (vocab_size,) or (values != (name == "t2d")).any():
        raise UserError(f"{path}: {name} makes draft ids other than the target's, which is not served here")


def stored_dtype(stored: list[str], flat: Json, source: str) -> tuple[str, list[str]]:
    """config.json's word for how most tensors are stored, whatever the file's own config.json says."""
    words = {short: word for word, short in STORED_DTYPES.items()}
    most = Counter(stored).most_common(1)[0][0] if stored else "BF16"
    if most not in words:
        raise UserError(f"{source}: its weights are stored as {most}, expected one of {', '.join(words)}")
    said = flat.get("dtype") or flat.get("torch_dtype") or words[most]
    notes = [] if said == words[most] else [f"dtype {said} written as {words[most]}, as the weights are"]
    return words[most], notes
