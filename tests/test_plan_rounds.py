"""What rounds add to a plan: what engines and trainer leave to each other in turns, or need side by side."""

from itertools import pairwise

import pytest

from data.groups import Rendered
from data.rounds import share_shards
from data.shard_plan import check_room
from recipes.errors import UserError
from recipes.footprint import GIB, served_drafter_bytes
from recipes.job import Job, Row
from recipes.needs import count_misfits, plan_phases
from recipes.remedies import propose
from recipes.schema import Rounds
from tests.drafters import tiny_recipe
from tests.test_plan import FLAGSHIP, TINY, phase_of, plan_of, run_plan

SERVE, TRAIN = "serve: memory of each GPU", "train: memory of each GPU"
REGENERATE_HOST, TRAIN_HOST = "regenerate: host memory", "train: host memory"
TOGETHER = "regenerate and train: host memory"
ASLEEP, PINNED, TRAINER = "engine asleep", "engines' weights, asleep", "trainer, without its state"
AHEAD = ("rounds.ahead=true", "hardware.gpus=4", "rounds.engine_gpus=[2, 3]")
SPARING = ("train.zero_stage=2", "train.offload_optimizer=true", "train.activation_checkpointing=true")
"""A trainer that nothing can be asked of but to take turns."""
SHARED_GPU = ("hardware={gpus: 1}", "serve.kv_cache_gib=1", "data.engines=3")


def rows_of(job: Job, name: str) -> dict[str, Row]:
    return {row.what: row for row in phase_of(job, name).rows}


def places_of(job: Job, what: str) -> list[str]:
    return [phase.name for phase in plan_phases(job) if any(row.what == what for row in phase.rows)]


def misfits_of(*overrides: str) -> list[str]:
    return list(count_misfits(plan_of(FLAGSHIP, *overrides).recipe))


# In turns


def test_engines_that_sleep_are_told_on_the_gpu_and_in_host_memory():
    job = plan_of(FLAGSHIP)
    assert places_of(job, ASLEEP) == [TRAIN]
    assert places_of(job, PINNED) == [TRAIN_HOST]
    assert places_of(job, "engines' processes") == [REGENERATE_HOST, TRAIN_HOST]


@pytest.mark.parametrize(
    ("path", "overrides"),
    [
        (FLAGSHIP, ["rounds.handover=stop"]),
        (FLAGSHIP, ["rounds.count=2"]),  # the first round's are plain, the second's are the last
        (FLAGSHIP, ["rounds.count=1"]),
        (FLAGSHIP, AHEAD),
        (TINY, []),  # a CPU's memory is nobody's alone
    ],
)
def test_other_engines_do_not_sleep(path, overrides):
    job = plan_of(path, *overrides)
    assert not places_of(job, ASLEEP) + places_of(job, PINNED)


def test_engines_sleep_from_the_third_round_on():
    assert places_of(plan_of(FLAGSHIP, "rounds.count=3"), ASLEEP)


def test_every_engine_of_a_gpu_keeps_some_of_it_asleep():
    assert rows_of(plan_of(FLAGSHIP), TRAIN)[ASLEEP].gib == 2
    assert rows_of(plan_of(TINY, *SHARED_GPU), TRAIN)[ASLEEP].gib == 6


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_sleep_in_host_memory_with_all_that_their_ranks_hold(ranks):
    job = plan_of(FLAGSHIP, f"serve.tensor_parallel_size={ranks}")
    on_ranks = rows_of(job, SERVE)["target"].num_bytes + rows_of(job, SERVE)["drafter"].num_bytes
    assert rows_of(job, TRAIN_HOST)[PINNED].num_bytes == ranks * on_ranks


def test_weights_sleep_once_for_each_engine():
    job = plan_of(TINY, *SHARED_GPU)
    drafter = served_drafter_bytes(job.recipe.drafter, job.target.hidden_size, 2, 1)
    one = job.target.count_served_parameters() * 2 + drafter
    assert rows_of(job, TRAIN_HOST)[PINNED].num_bytes == 3 * one
    assert rows_of(job, TRAIN_HOST)["engines' processes"].gib == 3 * 3


@pytest.mark.parametrize("handover", ["sleep", "stop"])
def test_a_trainer_leaves_its_context_and_its_processes(handover):
    job = plan_of(FLAGSHIP, f"rounds.handover={handover}")
    assert places_of(job, TRAINER) == [REGENERATE_HOST, SERVE]
    assert rows_of(job, SERVE)[TRAINER].gib == pytest.approx(2.0)
    assert rows_of(job, REGENERATE_HOST)[TRAINER].gib == 2 * 3


