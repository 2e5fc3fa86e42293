"""tests/compare_objectives.py: who is compared, what is not done twice, and how sure the differences are."""

import numpy as np
import pytest
from compare_objectives import Comparison, Entrant, Result, check_equal_tokens, claim, make_table, split
from drafters import tiny_recipe
from objective_scores import (
    BUDGETS,
    Counts,
    Trained,
    Way,
    count,
    estimate,
    estimate_gain,
    read_accepted,
    settings_of,
    sum_seconds,
    ways_of,
    write_accepted,
)

from eval.acceptance import count_acceptance
from recipes.errors import MachineError, UserError
from serve.client import SpecCounters
from serve.generation import Answer

TEMPERATURES = [0.0, 0.7]


def draw_chunks(num_prompts: int, seed: int) -> list[list[int]]:
    """Of answers, some no longer than the prefill's token."""
    generator = np.random.default_rng(seed)
    return [[1, *generator.integers(1, 9, size=generator.integers(0, 12))] for _ in range(num_prompts)]


def count_chunks(chunks: list[list[int]]) -> Counts:
    return count([Answer([], "stop", None, each) for each in chunks])


def draw_counts(num_prompts: int, seed: int) -> Counts:
    return count_chunks(draw_chunks(num_prompts, seed))


# Who is compared


def test_entrants_differ_in_their_objective_and_seed_alone(tmp_path):
    objectives = ["cross_entropy", "lk:eta=10:decay=3"]
    comparison = Comparison(tmp_path, ["train.steps=9"], objectives, [0, 4])
    recipes = {entrant: comparison.recipe_of(entrant) for entrant in comparison.entrants}
    assert [(each.objective, each.seed) for each in recipes] == [(o, s) for s in (0, 4) for o in objectives]
    lk = recipes[Entrant("lk:eta=10:decay=3", 4)].train
    assert (lk.objective.kind, lk.objective.eta, lk.objective.decay, lk.seed) == ("lk", 10, 3, 4)
    same = {"objective": lk.objective, "seed": 0}
    trains = {recipe.train.model_copy(update=same).model_dump_json() for recipe in recipes.values()}
    assert len(trains) == 1
    assert all(recipe.data == comparison.data_recipe().data for recipe in recipes.values())
    assert len({recipe.output_dir for recipe in recipes.values()}) == len(recipes)


def test_the_recipes_own_objective_keeps_its_decay(tmp_path):
    recipe = Comparison(tmp_path, [], ["kl"], [0]).recipe_of(Entrant("kl", 0))
    assert recipe.train.objective == tiny_recipe().train.objective


def test_each_is_named_once():
    assert split(" kl,lk ,kl,") == ["kl", "lk"]


def test_all_have_the_same_shards(tmp_path):
    recipe = tiny_recipe(f"output_dir={tmp_path / 'kl'}")
    (tmp_path / "data" / "shards").mkdir(parents=True)
    for _ in range(2):
        claim(recipe, tmp_path / "data" / "shards")
    assert (recipe.output_dir / "shards").resolve() == tmp_path / "data" / "shards"


def test_a_folder_of_another_training_is_refused(tmp_path):
    claim(tiny_recipe(f"output_dir={tmp_path}"), tmp_path / "shards")
    claim(tiny_recipe(f"output_dir={tmp_path}", "eval.num_prompts=9"), tmp_path / "shards")
    with pytest.raises(UserError, match="other settings in train"):
        claim(tiny_recipe(f"output_dir={tmp_path}", "train.steps=9"), tmp_path / "shards")


def test_drafters_that_saw_other_tokens_are_not_compared():
    seen = {Entrant("kl", 0): Trained(1.0, None, 70, "a"), Entrant("kl", 1): Trained(1.0, None, 71, "a")}
    check_equal_tokens(seen | {Entrant("lk", 0): Trained(9.0, 2.0, 70, "a")})
    for other in (Trained(1.0, None, 71, "a"), Trained(1.0, None, 70, "b")):
        with pytest.raises(MachineError, match="same tokens"):
            check_equal_tokens(seen | {Entrant("lk", 0): other})


# What is not done twice


