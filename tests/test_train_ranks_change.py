"""A state goes on with fewer ranks or more than wrote it: the same bits, and the losses of an unbroken run.

Two ranks write it, one takes it over and saves again, three take over that.
"""

import os
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks_probe import LIVES, SETTINGS, Record

from recipes.errors import MachineError
from train.reshard import Cut, Recutting, cut_evenly, take_over_state

LIMIT_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lives")


@pytest.fixture(scope="module")
def printed(folder) -> str:
    """What the ranks of all lives said."""
    probe = Path(__file__).with_name("ranks_probe.py")
    lived = subprocess.run(
        [sys.executable, str(probe), str(folder)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert lived.returncode == 0, lived.stderr
    return lived.stdout


@pytest.fixture(params=SETTINGS)
def records(request, folder, printed) -> list[Record]:
    return [Record(**torch.load(folder / request.param / f"{name}.pt")) for name in LIVES]


def test_weights_masters_moments_and_steps_are_those_that_were_saved(records):
    for before, after in pairwise(records):
        assert before.saved.keys() == after.found.keys()
        assert len(before.saved) > 100
        assert [name for name, each in before.saved.items() if not torch.equal(each, after.found[name])] == []


def test_losses_are_those_of_the_run_that_did_not_stop(records, request):
    """From the second step on within bf16's rounding: ranks add their gradients in the weights' precision."""
    straight = records[0].losses
    rounding = 3e-3 if "bfloat16" in request.node.name else 1e-6
    for life, record in zip(list(LIVES.values())[:2], records[1:], strict=True):
        assert list(record.losses) == list(range(life.save_at, life.end))
        for step, loss in record.losses.items():
            is_first = record is records[1] and step == life.save_at
            assert loss == pytest.approx(straight[step], rel=1e-6 if is_first else rounding)


def test_the_user_is_told_once_of_each(printed):
    for step, was, now in ((3, "2 ranks", "1 rank"), (4, "1 rank", "3 ranks")):
        assert printed.count(f"state/step-{step}: state of {was} taken over by {now}\n") == len(SETTINGS)
    assert printed.count("taken over") == 2 * len(SETTINGS)


def test_a_rank_without_the_other_ones_files_says_so(tmp_path):
    engine = SimpleNamespace(zero_optimization_stage=lambda: 2, bfloat16_enabled=lambda: True)
    (tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    missing = "holds no bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: 2 ranks wrote this state"
    with pytest.raises(MachineError, match=missing):
        take_over_state(engine, tmp_path, 2, ranks=None)


# Any number of ranks, without an engine

SHAPES = {"a": torch.Size([3, 5]), "b": torch.Size([1]), "c": torch.Size([7]), "d": torch.Size([2, 4])}
SIZE = 40
"""Of every flat tensor, more than they need: padded."""
WHOLE = {name: torch.rand(shape.numel()) for name, shape in SHAPES.items()}


def cut_through(num_ranks: int) -> list[Cut]:
    """Stages 1 and 2: all parameters behind one another, and that into equal pieces."""
    ends = list(accumulate(len(each) for each in WHOLE.values()))
    size = -(-ends[-1] // num_ranks)
    cuts = []
    for first in range(0, size * num_ranks, size):
        held = {
            name: range(max(end - len(WHOLE[name]) - first, 0), min(end - first, size))
            for name, end in zip(WHOLE, ends, strict=True)
        }
        cuts.append([{name: place for name, place in held.items() if place}])
    return cuts


def cut_in_groups(num_ranks: int) -> list[Cut]:
    """Stage 3, with groups that hang on the number of ranks."""
    names, first = list(SHAPES), min(num_ranks, 3)
    groups = [{name: SHAPES[name] for name in each} for each in (names[:first], names[first:])]
    return cut_evenly(groups, num_ranks)


def flats_of(cuts: list[Cut], rank: int) -> list[torch.Tensor]:
    """The slow way: number by number, 0 where there is none."""
    flats = []
    for number, places in enumerate(cuts[rank]):
        flat = torch.zeros(SIZE)
        for name, place in places.items():
            before = sum(len(cut[group].get(name, ())) for cut in cuts[:rank] for group in [number])
            for offset, index in enumerate(place):
                flat[index] = WHOLE[name][before + offset]
        flats.append(flat)
    return flats


@pytest.mark.parametrize("cut", [cut_through, cut_in_groups])
@pytest.mark.parametrize("now", [1, 2, 3, 5])
@pytest.mark.parametrize("was", [1, 2, 3, 8])
def test_any_number_of_ranks_takes_over_from_any(was, now, cut):
    written = [flats_of(cut(was), rank) for rank in range(was)]
    for rank in range(now):
        own = Recutting(cut(was), cut(now), rank, sizes=[SIZE] * len(cut(now)[0]))(written)
        assert all(torch.equal(*pair) for pair in zip(own, flats_of(cut(now), rank), strict=True))
