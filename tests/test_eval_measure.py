"""`eval/measure.py` from its command line to report.json, with stub engines for vLLM's."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from drafters import TINY_RECIPE, tiny_recipe, write_random_drafter
from stub_engine import Answer, Stub, serve_stub, tokens_in_chunks

from eval import measure
from eval.job import Options, make_job
from eval.report import Report
from recipes.errors import UserError
from recipes.load import write_resolved
from serve.engine import MOST_NODES, check_budget

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = REPOSITORY / "eval" / "measure.py"
NUM_PROMPTS = 3
STEPS = [[1, 8, 3, 2], [1, 4, 4], [1, 1, 1, 6]]  # chunk sizes of the chain's answers
TREE_STEPS = [[1, 8, 5], [1, 8], [1, 3, 5]]  # of the tree's: the same tokens


def write_prompts(path, words):
    chats = ({"messages": [{"role": "user", "content": f"{words} {i}"}]} for i in range(NUM_PROMPTS))
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


@pytest.fixture
def suite(tmp_path):
    return write_prompts(tmp_path / "suite.jsonl", "held out")


@pytest.fixture
def recipe(tmp_path):
    """The demo's, with training prompts that are read at once."""
    prompts = write_prompts(tmp_path / "training.jsonl", "trained on")
    write_resolved(tiny_recipe(f"data.prompts={prompts}"), tmp_path / "recipe")
    return tmp_path / "recipe" / "recipe.yaml"


def options(tmp_path, **changes):
    given = {
        "url": None,
        "ckpt": None,
        "recipe": None,
        "out": tmp_path / "report.json",
        "overrides": {},
        "tensorboard": None,
        "step": None,
        "simulated": None,
    }
    return Options(**(given | changes))


def checkpoint_job(tmp_path, suite, recipe, **changes):
    """What --ckpt measures: the three prompts and, unless `changes` say so, no trees."""
    ckpt = write_random_drafter(tmp_path / "checkpoint-5")
    overrides = {"suite": str(suite), "num_prompts": NUM_PROMPTS, "tree_budget": 0} | changes
    return make_job(options(tmp_path, ckpt=ckpt, recipe=recipe, overrides=overrides))


def run_script(*arguments, timeout=120):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def chain_stub(**changes):
    return Stub([Answer(tokens_in_chunks(sizes)) for sizes in STEPS], num_drafts=7, **changes)


def tree_stub(num_nodes, odd_token=None):
    """Says what the chain says, but for the last prompt's last token where an odd one is given."""
    answers = [tokens_in_chunks(sizes) for sizes in TREE_STEPS]
    if odd_token is not None:
        answers[-1][-1][-1] = odd_token
    return Stub([Answer(chunks) for chunks in answers], num_nodes)


def lookup_stub(num_drafts):
    """Of vLLM's own drafts, one in a step is right."""
    sizes = [[1, *[2] * 6], [1, *[2] * 4], [1, *[2] * 4]]
    return Stub([Answer(tokens_in_chunks(each)) for each in sizes], num_drafts)


def plain_stub():
    """Says what the chain says, but for the second prompt's token 2, which is a near-tie."""
    answers = [Answer([[token] for token in range(100, 100 + sum(sizes))]) for sizes in STEPS]
    odd = [[100], [101], [55], *([token] for token in range(103, 109))]
    tops = [{chunk[0]: -0.1} for chunk in odd]
    tops[2] = {55: -0.7, 102: -0.75}
    answers[1] = Answer(odd, top_logprobs=tops)
    return Stub(answers, num_drafts=0)


@dataclass
class StubServers:
    """Stub engines in the place of `serve.server.serving`, and how they were started."""

    make_tree: Callable[[int], Stub] = tree_stub
    started: list[tuple[Path | None, int | None]] = field(default_factory=list)
    baselines: list[str] = field(default_factory=list)
    stubs: list[Stub] = field(default_factory=list)

    @contextmanager
    def serving(self, target, serve, ckpt, budget, log_path, baseline):
        self.started.append((ckpt, budget))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_text("Using V2 Model Runner\n")
        others = {0: plain_stub, None: chain_stub}
        if baseline is not None:
            self.baselines.append(baseline.name)
            others[0] = partial(lookup_stub, baseline.num_drafts)
        self.stubs.append(others[budget]() if budget in others else self.make_tree(budget))
        with serve_stub(self.stubs[-1]) as url:
            yield url


@pytest.fixture
def stub_servers(monkeypatch):
    servers = StubServers()
    monkeypatch.setattr(measure, "serving", servers.serving)
    return servers


