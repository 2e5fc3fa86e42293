"""The tensors of a checkpoint folder as its safetensors headers announce them; no weight is read.

Opening a file compares its length with the header, so a file cut short is noticed here.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from recipes.errors import UserError

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorHeader:
    dtype: str
    """As safetensors writes it: BF16, F16, F32."""
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Name -> header over all weight files.  Raises UserError when one is missing, damaged or cut short."""
    headers: dict[str, TensorHeader] = {}
    for path in _weight_files(folder):
        headers |= read_file_headers(path)
    return headers


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    absent = [path.name for path in files if not path.is_file()]
    if absent or not files:
        raise UserError(
            f"{folder} lacks its weights: {', '.join(absent) or 'model.safetensors'} is not there"
        )
    return files


def read_file_headers(path: Path) -> dict[str, TensorHeader]:
    """Of one file."""
    try:
        with safe_open(path, framework="np") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            return {name: TensorHeader(s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except SafetensorError as broken:
        raise UserError(f"{path} is damaged or cut short ({broken}): copy or export it again") from broken


def read_json(path: Path) -> dict:
    """A JSON object from a file.  Raises UserError when it is missing or malformed."""
    if not path.is_file():
        raise UserError(f"{path} is not there")
    try:
        content = json.loads(path.read_text())
    except ValueError as broken:
        raise UserError(f"{path} is not valid JSON: {broken}") from broken
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content
