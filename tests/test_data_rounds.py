"""data/rounds.py and data/host.py: who makes what in which round, and that nothing is done twice."""

import itertools
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from data import host
from data.engines import Command, Measurement, Swap
from data.filling import Tally, count_captured
from data.host import Fleet, Order, take_pulses, take_round
from data.rounds import check_shares, of_round, read_round, share_shards
from data.shard_maker import count_pulse
from data.shards import shard_name
from recipes.errors import UserError
from recipes.manifest import Pulse, ShardEntry, ShardManifest
from recipes.schema import Rounds
from serve.generation import Answer
from tests.drafters import tiny_recipe


@pytest.mark.parametrize(
    ("num_shards", "rounds", "expected"),
    [
        (10, Rounds(), [(0, 10)]),
        (9, Rounds(count=3), [(0, 3), (3, 6), (6, 9)]),
        (10, Rounds(count=3, first_share=0.6), [(0, 6), (6, 8), (8, 10)]),
        (7, Rounds(count=4, first_share=0.5), [(0, 4), (4, 5), (5, 6), (6, 7)]),
        (2, Rounds(count=3), [(0, 1), (1, 1), (1, 2)]),
        (1, Rounds(count=1, first_share=0.3), [(0, 1)]),
    ],
)
def test_every_shard_is_of_one_round(num_shards, rounds, expected):
    shares = share_shards(num_shards, rounds)
    assert [(share.start, share.stop) for share in shares] == expected


def test_a_round_without_data_is_a_mistake():
    check_shares(3, Rounds(count=3))
    with pytest.raises(UserError, match=r"2 shards, shared out as 1, 0, 1: round 2 would have none; lower"):
        check_shares(2, Rounds(count=3))


def answers(*chunks: list[int]) -> list[Answer]:
    return [Answer([1] * sum(each), "stop", torch.zeros(0), each) for each in chunks]


def test_a_pulse_counts_steps_after_the_prefills():
    pulse = count_pulse(answers([1, 3, 1], [1], [1, 4]), 0.7, is_chain=True)
    assert (pulse.steps, pulse.committed_tokens, pulse.reached) == (3, 8, [2, 2, 1])
    assert pulse.acceptance_length == pytest.approx(8 / 3)
    assert 1 + sum(pulse.reached) / pulse.steps == pytest.approx(pulse.acceptance_length)


def test_a_pulse_without_a_step_is_a_mistake():
    with pytest.raises(UserError, match=r"raise rounds\.pulse_prompts"):
        count_pulse(answers([1], [1]), 0.0, is_chain=True)


