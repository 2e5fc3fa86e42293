"""Lives of tests/killable_loop.py; what a disturbed run may not leave or make again, and how it must end."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.shards import MANIFEST_NAME
from recipes.manifest import ShardManifest, read_manifest

SMALL_RECIPE = Path(__file__).with_name("small_recipe.yaml")
NUM_PROMPTS = 12
_SETTINGS: dict[str, Any] = {
    "data.num_prompts": NUM_PROMPTS,
    "data.max_prompt_tokens": 64,
    "data.sampling.max_tokens": 16,
    "data.shard_tokens": 60,  # two prompts
    "data.check_sequences": 0,  # no weights answer
    "drafter.num_hidden_layers": 1,
    "drafter.layer_types": "[full_attention]",
    "drafter.block_size": 4,
    "drafter.intermediate_size": 32,
    "drafter.num_attention_heads": 2,
    "drafter.num_key_value_heads": 1,
    "drafter.head_dim": 16,
    "train.steps": 9,
    "train.sequences_per_step": 2,
    "train.micro_batch_sequences": 2,
    "train.num_anchors": 3,
    "train.save_every_steps": 2,
    "train.log_every_steps": 1,
    "rounds.count": 3,
    "rounds.pulse_prompts": 2,
}


@dataclass(frozen=True)
class Run:
    """Where a run of the loop lies, and what it is asked for."""

    folder: Path
    output_dir: Path
    settings: dict[str, Any]
    takes_turns: bool = False
    """Engines and trainer leave each other the device, as on a GPU."""

    @property
    def overrides(self) -> list[str]:
        prompts = self.folder / "prompts.jsonl"
        own = {"output_dir": self.output_dir, "data.prompts": prompts, "eval.suite": prompts}
        return [f"{name}={value}" for name, value in (_SETTINGS | own | self.settings).items()]

    @property
    def said(self) -> str:
        """By its last life."""
        return (self.folder / "log").read_text()


def prepare_run(
    folder: Path,
    settings: dict[str, Any] | None = None,
    disk: Path | None = None,
    *,
    takes_turns: bool = False,
) -> Run:
    """Its prompts and its log in `folder`, all that it makes on `disk` if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = [[{"role": "user", "content": f"What is f{number}?"}] for number in range(NUM_PROMPTS)]
    lines = [json.dumps({"messages": messages}) for messages in questions]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return Run(folder, (disk or folder) / "run", settings or {}, takes_turns)


class Lives:
    """One process of tests/killable_loop.py, which does a life after the other."""

    def __enter__(self) -> "Lives":
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        script = str(Path(__file__).with_name("killable_loop.py"))
        self._process = subprocess.Popen(
            [sys.executable, script],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def live(self, run: Run, changed: str | None = None, number: int = 0, filler: Path | None = None) -> int:
        """The exit code of one life, which ends before that change, or finds its disk full from then on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log = str(run.folder / "log")
        order = {"overrides": run.overrides, "log": log, "changed": changed, "number": number}
        order |= {"filler": None if filler is None else str(filler), "takes_turns": run.takes_turns}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


# What it may not leave, or make again


@dataclass(frozen=True)
class Identity:
    """Of a file; another file of the same content has another."""

    inode: int
    changed_ns: int


def whole_shards(output_dir: Path) -> dict[Path, Identity]:
    """Those that the manifest names and has not consumed."""
    path = output_dir / "shards" / MANIFEST_NAME
    if not path.exists():
        return {}
    entries = read_manifest(path, ShardManifest).shards
    paths = [path.with_name(entry.file) for entry in entries if not entry.is_consumed]
    stats = {path: path.stat() for path in paths}
    return {path: Identity(stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def find_leftovers(output_dir: Path) -> list[Path]:
    """Temporary files and folders."""
    return [path for path in output_dir.rglob("*") if path.name.startswith(".") or is_temporary(path)]


def is_temporary(path: Path) -> bool:
    return path.name == "spool" or path.suffix == ".tmp"


def prompt_ids(output_dir: Path) -> list[str]:
    """Of every sequence in the shards that are there."""
    ids = []
    for path in sorted(whole_shards(output_dir)):
        with safe_open(path, framework="pt") as shard:
            ids += json.loads(shard.metadata()["prompt_ids"])
    return ids


# How it must end


def find_differences(run: Path, expected: Path) -> Iterator[str]:
    """Of two finished runs: files, shards, weights and cards, optimizer, `latest`, curves of training."""
    if files(run) != files(expected):
        yield f"files: {sorted(files(run) ^ files(expected))}"
        return
    for name in sorted(files(expected)):
        if (
            name.endswith((".safetensors", "README.md"))
            and (run / name).read_bytes() != (expected / name).read_bytes()
        ):
            yield name
    pairs = zip(optimizer_tensors(run), optimizer_tensors(expected), strict=True)
    if not all(torch.equal(*pair) for pair in pairs):
        yield "optimizer"
    latest = Path("checkpoints", "latest")
    if (run / latest).readlink() != (expected / latest).readlink():
        yield f"latest is at {(run / latest).readlink()}"
    if curves(run) != curves(expected):
        yield "curves"


def files(run: Path) -> set[str]:
    """All but the curves', which every life adds to."""
    paths = [path.relative_to(run) for path in run.rglob("*") if not path.is_dir()]
    return {str(path) for path in paths if path.parts[0] != "tensorboard"}


def optimizer_tensors(run: Path) -> list[torch.Tensor]:
    """fp32 masters and moments of the newest state."""
    (path,) = (run / "state").glob("step-*/*optim_states.pt")
    found = list(tensors_in(torch.load(path, weights_only=False)))
    assert len(found) > 2, path
    return found


def tensors_in(content: object) -> Iterator[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict | list | tuple):
        for part in content.values() if isinstance(content, dict) else content:
            yield from tensors_in(part)


def curves(run: Path) -> list[dict[int, float]]:
    """Step -> value: the last life that took a step has the last word."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = ("loss/train", "accept_sim/chain", "train/learning_rate")
    return [{point.step: point.value for point in events.Scalars(tag)} for tag in tags]