def test_a_served_drafter_is_measured_and_reported(suite, tmp_path):
    with serve_stub(chain_stub()) as url:
        out = tmp_path / "new" / "report.json"
        done = run_script("--url", url, "--suite", suite, "--out", out, "--num-prompts", NUM_PROMPTS)
    assert done.returncode == 0, done.stderr
    report = Report.model_validate_json(out.read_text())
    assert report.chain.acceptance_length == report.other_temperatures[0].chain.acceptance_length == 29 / 8
    assert (report.plain, report.lossless, report.settings.block_size) == (None, None, 8)
    assert report.target.model == "stub-target"
    for expected in ("3.62", "share of steps", str(out)):
        assert expected in done.stdout


def test_a_checkpoint_is_measured_plainly_and_then_as_a_chain(suite, recipe, tmp_path, stub_servers):
    job = checkpoint_job(tmp_path, suite, recipe, temperatures=[0.0, 0.7])
    report = measure.measure(job)
    assert stub_servers.started == [(None, 0), (job.plan.ckpt, None)]
    assert (report.tree, report.settings.budget, report.lossless.tree) == (None, None, None)
    assert report.plain.acceptance_length == 1.0
    assert report.chain.acceptance_length == 29 / 8
    assert (report.engine.runner, report.engine.device, report.engine.precision) == ("V2", "cpu", "bfloat16")
    assert report.target.fingerprint is not None
    assert list(report.seconds) == [
        *("start plain", "warm up plain", "plain, T = 0", "plain, T = 0.7", "plain, T = 0, for comparison"),
        *("start chain", "warm up chain", "chain, T = 0", "chain, T = 0.7"),
    ]


def test_a_tree_budget_has_trees_measured_beside_the_chain(suite, recipe, tmp_path, stub_servers):
    job = checkpoint_job(tmp_path, suite, recipe, temperatures=[0.0, 0.7], tree_budget=15)
    report = measure.measure(job)
    assert stub_servers.started == [(None, 0), (job.plan.ckpt, None), (job.plan.ckpt, 15)]
    assert (report.settings.block_size, report.settings.budget) == (8, 15)
    (warmer,) = report.other_temperatures
    assert report.chain.acceptance_length == warmer.chain.acceptance_length == 29 / 8
    for tree in (report.tree, warmer.tree):
        assert (tree.acceptance_length, tree.steps, tree.nodes_per_step) == (29 / 5, 5, 15.0)
        assert tree.accepted_by_depth == [1.0, 1.0, 0.8, 0.8, 0.4, 0.4, 0.4]
    assert list(report.seconds)[-4:] == ["start tree", "warm up tree", "tree, T = 0", "tree, T = 0.7"]
    # of the first prompt and the last the first steps are shared; the first's chain is accepted whole
    told = {"shared_steps": 2, "failed": 1, "held": 1, "short": 0, "depth_after": 2.0}
    assert report.branching.model_dump() == told


def test_all_engines_are_asked_the_same(suite, recipe, tmp_path, stub_servers):
    changes = {"tree_budget": 15, "thinking": "off", "baselines": ["ngram"]}
    measure.measure(checkpoint_job(tmp_path, suite, recipe, temperatures=[0.7], **changes))
    asked = [sorted(stub.requests, key=lambda body: body["seed"]) for stub in stub_servers.stubs]
    assert len(asked[0]) == 1 + NUM_PROMPTS  # the warm-up
    assert asked[0] == asked[1] == asked[2] == asked[3]
    assert sum("chat_template_kwargs" in body for body in asked[0]) == NUM_PROMPTS


def test_baselines_are_measured_by_name_with_as_many_drafts_as_the_chain(
    suite, recipe, tmp_path, stub_servers
):
    job = checkpoint_job(tmp_path, suite, recipe, temperatures=[0.7, 0.0], baselines=["ngram", "ngram:3"])
    report = measure.measure(job)
    assert stub_servers.started == [(None, 0), (job.plan.ckpt, None), (None, 0), (None, 0)]
    assert stub_servers.baselines == ["ngram", "ngram:3"]
    for at in report.by_temperature():
        assert {name: len(each.accepted_by_depth) for name, each in at.baselines.items()} == {
            "ngram": 7,
            "ngram:3": 3,
        }
        assert {each.acceptance_length for each in at.baselines.values()} == {2.0}
    assert list(report.seconds)[-2:] == ["ngram:3, T = 0.7", "ngram:3, T = 0"]
    assert (tmp_path / "logs" / "measure-ngram-3.log").exists()


def test_a_baseline_is_given_once_and_to_a_checkpoint(suite, recipe, tmp_path):
    with pytest.raises(UserError, match="ngram, ngram: write each once"):
        checkpoint_job(tmp_path, suite, recipe, baselines=["ngram", "ngram"])
    given = {"suite": str(suite), "baselines": ["ngram"]}
    with pytest.raises(UserError, match="--baseline needs --ckpt"):
        make_job(options(tmp_path, url="http://127.0.0.1:9", overrides=given))


