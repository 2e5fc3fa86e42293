"""The drafter in the repository: that it is the embedded target's, and how much of it the engines accept.

Measured on a CPU with the first held-out prompts, greedily: as a chain and as trees of three sizes, and in
stock vLLM, which must accept the same of the same checkpoint.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from drafters import EMBEDDED_TARGET, REPOSITORY, TINY_RECIPE, tiny_recipe

from eval.report import Decoding, Report
from eval.served import run_tree_pass, warm_up
from eval.suite import load_suite
from recipes.manifest import CheckpointManifest, identify_target, read_manifest
from serve.checkpoint import check_checkpoint
from serve.engine import child_environment, engine_arguments, make_stock
from serve.plan import MANIFEST_NAME
from serve.server import serving

pytestmark = pytest.mark.engine

DRAFTER = REPOSITORY / "recipes" / "embedded" / "drafter"
RECIPE = tiny_recipe()
MOST_BYTES = 12_000_000
NUM_PROMPTS = 64
LEAST_ACCEPTED = 3.5  # tokens a step of the chain: 3.65, and 0.17 is the standard error over prompts
SLACK = 0.05  # tokens a step by which near-ties, which send texts other ways, may hide what more nodes gain
STOCK_PROMPTS, STOCK_TOKENS = 8, 32  # few: stock kernels take their time in Triton's interpreter
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s"'`(=])(~?/\w.*)""", re.MULTILINE)


# Whose it is


def test_it_fits_the_embedded_target():
    summary = check_checkpoint(DRAFTER, str(EMBEDDED_TARGET))
    assert (summary.block_size, summary.dtype) == (8, "bfloat16")


def test_the_server_takes_it_for_its_target():
    command = [sys.executable, "serve/run.py", "--ckpt", str(DRAFTER), "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint fits its target" in done.stdout


def test_it_names_the_target_as_it_is_now():
    manifest = read_manifest(DRAFTER / MANIFEST_NAME, CheckpointManifest)
    assert manifest.target == identify_target(RECIPE.target)


def test_it_is_small():
    assert sum(path.stat().st_size for path in DRAFTER.iterdir()) <= MOST_BYTES


def absolute_paths(text: str) -> list[str]:
    return ABSOLUTE_PATH.findall(text)


def test_no_text_of_it_says_where_it_was_made():
    texts = {path.name: path.read_text() for path in DRAFTER.iterdir() if path.suffix != ".safetensors"}
    assert {"README.md", "config.json", MANIFEST_NAME} <= set(texts)
    assert not [path for text in texts.values() for path in absolute_paths(text)]


@pytest.mark.parametrize("text", ['{"a": "/some/where"}', '["output_dir=/some/x"]', "in ~/runs"])
def test_a_text_that_says_so_would_show(text):
    assert absolute_paths(text)


# How much is accepted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    """The chain beside trees of 15 nodes and plain decoding, as a user measures them."""
    options = {
        "--recipe": TINY_RECIPE,
        "--ckpt": DRAFTER,
        "--num-prompts": NUM_PROMPTS,
        "--temperature": 0,
        "--tree-budget": 15,
        "--out": folder / "report.json",
    }
    words = [str(word) for option in options.items() for word in option]
    done = subprocess.run(
        [sys.executable, "eval/measure.py", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Report.model_validate_json((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def trees(report: Report, folder: Path) -> dict[int, Decoding]:
    """By budget."""
    assert report.tree is not None
    return {15: report.tree} | {budget: measure_trees(budget, report, folder) for budget in (31, 63)}


def measure_trees(budget: int, report: Report, folder: Path) -> Decoding:
    """Trees alone, on the report's prompts."""
    assert RECIPE.eval is not None
    asked = report.settings
    settings = RECIPE.eval.model_copy(update={"max_tokens": asked.max_tokens})
    prompts = load_suite(asked.suite, asked.n_prompts, None)
    log = folder / f"tree-{budget}.log"
    with serving(RECIPE.target, RECIPE.serve, DRAFTER, budget, log) as url:
        warm_up(url)
        return run_tree_pass(url, prompts, settings, asked.block_size - 1, 0.0, lambda: None).decoding


def test_it_was_measured_on_prompts_kept_from_training(report):
    asked = report.settings
    assert (asked.suite, asked.n_prompts, asked.temperature) == ("stdlib:heldout", NUM_PROMPTS, 0.0)
    assert asked.max_tokens == 48


def test_the_chain_commits_three_and_a_half_tokens_a_step(report):
    assert report.chain.acceptance_length >= LEAST_ACCEPTED
    assert report.plain.acceptance_length == 1


def test_drafted_text_parts_from_plain_decodings_at_near_ties_alone(report):
    found = report.lossless
    parted = [each for part in (found, found.tree) for each in part.divergences if not each.is_near_tie]
    assert not parted
    assert found.lossless


def test_trees_of_15_nodes_commit_no_less_than_the_chain(report, trees):
    assert trees[15].acceptance_length >= report.chain.acceptance_length


@pytest.mark.parametrize("budget", [31, 63])
def test_larger_trees_commit_more_than_the_chain(report, trees, budget):
    assert trees[budget].acceptance_length > report.chain.acceptance_length


@pytest.mark.parametrize(("fewer", "more"), [(15, 31), (31, 63)])
def test_more_nodes_commit_no_fewer_tokens(trees, fewer, more):
    assert trees[more].acceptance_length >= trees[fewer].acceptance_length - SLACK


# What it is worth in stock vLLM


@dataclass(frozen=True)
class Told:
    """What an engine answered."""

    token_ids: list[list[int]]
    drafts: int
    """Steps that verified some."""
    accepted: int

    @property
    def accepted_per_step(self) -> float:
        return self.accepted / self.drafts


@pytest.fixture(scope="module")
def stock(folder: Path) -> Told:
    """Nothing of ours but the Triton backend."""
    (told,) = ask("stock", folder)
    return told


@pytest.fixture(scope="module")
def ours(folder: Path) -> tuple[Told, Told]:
    """Without the mend of the drafter's context keys, and with it."""
    unmended, mended = ask("ours", folder)
    return unmended, mended


def ask(kind: str, folder: Path) -> list[Told]:
    """Runs tests/stock_probe.py."""
    arguments = engine_arguments(RECIPE.target, RECIPE.serve, DRAFTER, None)
    environment = child_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if kind == "stock":
        make_stock(arguments, environment)
    prompts = load_suite("stdlib:heldout", STOCK_PROMPTS, None)
    asked, told = folder / f"{kind}-asked.json", folder / f"{kind}-told.json"
    asked.write_text(
        json.dumps(
            {
                "arguments": arguments,
                "chats": [prompt.messages for prompt in prompts],
                "max_tokens": STOCK_TOKENS,
                "compare_mend": kind == "ours",
            }
        )
    )
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "stock_probe.py", asked, told],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [Told(**each) for each in json.loads(told.read_text())]


def test_stock_vllm_says_and_accepts_what_ours_does_without_its_mend(stock, ours):
    unmended, _ = ours
    assert stock == unmended
    assert stock.drafts > STOCK_PROMPTS


def test_the_mend_costs_no_acceptance(stock, ours):
    _, mended = ours
    assert mended.accepted_per_step >= 0.98 * stock.accepted_per_step


def test_the_mend_was_in_one_of_the_two(ours):
    unmended, mended = ours
    assert (unmended.drafts, unmended.accepted) != (mended.drafts, mended.accepted)