@pytest.mark.parametrize(
    ("path", "overrides"), [(FLAGSHIP, ["rounds.count=1"]), (FLAGSHIP, AHEAD), (TINY, [])]
)
def test_a_trainer_leaves_nothing_where_it_takes_no_turns(path, overrides):
    assert not places_of(plan_of(path, *overrides), TRAINER)


def test_an_engines_cache_is_as_large_beside_a_trainer_without_its_state():
    # vLLM counts what its own process takes
    alone, in_turns = plan_of(FLAGSHIP, "rounds.count=1"), plan_of(FLAGSHIP)
    assert phase_of(alone, SERVE).notes == phase_of(in_turns, SERVE).notes


@pytest.mark.parametrize("handover", ["sleep", "stop"])
def test_the_flagship_fits_with_either_handover(handover):
    job = plan_of(FLAGSHIP, f"rounds.handover={handover}")
    assert all(phase.fits for phase in plan_phases(job))


@pytest.mark.parametrize(
    ("name", "lack"),
    [
        (TRAIN_HOST, "hardware.host_gib=100"),
        (TRAIN, "hardware.gpu_gib=19.5"),
    ],
)
def test_to_end_engines_is_proposed_where_their_sleep_takes_too_much(name, lack):
    job = plan_of(FLAGSHIP, lack, *SPARING)
    assert not phase_of(job, name).fits
    proposal = propose(job, phase_of(job, name))[0]
    assert proposal == "rounds.handover=stop"
    assert phase_of(plan_of(FLAGSHIP, lack, *SPARING, proposal), name).fits


def test_to_end_engines_is_not_proposed_where_none_sleeps():
    job = plan_of(FLAGSHIP, "hardware.host_gib=60", "rounds.count=2")
    assert not any("handover" in each for each in propose(job, phase_of(job, REGENERATE_HOST)))


def test_more_rounds_are_proposed_with_ended_engines_where_they_could_not_sleep():
    settings = ["rounds.count=1", "hardware.host_gib=100", *SPARING]
    job = plan_of(FLAGSHIP, *settings)
    proposal = propose(job, phase_of(job, "disk"))[0]
    assert proposal == "rounds.count=16 rounds.handover=stop"
    changed = plan_of(FLAGSHIP, *settings, *proposal.split())
    assert all(phase.fits for phase in plan_phases(changed))


# Ahead


@pytest.mark.parametrize(
    ("count", "first_share"), [(2, None), (2, 0.3), (3, 0.2), (3, 0.84), (5, None), (8, 0.5), (16, 0.01)]
)
def test_rolling_shards_of_two_rounds_are_there_at_a_time(count, first_share):
    settings = [f"rounds.count={count}", "data.policy=rolling", "data.disk_gib=9e9", *AHEAD]
    job = plan_of(FLAGSHIP, *settings, f"rounds.first_share={first_share or 'null'}")
    shares = share_shards(10_000, Rounds(count=count, first_share=first_share))
    most = max(len(one) + len(other) for one, other in pairwise(shares)) / 10_000
    everything = rows_of(plan_of(FLAGSHIP, "data.policy=keep"), "disk")["all shards"].num_bytes
    shard = job.shard_tokens * (job.tap_bytes + 5)
    for name in ("disk", "shards at any time"):
        row = rows_of(job, name)["two rounds' shards"]
        assert row.num_bytes == pytest.approx(min(everything, most * everything + shard), rel=1e-3)


def test_kept_shards_are_all_there_anyhow():
    rows = [rows_of(plan_of(FLAGSHIP, "data.policy=keep", *more), "disk") for more in ([], AHEAD)]
    assert rows[0]["all shards"] == rows[1]["all shards"]


def test_a_single_round_has_none_ahead_of_it():
    ahead, alone = (plan_of(TINY, "rounds.count=1", *more) for more in (["rounds.ahead=true"], []))
    assert plan_phases(ahead) == plan_phases(alone)


def test_shards_outgrow_their_room_with_two_rounds_of_them():
    prompts = [Rendered(f"{number}", [1] * 52) for number in range(1000)]  # and 48 tokens of answers
    groups = [prompts[start : start + 100] for start in range(0, 1000, 100)]
    everything = 1000 * 100 * (4 * 256 * 2 + 5)
    settings = ["data.policy=rolling", "rounds.count=4", "rounds.first_share=0.1"]  # then 0.3 each
    room = f"data.disk_gib={0.6 * everything / GIB + 1e-9}"
    check_room(tiny_recipe(*settings, "rounds.ahead=true", room), groups, hidden_size=256)
    short = f"data.disk_gib={0.59 * everything / GIB}"
    check_room(tiny_recipe(*settings, short), groups, hidden_size=256)
    with pytest.raises(UserError, match="at a time"):
        check_room(tiny_recipe(*settings, "rounds.ahead=true", short), groups, hidden_size=256)