def test_a_target_without_a_head_of_its_own_is_refused_before_anything_starts(
    suite, recipe, tmp_path, stub_servers
):
    with pytest.raises(UserError, match="has no MTP head"):
        checkpoint_job(tmp_path, suite, recipe, baselines=["mtp"])
    assert stub_servers.started == []


def test_memory_of_the_gpus_is_told_by_engine(suite, recipe, tmp_path, stub_servers, monkeypatch):
    readings = iter([3.0, 40.0, 3.5, 43.5])  # before and after each
    monkeypatch.setattr(measure, "read_used_gib", lambda: next(readings))
    report = measure.measure(checkpoint_job(tmp_path, suite, recipe, temperatures=[0.7]))
    assert report.gpu_gib == {"plain": 37.0, "chain": 40.0}


def test_nothing_is_said_of_the_memory_of_a_cpu(suite, recipe, tmp_path, stub_servers):
    report = measure.measure(checkpoint_job(tmp_path, suite, recipe, temperatures=[0.7]))
    assert report.gpu_gib == {}


@pytest.mark.parametrize(
    ("flag", "mode", "sent"),
    [
        ("--thinking", "on", {"enable_thinking": True}),
        ("--no-thinking", "off", {"enable_thinking": False}),
        (None, "template", None),
    ],
)
def test_thinking_is_sent_as_asked_and_told_in_the_report(flag, mode, sent, suite, tmp_path):
    stub, out = chain_stub(), tmp_path / "report.json"
    with serve_stub(stub) as url:
        arguments = ["--url", url, "--suite", suite, "--out", out, "--num-prompts", NUM_PROMPTS]
        done = run_script(*arguments, *([flag] if flag else []), "--temperature", 0)
    assert done.returncode == 0, done.stderr
    assert Report.model_validate_json(out.read_text()).settings.thinking == mode
    assert [body.get("chat_template_kwargs") for body in stub.requests[1:]] == [sent] * NUM_PROMPTS


def test_the_trees_divergences_are_told_apart_from_the_chains(suite, recipe, tmp_path, stub_servers):
    stub_servers.make_tree = partial(tree_stub, odd_token=77)
    found = measure.measure(checkpoint_job(tmp_path, suite, recipe, tree_budget=15)).lossless
    assert (found.n_diverging, found.n_near_ties) == (1, 1)
    assert (found.tree.n_diverging, found.tree.n_near_ties) == (2, 1)
    assert [each.gap for each in found.tree.divergences] == [pytest.approx(0.05), "outside the top k"]
    assert not found.lossless


def test_an_engine_that_drafts_no_trees_is_not_reported_as_one(suite, recipe, tmp_path, stub_servers):
    stub_servers.make_tree = lambda budget: chain_stub()
    with pytest.raises(AssertionError, match="trees of 15 nodes, the engine drafts 7"):
        measure.measure(checkpoint_job(tmp_path, suite, recipe, tree_budget=15))


def test_a_running_server_is_measured_as_it_is_whatever_the_recipe_says_of_trees(suite, recipe, tmp_path):
    overrides = {"suite": str(suite), "num_prompts": NUM_PROMPTS}
    with serve_stub(tree_stub(15)) as url:
        job = make_job(options(tmp_path, url=url, recipe=recipe, overrides=overrides))
        report = measure.measure(job)
    assert job.settings.tree_budget == 15
    assert (report.tree, report.settings.budget, len(report.chain.accepted_by_depth)) == (None, None, 15)


def test_a_tree_as_large_as_any_served_can_be_asked_for_and_no_larger(suite, recipe, tmp_path):
    check_budget(checkpoint_job(tmp_path, suite, recipe, tree_budget=MOST_NODES).settings.tree_budget)
    with pytest.raises(UserError, match=f"tree_budget: expected .* {MOST_NODES}, found {MOST_NODES + 1}"):
        checkpoint_job(tmp_path, suite, recipe, tree_budget=MOST_NODES + 1)


def test_greedy_divergences_are_told_with_their_gap(suite, recipe, tmp_path, stub_servers):
    found = measure.measure(checkpoint_job(tmp_path, suite, recipe, temperatures=[0.7, 0.0])).lossless
    assert (found.lossless, found.n_prompts, found.n_diverging, found.n_near_ties) == (True, 3, 1, 1)
    (divergence,) = found.divergences
    assert (divergence.position, divergence.gap) == (2, pytest.approx(0.05))