def test_a_measurement_of_other_prompts_is_none(tmp_path):
    ways = [way for way in ways_of(TEMPERATURES) if way.engine == BUDGETS[0]]
    counts = {way: draw_counts(5, seed) for seed, way in enumerate(ways)}
    settings = settings_of(tiny_recipe())
    write_accepted(tmp_path, BUDGETS[0], settings, counts)
    found = read_accepted(tmp_path, BUDGETS[0], settings)
    assert found is not None
    assert {way: each.length for way, each in found.items()} == {w: each.length for w, each in counts.items()}
    assert read_accepted(tmp_path, BUDGETS[0], settings_of(tiny_recipe("eval.num_prompts=9"))) is None
    assert read_accepted(tmp_path, BUDGETS[1], settings) is None


def test_concurrency_changes_no_measurement():
    assert settings_of(tiny_recipe("eval.concurrency=3")) == settings_of(tiny_recipe())


def test_each_way_has_an_engine():
    ways = ways_of(TEMPERATURES)
    assert len(set(ways)) == len(ways) == len({str(way) for way in ways}) == 6
    assert {way.engine for way in ways} == set(BUDGETS)


def test_seconds_of_a_training_are_those_of_its_windows():
    assert sum_seconds([(10, 0.5), (25, 0.2), (20, 0.1)]) == pytest.approx(10 * 0.5 + 10 * 0.1 + 5 * 0.2)


# How sure it is


@pytest.mark.parametrize("num_prompts", [2, 3, 17])
def test_lengths_and_errors_are_those_that_a_measurement_reports(num_prompts):
    chunks = [[1, 3, 2], *draw_chunks(num_prompts - 1, seed=num_prompts)]
    sizes = [size for each in chunks for size in each[1:]]
    reached = tuple(sum(size > depth for size in sizes) for depth in range(1, 9))
    counters = SpecCounters(len(sizes), 8 * len(sizes), sum(sizes) - len(sizes), reached)
    reported, ours = count_acceptance(chunks, counters), estimate([count_chunks(chunks)])
    assert ours.value == pytest.approx(reported.acceptance_length)
    assert ours.standard_error == pytest.approx(reported.standard_error or 0.0)
    assert ours.seed_error is None


def test_nothing_is_gained_over_oneself():
    run = draw_counts(9, seed=0)
    gain = estimate_gain([run], [run])
    assert (gain.value, gain.standard_error) == (0, 0)


def test_prompts_that_are_hard_for_both_say_nothing_of_the_difference():
    steps_N = np.full(7, 4)
    base = Counts(steps_N, np.array([4, 9, 30, 12, 5, 21, 8]))
    gains_N = np.array([1, 0, 2, 1, 0, 0, 1])
    gain = estimate_gain([Counts(steps_N, base.tokens_N + gains_N)], [base])
    per_step_N = gains_N / steps_N
    assert gain.value == pytest.approx(per_step_N.mean())
    assert gain.standard_error == pytest.approx(per_step_N.std(ddof=1) / 7**0.5)
    assert gain.standard_error < estimate([base]).standard_error / 5


def test_seeds_are_averaged_and_their_spread_told():
    runs = [draw_counts(11, seed) for seed in range(3)]
    bases = [draw_counts(11, seed) for seed in range(3, 6)]
    gains = [run.length - base.length for run, base in zip(runs, bases, strict=True)]
    gain = estimate_gain(runs, bases)
    assert gain.value == pytest.approx(np.mean(gains))
    assert gain.seed_error == pytest.approx(np.std(gains, ddof=1) / 3**0.5)


def test_the_table_marks_the_best_and_compares_with_the_first():
    trained = [Trained(60.0, 2.0, 70, "a")]
    way, steps_N = Way(0.0, None), np.array([4, 4])
    results = {
        "cross_entropy": Result(trained, {way: [Counts(steps_N, np.array([8, 8]))]}),
        "kl": Result(trained, {way: [Counts(steps_N, np.array([10, 10]))]}),
    }
    table = make_table(results)
    assert list(table.columns[0].cells) == ["cross_entropy", "kl", "kl - cross_entropy"]
    assert list(table.columns[1].cells) == ["2.00 ± 0.00", "**2.50 ± 0.00**", "+0.50 ± 0.00"]
