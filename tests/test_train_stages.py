"""ZeRO stages and offload learn the same over twenty steps: on two ranks, and on GPUs where there are any.

Also the program of one rank, as a launcher would start it:

    python tests/test_train_stages.py FILE
"""

import sys
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from test_train_step import SEQUENCES, start, train_settings

from train.feed import Feed
from train.ranks import Ranks, joined_ranks
from train.zero import gather_weights

STEPS = 20
SETTINGS = {
    f"stage {stage}{', offload' * offload}, {precision}": {
        "zero_stage": stage,
        "offload_optimizer": offload,
        "precision": precision,
    }
    for precision in ("float32", "bfloat16")
    for stage in (0, 1, 2, 3)
    for offload in ((False, True) if stage else (False,))
}
FIRST = next(iter(SETTINGS))
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-2}
"""bf16 also against fp32: weights, and gradients on their way, are rounded."""


def learn(ranks: Ranks, **changes: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of each step, and the weights that would be published."""
    learner, feed = start(ranks, train_settings(steps=STEPS, micro_batch_sequences=1, **changes))
    feed = Feed(SEQUENCES, feed.train, feed.drafter, ranks.rank, ranks.world_size)
    losses = [learner.learn(feed.read_step(step), 2e-3).loss for step in range(STEPS)]
    weights = gather_weights(learner.engine, ranks)
    learner.engine.destroy()
    return losses, weights


def main(file: Path) -> None:
    with joined_ranks() as ranks:
        learnt = {name: learn(ranks, **changes) for name, changes in SETTINGS.items()}
        if ranks.is_main:
            torch.save(learnt, file)


GPUS = torch.cuda.device_count()


@pytest.fixture(
    scope="module",
    params=[
        (2, False),
        pytest.param((1, True), marks=pytest.mark.skipif(GPUS < 1, reason="needs a GPU")),
        pytest.param((2, True), marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")),
    ],
    ids=["two ranks", "a GPU", "two GPUs"],
)
def learnt(request, tmp_path_factory):
    num_ranks, on_gpus = request.param
    file = tmp_path_factory.mktemp("stages") / "learnt.pt"
    run_ranks(__file__, num_ranks, file, on_gpus=on_gpus)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", list(SETTINGS)[1:])
def test_losses_are_those_of_the_first(learnt, name):
    expected, found = learnt[FIRST][0], learnt[name][0]
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=ROUNDING[name.split(", ")[-1]])


@pytest.mark.parametrize("name", list(SETTINGS)[1:])
def test_weights_are_those_of_the_first(learnt, name):
    for key, expected in learnt[FIRST][1].items():
        torch.testing.assert_close(learnt[name][1][key], expected, atol=2e-2, rtol=2e-2)


def test_one_rank_learns_what_ranks_do(learnt, only_rank):
    losses, _ = learn(only_rank, **SETTINGS[FIRST])
    assert learnt[FIRST][0] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