@pytest.mark.parametrize(("policy", "files"), [("keep", "0123"), ("rolling", "23")])
def test_a_round_trains_on_shards_that_are_there(policy, files):
    entries = [
        ShardEntry(file=f"{n}", sha256="0" * 64, sequences=1, tokens=2, supervised_tokens=1, round=n // 2)
        for n in range(6)
    ]
    manifest = ShardManifest.model_construct(shards=entries)
    assert "".join(entry.file for entry in of_round(manifest, 1, policy).shards) == files


# The host


class Writer:
    def __init__(self) -> None:
        self.consumed: list[int] = []
        self.manifest = ShardManifest.model_construct(shards=[])

    def consume_before(self, number: int) -> None:
        self.consumed.append(number)


class Plan:
    """Six shards of three prompts, of which some are there; another five prompts were too long."""

    def __init__(self, folder: Path, there: set[int], *overrides: str) -> None:
        self.recipe = tiny_recipe(f"output_dir={folder}", "rounds.count=3", "rounds.budget=7", *overrides)
        self.writer = Writer()
        self.groups = [[f"prompt {number}"] * 3 for number in range(6)]
        self.num_prompts = 6 * 3 + 5
        self.left_out: dict[str, int] = {}
        self.folder, self.spool = folder / "shards", folder / "spool"
        self.folder.mkdir()
        self.there: set[int] = set()
        self.is_finished = False
        self.write(there)

    def write(self, numbers: Iterable[int]) -> None:
        """Of the three answers of each, one was empty and one was cut off."""
        self.there |= set(numbers)
        for number in numbers:
            name = shard_name(number)
            (self.folder / name).write_bytes(b"states")
            made = {"sequences": 1, "tokens": 10, "supervised_tokens": 5, "incomplete": 1}
            self.writer.manifest.shards.append(ShardEntry(file=name, sha256="0" * 64, **made))

    def find_missing(self) -> list[int]:
        return [number for number in range(6) if number not in self.there]

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def done(monkeypatch) -> list[object]:
    """What the engines were asked for, in order."""
    happened: list[object] = []

    @contextmanager
    def running_engines(recipe, folder, spool, most, drafting=None):
        happened.append(("start", drafting and (drafting.ckpt.name, drafting.budget)))
        yield ["engine"]
        happened.append("stop")

    def make_shards(plan, engines, numbers, tally, of_round):
        plan.write(numbers)
        happened.append(("make", list(numbers), of_round))

    monkeypatch.setattr(host, "is_cuda", lambda: False)
    monkeypatch.setattr(host, "running_engines", running_engines)
    monkeypatch.setattr(host, "make_shards", make_shards)
    monkeypatch.setattr(host, "take_pulses", lambda *_: happened.append("pulse") or [])

    def tell_all(_engines, job):
        if job is not Command.GREET:
            happened.append(("swap", job.ckpt.name) if isinstance(job, Swap) else job.name.lower())

    monkeypatch.setattr(host, "tell_all", tell_all)
    return happened


def take(plan: Plan, *orders: tuple[int, str | None]) -> None:
    with Fleet(plan) as fleet:
        for number, checkpoint in orders:
            take_round(plan, fleet, Order(round=number, checkpoint=checkpoint))


def test_plain_engines_give_way_to_drafting_ones_which_swap(tmp_path, done):
    plan = Plan(tmp_path, there=set())
    take(plan, (0, None), (1, "c/1"), (2, "c/2"))
    assert done == [
        *(("start", None), ("make", [0, 1], 0), "stop"),
        *(("start", ("1", 7)), "pulse", ("make", [2, 3], 1)),
        *(("swap", "2"), "pulse", ("make", [4, 5], 2), "stop"),
    ]
    assert plan.is_finished
    assert [read_round(tmp_path, number).checkpoint for number in range(3)] == [None, "c/1", "c/2"]


def test_a_round_says_what_its_shards_hold_whoever_made_them(tmp_path, done):
    take(Plan(tmp_path, there={0, 2}), (0, None), (1, "c/1"))
    first, second = (read_round(tmp_path, number).captured for number in range(2))
    assert (first.sequences, first.tokens, first.shard_bytes) == (2, 20, 12)
    assert first.dropped == {"prompt_too_long": 5, "empty_answer": 2, "incomplete": 2}
    assert second.dropped == {"prompt_too_long": 0, "empty_answer": 2, "incomplete": 2}
    assert first.least_cosine is None


def test_the_least_cosine_of_a_round_is_that_of_any_layer(tmp_path):
    tally = Tally(least_cosines={2: 0.9995, 4: 0.9991})
    assert count_captured(Plan(tmp_path, there={0, 1}), 0, tally).least_cosine == 0.9991


@pytest.mark.parametrize(
    ("has_gpu", "timed"),
    [
        (False, [{"start"}, {"start", "pulse"}, {"swap", "pulse"}]),
        (True, [{"start"}, {"start", "pulse", "sleep"}, {"wake", "swap", "pulse"}]),
    ],
)
def test_what_a_round_spends_on_its_engines_is_timed(tmp_path, done, monkeypatch, has_gpu, timed):
    ticks = itertools.count(0.0, 2.0)
    monkeypatch.setattr(host.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(host, "is_cuda", lambda: has_gpu)
    take(Plan(tmp_path, there=set()), (0, None), (1, "c/1"), (2, "c/2"))
    reports = [read_round(tmp_path, number) for number in range(3)]
    kinds = ("start", "wake", "swap", "pulse", "sleep")
    seconds = [{kind: getattr(each, f"{kind}_seconds") for kind in kinds} for each in reports]
    assert seconds == [{kind: 2.0 if kind in those else None for kind in kinds} for those in timed]


@pytest.mark.parametrize(
    ("settings", "consumed"),
    [
        (["data.policy=keep"], []),
        (["data.policy=rolling"], [0, 1, 2]),
        (["data.policy=rolling", "rounds.ahead=true"], [-1, 0, 1]),  # the round before is being trained on
    ],
)
def test_rolling_shards_are_consumed_once_they_were_trained_on(tmp_path, done, settings, consumed):
    plan = Plan(tmp_path, set(), *settings)
    take(plan, (0, None), (1, "c/1"), (2, "c/2"))
    assert plan.writer.consumed == consumed


DRAFTING = ["start", "pulse", "make"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], ["stop", *DRAFTING, "sleep", "wake", "swap", "pulse", "make", "stop"]),
        (["rounds.handover=stop"], ["stop", *DRAFTING, "stop", *DRAFTING, "stop"]),
        (["rounds.ahead=true"], ["stop", *DRAFTING, "swap", "pulse", "make", "stop"]),
    ],
)
def test_gpus_are_left_to_the_trainer_where_it_shares_them(tmp_path, done, monkeypatch, settings, expected):
    monkeypatch.setattr(host, "is_cuda", lambda: True)
    take(Plan(tmp_path, set(), *settings), (0, None), (1, "c/1"), (2, "c/2"))
    kinds = [each if isinstance(each, str) else each[0] for each in done]
    assert kinds == ["start", "make", *expected]