def test_losslessness_is_unknown_without_a_greedy_run(suite, recipe, tmp_path, stub_servers):
    job = checkpoint_job(tmp_path, suite, recipe, temperatures=[0.7], tree_budget=15)
    assert measure.measure(job).lossless is None


def test_a_kill_in_mid_measure_leaves_no_report(suite, tmp_path):
    out = tmp_path / "out" / "report.json"
    stub = chain_stub(pause_s=0.5)
    with serve_stub(stub) as url:
        arguments = ["--url", url, "--suite", suite, "--out", out, "--num-prompts", NUM_PROMPTS]
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments)], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while len(stub.requests) < 2 and time.monotonic() < deadline:  # the warm-up and one of the prompts
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert len(stub.requests) >= 2
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "nowhere.jsonl", "--url", "http://127.0.0.1:9"], "nowhere.jsonl"),
        (["--suite", "SUITE"], "--ckpt"),
        (["--suite", "SUITE", "--url", "http://127.0.0.1:9", "--ckpt", "here"], "--url"),
        (["--url", "http://127.0.0.1:9"], "--suite"),
        (["--suite", "SUITE", "--url", "http://127.0.0.1:9"], "no server answers"),
        (["--suite", "SUITE", "--url", "http://127.0.0.1:9", "--concurrency", "0"], "concurrency"),
        (["--suite", "SUITE", "--url", "http://127.0.0.1:9", "--tree-budget", "15"], "--ckpt"),
        (["--suite", "SUITE", "--url", "http://127.0.0.1:9", "--baseline", "ngram"], "--ckpt"),
        (["--suite", "SUITE", "--url", "http://127.0.0.1:9", "--tensorboard", "tb"], "--step"),
        (["--suite", "SUITE", "--ckpt", "nowhere", "--recipe", str(TINY_RECIPE)], "nowhere"),
    ],
)
def test_a_mistake_ends_with_code_2_and_says_what(arguments, said, suite, tmp_path):
    arguments = [str(suite) if argument == "SUITE" else argument for argument in arguments]
    done = run_script(*arguments, "--num-prompts", NUM_PROMPTS, "--out", tmp_path / "report.json")
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report.json").exists()


def test_a_server_that_decodes_plainly_is_refused(suite, tmp_path):
    with serve_stub(plain_stub()) as url:
        job = make_job(
            options(tmp_path, url=url, overrides={"suite": str(suite), "num_prompts": NUM_PROMPTS})
        )
        with pytest.raises(UserError, match="decodes plainly"):
            measure.measure(job)


def test_a_suite_that_shares_prompts_with_the_training_set_is_refused(suite, recipe, tmp_path):
    trained_on = (tmp_path / "training.jsonl").read_text().splitlines()[1]
    suite.write_text(suite.read_text() + trained_on + "\n")
    given = options(tmp_path, url="http://127.0.0.1:9", recipe=recipe, overrides={"suite": str(suite)})
    with pytest.raises(UserError, match=r"shares 1 of its 4 prompts .* 'trained on 1'"):
        make_job(given)


def test_the_demos_suite_shares_no_prompt_with_its_training_set(tmp_path):
    job = make_job(options(tmp_path, url="http://127.0.0.1:9", recipe=TINY_RECIPE))
    assert len(job.prompts) == job.settings.num_prompts


def test_an_unwritable_out_is_refused_before_anything_runs(suite, tmp_path):
    overrides = {"suite": str(suite), "num_prompts": NUM_PROMPTS}
    for out in (tmp_path, suite / "report.json"):
        with pytest.raises(UserError, match="--out"):
            make_job(options(tmp_path, url="http://127.0.0.1:9", out=out, overrides=overrides))


def test_the_recipes_eval_section_is_the_default_and_the_command_line_wins(suite, recipe, tmp_path):
    url, overrides = "http://127.0.0.1:9/", {"suite": str(suite), "max_tokens": 9}
    job = make_job(options(tmp_path, url=url, recipe=recipe, overrides=overrides))
    assert (job.settings.concurrency, job.settings.max_tokens) == (job.recipe.eval.concurrency, 9)
    assert job.url == "http://127.0.0.1:9"


def test_points_for_tensorboard_are_written_at_the_given_step(suite, tmp_path):
    with serve_stub(chain_stub()) as url:
        done = run_script(
            *(
                "--url",
                url,
                "--suite",
                suite,
                "--out",
                tmp_path / "report.json",
                "--num-prompts",
                NUM_PROMPTS,
            ),
            *("--tensorboard", tmp_path / "tb", "--step", 7, "--simulated", 4.0),
        )
    assert done.returncode == 0, done.stderr
    assert [path.name.startswith("events.out") for path in (tmp_path / "tb").iterdir()] == [True]