def test_the_checkpoint_that_drafts_is_one_more():
    turns, ahead = (rows_of(plan_of(FLAGSHIP, *more), "disk")["checkpoints"] for more in ([], AHEAD))
    assert ahead.num_bytes == 4 / 3 * turns.num_bytes
    assert "1 that drafts" in ahead.formula


def test_a_cpu_holds_engines_and_trainer_at_a_time():
    turns, ahead = plan_of(TINY), plan_of(TINY, "rounds.ahead=true")
    parts = [phase_of(turns, name).need_gib for name in (REGENERATE_HOST, TRAIN_HOST)]
    assert phase_of(ahead, TOGETHER).need_gib == pytest.approx(sum(parts))
    names = {phase.name for phase in plan_phases(ahead)}
    assert not names & {REGENERATE_HOST, TRAIN_HOST}
    assert "measure: host memory" in names


def test_engines_of_a_cpu_draft_after_the_first_round():
    assert "drafter" not in rows_of(plan_of(TINY, "rounds.count=1"), REGENERATE_HOST)
    assert "drafter" in rows_of(plan_of(TINY, "rounds.count=2"), REGENERATE_HOST)


def test_engines_and_trainer_on_gpus_of_their_own_need_what_they_need_alone():
    ahead, alone = plan_of(FLAGSHIP, *AHEAD), plan_of(FLAGSHIP, "rounds.count=1")  # both have two each
    for name in (SERVE, TRAIN):
        assert phase_of(ahead, name) == phase_of(alone, name)
    parts = [phase_of(alone, name).need_gib for name in (REGENERATE_HOST, TRAIN_HOST)]
    assert phase_of(ahead, TOGETHER).need_gib == pytest.approx(sum(parts))


def test_engines_share_the_gpus_that_are_theirs():
    settings = [*AHEAD, "rounds.engine_gpus=[3]", "serve.kv_cache_gib=1", "data.engines=2"]
    job = plan_of(TINY, *settings)
    assert (job.engines_on_a_gpu, job.train_ranks) == (2, 3)


def test_turns_are_proposed_where_both_at_a_time_are_too_much():
    settings = [*AHEAD, "data.check_sequences=0", "hardware={gpus: 4, gpu_gib: 40.5, host_gib: 53}"]
    settings += [*SPARING, "train.micro_batch_sequences=6"]  # which the optimizer leaves no room for on a GPU
    job = plan_of(FLAGSHIP, *settings)
    proposal = propose(job, phase_of(job, TOGETHER))[0]
    assert proposal == "rounds.ahead=false rounds.engine_gpus=null rounds.handover=stop"
    changed = plan_of(FLAGSHIP, *settings, *proposal.split())
    assert all(phase.fits for phase in plan_phases(changed))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["hardware.gpus=2"], "write rounds.engine_gpus, GPUs that are the engines' own"),
        (["hardware.gpus=0", "rounds.engine_gpus=[0]"], "leave rounds.engine_gpus out"),
        (["hardware.gpus=2", "rounds.engine_gpus=[2]"], "names GPU 2, hardware.gpus is 2: write 0 to 1"),
        (["hardware.gpus=2", "rounds.engine_gpus=[1, 0]"], "leaves the trainer none of 2 GPUs"),
        (["hardware.gpus=4", "rounds.engine_gpus=[3, 2, 3]"], "names a GPU twice: write [2, 3]"),
        (["rounds.engine_gpus=[1]"], "takes 2 GPUs, rounds.engine_gpus names 1"),
        ([*AHEAD[1:], "data.engines=2"], "take 4, rounds.engine_gpus names 2: write data.engines <= 1"),
        ([*AHEAD[1:], "train.sequences_per_step=7"], "no multiple of 2 ranks"),
    ],
)
def test_gpus_that_are_shared_out_in_vain_are_told(overrides, words):
    (misfit,) = misfits_of("rounds.ahead=true", *overrides)
    assert words in misfit


def test_gpus_of_their_own_are_no_misfit():
    assert not misfits_of(*AHEAD)
    assert not list(count_misfits(plan_of(TINY, "rounds.ahead=true").recipe))


# The command


def test_rounds_ahead_are_planned_side_by_side_and_refused_for_what_is_missing():
    done = run_plan(str(FLAGSHIP), *AHEAD)
    assert "4 GPUs, 2 of them the engines' own" in done.stdout
    assert "regenerate and train: host memory" in done.stdout
    assert "two rounds' shards" in done.stdout
    done = run_plan(str(FLAGSHIP), "rounds.ahead=true")
    assert done.returncode == 2
    assert "write rounds.engine_gpus, GPUs that are the engines' own" in " ".join(done.stderr.split())