def test_the_last_round_has_no_use_for_sleep(tmp_path, done, monkeypatch):
    monkeypatch.setattr(host, "is_cuda", lambda: True)
    take(Plan(tmp_path, set(), "rounds.count=2"), (0, None), (1, "c/1"))
    assert "sleep" not in done
    assert not Rounds(count=2).engines_sleep


def test_after_an_interruption_only_what_is_missing_is_made(tmp_path, done):
    plan = Plan(tmp_path, there={0, 1, 2})
    take(plan, (0, None), (1, "c/1"))
    assert done == [("start", ("1", 7)), "pulse", ("make", [3], 1), "stop"]
    take(plan, (0, None), (1, "c/1"))
    assert done[4:] == []
    assert not plan.is_finished


def test_a_pulse_thinks_as_the_measurement_does(monkeypatch):
    told = []

    class Template:
        def render(self, messages, tools, thinking):
            told.append(thinking)
            return [1, 2]

    monkeypatch.setattr(host, "load_chat_template", lambda target: Template())
    recipe = tiny_recipe("rounds.count=2", "rounds.pulse_prompts=2", "eval.thinking='off'")
    assert len(host._pulse_prompts(recipe)) == len(told) == 2
    assert set(told) == {"off"}


def test_a_pulse_asks_for_chain_and_trees_at_each_temperature(monkeypatch):
    recipe = tiny_recipe("rounds.count=2", "rounds.pulse_prompts=2")
    asked: list[Measurement] = []

    def share_out(_engines, jobs):
        asked.extend(jobs)
        for job in reversed(jobs):
            temperature = job.sampling.temperature
            yield Pulse(
                temperature=temperature, is_chain=job.is_chain, steps=1, committed_tokens=1, reached=[]
            )

    monkeypatch.setattr(host, "share_out", share_out)
    pulses = take_pulses(recipe, [])
    assert [(pulse.temperature, pulse.is_chain) for pulse in pulses] == [
        *((0.0, True), (0.0, False)),
        *((0.7, True), (0.7, False)),
    ]
    assert {len(job.prompts) for job in asked} == {2}
    assert {job.sampling.max_tokens for job in asked} == {recipe.eval.max_tokens}
