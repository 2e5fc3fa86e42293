"""report.json, the table a person reads, and the points on TensorBoard."""

import json

import pytest
from pydantic import ValidationError
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eval.points import curve_points, write_curves
from eval.report import (
    AtTemperature,
    BranchingPart,
    Decoding,
    DivergencePart,
    DrafterPart,
    EnginePart,
    GreedyPart,
    Latency,
    LosslessPart,
    Report,
    Settings,
    Spread,
    TargetPart,
    TreeDecoding,
    write_report,
)
from eval.table import draw_bar, print_report
from recipes.manifest import Pulse, RoundManifest
from train import pulse

DESIGN_FIELDS = [
    "schema_version",
    "target",
    "drafter",
    "engine",
    "settings",
    "plain",
    "chain",
    "tree",
    "lossless",
    "seconds",
]
DECODING_FIELDS = ["acceptance_length", "tokens_per_second", "steps", "committed_tokens", "accepted_by_depth"]


def decoding(length=2.5, by_depth=(1.0, 0.5), **changes):
    fields = {
        "acceptance_length": length,
        "standard_error": 0.125,
        "mean_of_request_means": 2.75,
        "tokens_per_second": 30.0,
        "steps": 200,
        "committed_tokens": int(200 * length),
        "accepted_by_depth": list(by_depth),
        "repeated_8gram_share": 0.0625,
        "coalesced": False,
        "undrafted_steps": 0,
    }
    return Decoding(**(fields | changes))


SETTINGS = Settings(
    suite="stdlib:heldout",
    n_prompts=4,
    temperature=0.0,
    max_tokens=64,
    concurrency=16,
    seed=0,
    block_size=3,
    budget=None,
)
WARMER = decoding(1.5, (0.4, 0.1))


def tree(length=3.0, by_depth=(1.0, 0.75), nodes_per_step=14.5, **changes):
    return TreeDecoding(**decoding(length, by_depth, **changes).model_dump(), nodes_per_step=nodes_per_step)


def plain():
    return decoding(1.0, (), standard_error=0.0, mean_of_request_means=1.0, tokens_per_second=20.0)


def lossless_part(gap=0.0625, is_near_tie=True):
    divergence = DivergencePart(prompt_id="p3", position=7, gap=gap, is_near_tie=is_near_tie)
    return LosslessPart(
        lossless=is_near_tie,
        n_prompts=4,
        n_diverging=1,
        n_near_ties=int(is_near_tie),
        near_tie_nats=0.25,
        divergences=[divergence],
    )


def report(**changes):
    fields = {
        "target": TargetPart(model="tiny", fingerprint="ab" * 32),
        "drafter": DrafterPart(checkpoint="/runs/checkpoint-400", step=400),
        "engine": EnginePart(vllm="0.32.0", runner="V2", device="cpu", precision="bfloat16"),
        "settings": SETTINGS,
        "plain": plain(),
        "chain": decoding(),
        "lossless": lossless_part(),
        "seconds": {"start plain": 14.0, "plain, T = 0": 30.0},
        "other_temperatures": [AtTemperature(temperature=0.7, plain=plain(), chain=WARMER)],
        "recipe": None,
        "provenance": {},
    }
    return Report(**(fields | changes))


def tree_report(**changes):
    """The same with trees of at most 15 nodes, one of which says what plain decoding does not."""
    greedy = GreedyPart(
        n_diverging=1,
        n_near_ties=0,
        divergences=[DivergencePart(prompt_id="p1", position=2, gap=0.5, is_near_tie=False)],
    )
    warmer = AtTemperature(
        temperature=0.7, plain=plain(), chain=WARMER, tree=tree(1.75, (0.5, 0.25), nodes_per_step=15.0)
    )
    fields = {
        "settings": SETTINGS.model_copy(update={"budget": 15}),
        "tree": tree(tokens_per_second=35.0),
        "lossless": lossless_part().model_copy(update={"lossless": False, "tree": greedy}),
        "other_temperatures": [warmer],
    }
    return report(**(fields | changes))


