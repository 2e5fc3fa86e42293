"""A training's lives, one after another, each with another number of ranks; under every setting in turn.

    python tests/ranks_probe.py FOLDER

A life goes on from the state that the one before it saved; what it saw is left in FOLDER/SETTING/LIFE.pt, a
`Record`.  Ranks are forks of this process, so that what takes seconds to import is imported once.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed.runtime.zero.muon.muon_optimizer  # each rank's first engine would take seconds to
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from small_training import DRAFTER, make_sequence, manifest_of, small_recipe, write_target
from test_train_run import free_port

from recipes.schema import Recipe
from serve.checkpoint import load_target_config, published_config
from train import zero
from train.feed import Feed
from train.loop import start_learner
from train.ranks import Ranks, joined_ranks
from train.resume import Progress, RunFolders
from train.saving import Saver

ODD = DRAFTER.model_copy(update={"intermediate_size": 49})
"""With adapters of an odd rank: sizes that ranks cannot share evenly."""
SEQUENCES = [make_sequence(index) for index in range(9)]
KINDS: dict[str, tuple[Sequence[int], dict[str, Any]]] = {
    "float32": ((0, 1, 2, 3), {"precision": "float32"}),
    "bfloat16": ((0, 1, 2, 3), {"precision": "bfloat16"}),
    "bfloat16, offload": ((2, 3), {"precision": "bfloat16", "offload_optimizer": True}),
    "bfloat16, adapters": (
        (2, 3),
        {"precision": "bfloat16", "init_from": "gone", "lora": {"rank": 3, "alpha": 8}},
    ),
}
"""Name -> stages, fields."""
SETTINGS: dict[str, dict[str, Any]] = {
    f"stage {stage}, {kind}": {"zero_stage": stage} | changes
    for kind, (stages, changes) in KINDS.items()
    for stage in stages
}


@dataclass(frozen=True)
class Life:
    num_ranks: int
    save_at: int | None
    """Steps taken by then."""
    end: int = 5


LIVES = {"first": Life(2, save_at=3), "second": Life(1, save_at=4), "third": Life(3, save_at=None)}


@dataclass
class Record:
    """What a life saw; tensors are whole ones, by name."""

    began_at: int = 0
    found: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    """By step."""


@dataclass(frozen=True)
class Beginning:
    """So that what a life does not read from the state, frozen weights too, is not there by itself."""

    scale: float

    @torch.no_grad()
    def load_into(self, drafter: torch.nn.Module) -> None:
        for each in drafter.parameters():
            each.mul_(self.scale)


def live(recipe: Recipe, life: Life, ranks: Ranks) -> Record:
    learner = start_learner(recipe, ranks, Beginning(1 / life.num_ranks))
    saver = saver_of(recipe, ranks)
    feed = Feed(SEQUENCES, recipe.train, recipe.drafter, ranks.rank, ranks.world_size)
    progress = saver.go_on(learner.engine, Progress())
    record = Record(began_at=progress.step(recipe.train.sequences_per_step))
    if record.began_at:
        record.found = read_whole(learner.engine)
    for step in range(record.began_at, life.end):
        totals = learner.learn(feed.read_step(step), 5e-3)
        record.losses[step] = totals.loss
        progress = progress.after(recipe.train.sequences_per_step, totals.num_tokens)
        if step + 1 == life.save_at:
            record.saved = read_whole(learner.engine)
            saver.save(learner.engine, replace(progress, simulated_acceptance=totals.acceptance))
    learner.engine.destroy()
    return record


def read_whole(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and steps; where they are cut, by DeepSpeed's own functions for it."""
    parameters = dict(engine.module.named_parameters())
    is_cut = engine.zero_optimization_partition_weights()
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=is_cut):
        whole = {f"{name}, weight": each.detach().clone() for name, each in parameters.items()}
    if engine.zero_optimization_stage() == 0:
        return whole | dict(_tensors_in(engine.optimizer.state_dict(), "optimizer"))
    if not is_cut:
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # which its first step does
    for name, each in parameters.items():
        if each.requires_grad:
            whole[f"{name}, master"] = safe_get_full_fp32_param(each).clone()
            for moment in ("exp_avg", "exp_avg_sq"):
                whole[f"{name}, {moment}"] = safe_get_full_optimizer_state(each, moment).clone()
    steps = {float(state["step"]) for state in engine.optimizer.state.values()}
    return whole | {"step": torch.tensor(sorted(steps))}


def _tensors_in(item: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(item, torch.Tensor):
        yield path, item.detach().clone()
    elif isinstance(item, dict | list):
        for name, each in item.items() if isinstance(item, dict) else enumerate(item):
            yield from _tensors_in(each, f"{path}, {name}")


def saver_of(recipe: Recipe, ranks: Ranks) -> Saver:
    config = published_config(recipe.drafter, load_target_config(recipe.target.model))
    return Saver(recipe, RunFolders(recipe.output_dir), config, manifest_of(recipe), ranks, None)


def be_rank(rank: int, port: int, life: Life, name: str, folder: Path) -> None:
    launched: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": life.num_ranks,
        "MASTER_PORT": port,
    }
    launched |= {"LOCAL_WORLD_SIZE": life.num_ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({key: str(value) for key, value in launched.items()})
    split = {"sequences_per_step": 6, "micro_batch_sequences": 1}
    with joined_ranks() as ranks:
        for setting, changes in SETTINGS.items():
            recipe = small_recipe(folder / setting, folder / "target", **split, **changes)
            record = live(recipe.model_copy(update={"drafter": ODD}), life, ranks)
            if ranks.is_main:
                torch.save(asdict(record), recipe.output_dir / f"{name}.pt")


def group_few_parameters() -> None:
    """At stage 3, as in a drafter of more than 1e9 a rank: several groups, as many as the ranks make it."""
    zero_section = zero._zero
    zero._zero = lambda train: zero_section(train) | {"sub_group_size": 5000}


def main() -> None:
    group_few_parameters()
    folder, forks = Path(sys.argv[1]), multiprocessing.get_context("fork")
    write_target(folder / "target")
    for name, life in LIVES.items():
        port = free_port()
        ranks = [
            forks.Process(target=be_rank, args=(rank, port, life, name, folder), daemon=True)
            for rank in range(life.num_ranks)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            sys.exit(f"{name} life: its ranks ended with {[each.exitcode for each in ranks]}")


if __name__ == "__main__":
    main()