def waited(step_ms):
    return Latency(
        first_token=Spread(p50=1234.4, p99=2345.6),
        between_chunks=Spread(p50=step_ms, p99=4 * step_ms),
        per_token=Spread(p50=step_ms / 2, p99=99.96),
        step_ms=step_ms,
    )


def full_report():
    """All that a report can hold since its first version."""
    known = {"interval": (2.25, 2.75), "latency": waited(12.34)}
    lookup = decoding(1.25, (0.2, 0.05), latency=waited(9.876), tokens_per_second=25.0)
    shown = tree_report(
        chain=decoding(**known),
        baselines={"ngram": lookup, "eagle3": lookup},
        gpu_gib={"plain": 120.04, "chain": 121.5},
        branching=BranchingPart(shared_steps=90, failed=80, held=30, short=4, depth_after=1.5),
        settings=SETTINGS.model_copy(update={"budget": 15, "thinking": "off"}),
    )
    warmer = shown.other_temperatures[0].model_copy(update={"baselines": shown.baselines})
    return shown.model_copy(update={"other_temperatures": [warmer]})


def printed(shown, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_report(shown, console)
    return console.export_text()


@pytest.mark.parametrize("written", [report(), tree_report(), full_report()])
def test_a_report_survives_its_file(written, tmp_path):
    write_report(tmp_path / "report.json", written)
    text = (tmp_path / "report.json").read_text()
    assert Report.model_validate_json(text) == written
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_file_has_the_fields_that_people_and_scripts_rely_on(tmp_path):
    write_report(tmp_path / "report.json", report())
    content = json.loads((tmp_path / "report.json").read_text())
    assert set(DESIGN_FIELDS) <= set(content)
    assert (content["schema_version"], content["tree"]) == (1, None)
    for section in (content["plain"], content["chain"], content["other_temperatures"][0]["chain"]):
        assert set(DECODING_FIELDS) <= set(section)


def test_a_tree_stands_in_the_file_as_the_chain_does(tmp_path):
    write_report(tmp_path / "report.json", tree_report())
    content = json.loads((tmp_path / "report.json").read_text())
    assert set(content["tree"]) == {*content["chain"], "nodes_per_step"}
    assert content["settings"]["budget"] == 15
    assert content["lossless"]["lossless"] is False
    assert content["lossless"]["tree"]["divergences"][0]["gap"] == 0.5


def strip(content, *names):
    """Without these fields, wherever they stand."""
    if isinstance(content, list):
        return [strip(each, *names) for each in content]
    if not isinstance(content, dict):
        return content
    return {name: strip(value, *names) for name, value in content.items() if name not in names}


def test_a_report_from_before_there_were_baselines_latency_and_thinking_is_read_and_shown():
    later = ("baselines", "latency", "interval", "gpu_gib", "thinking", "branching")
    old = strip(json.loads(tree_report().model_dump_json()), *later)
    read = Report.model_validate_json(json.dumps(old))
    assert read == tree_report()
    text = printed(read)
    for word in ("ms a", "with 95 %", "GiB", "thinking", "deep"):
        assert word not in text
    assert curve_points(read, simulated=None)["accept_real/tree"] == 3.0


@pytest.mark.parametrize("change", [{"schema_version": 2}, {"acceptance": 3.0}, {"seconds": {"plain": "12"}}])
def test_a_report_of_another_shape_is_refused(change):
    with pytest.raises(ValidationError):
        Report.model_validate(report().model_dump() | change)


def test_the_table_shows_plain_and_chain_at_each_temperature():
    text = printed(report())
    numbers = ("2.50", "1.50", "±0.12", "1.50x", "500", "200", "6.2%")
    for expected in ("T = 0.7", *numbers, "stdlib:heldout", "V2"):
        assert expected in text


def cells(shown, label):
    """What stands in one row of the table."""
    (line,) = (line for line in printed(shown).splitlines() if line.strip().startswith(label))
    return line.split(label)[1].split()


def test_the_trees_column_stands_beside_the_chains():
    shown = tree_report()
    assert cells(shown, "acceptance length") == ["1.00", "2.50", "3.00", "1.00", "1.50", "1.75"]
    assert cells(shown, "against plain") == ["1.00x", "1.50x", "1.75x", "1.00x", "1.50x", "1.50x"]
    assert "plain   chain    tree     plain     chain      tree" in printed(shown)


def test_baselines_stand_beside_ours_with_their_speed_up_and_without_bars():
    shown = full_report()
    text = printed(shown)
    assert "ngram" in text
    assert text.index("eagle3") < text.index("share of steps")
    assert "ngram" not in text[text.index("share of steps") : text.index("acceptance length with 95 %")]
    assert text.count("1.25x") == 4


def test_times_have_three_digits_and_a_table_of_their_own():
    shown = report(chain=decoding(latency=waited(12.34)), other_temperatures=[])
    assert cells(shown, "ms a step") == ["unknown", "12.3"]
    assert cells(shown, "ms a token, p50") == ["unknown", "6.17"]
    assert cells(shown, "ms to first token, p50") == ["unknown", "1234"]


def test_what_is_known_beside_the_tables_is_told_in_a_line_each():
    text = " ".join(printed(full_report(), width=200).split())
    assert "by a bootstrap over prompts: chain 2.25 to 2.75 at T = 0" in text
    assert "its cache included: plain 120.0, chain 121.5" in text
    assert "trees of 15 nodes, thinking off" in text
    assert "80 of the 90 steps at T = 0 that both began, trees hold the target's token in 37.5%" in text
    assert "and go on 1.50 deep; their spine is too short in 5.0%" in text


def test_an_unknown_error_is_called_unknown():
    assert cells(report(chain=decoding(standard_error=None)), "standard error") == ["unknown", "±0.12"]


@pytest.mark.parametrize("shown", [report(), tree_report(), full_report()])
def test_the_table_fits_eighty_columns(shown):
    narrow, wide = printed(shown, width=80), printed(shown)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    assert narrow.count("T = 0.7") == wide.count("T = 0.7")  # no head is broken in two


def test_temperatures_that_do_not_fit_abreast_go_into_a_table_below():
    warmer = tree_report().other_temperatures[0]
    warmest = warmer.model_copy(update={"temperature": 1.0})
    text = printed(tree_report(other_temperatures=[warmer, warmest]))
    assert text.count("verification steps") == 2
    assert max(map(len, text.splitlines())) <= 100


def test_bars_are_as_long_as_their_share():
    shares = (0, 1 / 32, 0.5, 0.53125, 1)
    assert [draw_bar(share, cells=4) for share in shares] == ["", "▏", "██", "██▏", "████"]


def test_each_depth_has_a_bar_and_a_share_for_each_temperature():
    lines = printed(report()).splitlines()
    first = next(line for line in lines if line.strip().startswith("1 "))
    second = next(line for line in lines if line.strip().startswith("2 "))
    assert first.count("█") == 2 * second.count("█") == 40
    assert "100.0%" in first
    assert "40.0%" in first


def test_a_trees_bar_stands_beside_the_chains():
    lines = printed(tree_report(), width=80).splitlines()
    first, second = (next(line for line in lines if line.strip().startswith(k)) for k in ("1 ", "2 "))
    assert first.split() == ["1", "█" * 20, "100.0%", "█" * 20, "100.0%", "40.0%", "50.0%"]
    assert second.split() == ["2", "█" * 10, "50.0%", "█" * 15, "75.0%", "10.0%", "25.0%"]


def test_a_line_says_how_many_nodes_a_step_verified():
    assert "verified, of 15: 14.5 at T = 0, 15.0 at T = 0.7" in printed(tree_report())
    assert "nodes" not in printed(report())


def test_chain_and_tree_have_a_verdict_each():
    text = " ".join(printed(tree_report()).split())
    assert "chain lossless at T = 0: 3 of 4 responses equal" in text
    assert "tree NOT LOSSLESS at T = 0: 3 of 4 responses equal" in text
    assert "gaps: 0.500" in text


def test_near_ties_are_counted_with_their_gaps():
    text = " ".join(printed(report()).split())
    assert "3 of 4 responses equal" in text
    assert "gaps: 0.062" in text or "gaps: 0.063" in text


def test_a_real_divergence_is_called_one():
    assert "NOT LOSSLESS" in printed(report(lossless=lossless_part("outside the top k", is_near_tie=False)))


def test_merged_chunks_and_undrafted_steps_are_said():
    odd = decoding(coalesced=True, standard_error=None, mean_of_request_means=None, undrafted_steps=3)
    text = printed(report(chain=odd))
    assert "merged the chunks" in text
    assert "3 steps had no draft" in text


def test_a_doubt_names_the_decoding_it_is_about():
    odd = tree(coalesced=True, undrafted_steps=3)
    text = " ".join(printed(tree_report(tree=odd, chain=decoding(coalesced=True))).split())
    assert "note: chain at T = 0, tree at T = 0: the server merged" in text
    assert "note: tree at T = 0: 3 steps" in text


def test_an_acceptance_of_next_to_nothing_names_the_usual_suspects():
    text = printed(report(chain=decoding(1.04, (0.03, 0.01))))
    for suspect in ("taps", "mask id", "window", "template", "runner"):
        assert f" {suspect} " in text
    assert " taps " not in printed(report(chain=decoding(1.06, (0.05, 0.01))))


def test_a_report_without_a_plain_run_prints_no_speed_up():
    text = printed(report(plain=None, lossless=None, other_temperatures=[]))
    assert "plain" not in text


def test_curves_hold_acceptance_depths_time_and_gap_at_their_step(tmp_path):
    write_curves(tmp_path, 400, curve_points(report(), simulated=3.0))
    events = EventAccumulator(str(tmp_path)).Reload()
    found = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert {tag: (points[0].step, points[0].value) for tag, points in found.items()} == {
        "accept_real/chain": (400, 2.5),
        "accept_real/depth_1": (400, 1.0),
        "accept_real/depth_2": (400, 0.5),
        "accept_gap": (400, 0.5),
        "time/measure_s": (400, 44.0),
    }


def test_a_tree_has_a_curve_of_its_own_and_depths_and_gap_stay_the_chains():
    with_tree, without = (curve_points(shown, simulated=3.0) for shown in (tree_report(), report()))
    assert with_tree == without | {"accept_real/tree": 3.0}


def test_a_report_goes_on_with_the_curves_of_the_pulses():
    pulses = [
        Pulse(temperature=0.0, is_chain=is_chain, steps=2, committed_tokens=4, reached=[2])
        for is_chain in (True, False)
    ]
    begun = RoundManifest(
        round=1,
        checkpoint="c",
        pulses=pulses,
        emitted_tokens=0,
        request_steps=0,
        engine_seconds=0.0,
        num_engines=0,
    )
    tags = {tag for tag, _ in pulse.drafter_points(begun, simulated=3.0, num_drafts=2)}
    assert tags == curve_points(tree_report(), simulated=3.0).keys() - {"time/measure_s"}


def test_there_is_no_gap_without_a_simulated_length():
    assert "accept_gap" not in curve_points(report(), simulated=None)


def test_a_second_measurement_adds_its_points_to_the_same_curves(tmp_path):
    for step, length in (100, 1.5), (200, 2.0):
        write_curves(tmp_path, step, curve_points(report(chain=decoding(length)), None))
    points = EventAccumulator(str(tmp_path)).Reload().Scalars("accept_real/chain")
    assert [(point.step, point.value) for point in points] == [(100, 1.5), (200, 2.0)]
