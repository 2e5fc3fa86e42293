"""What a recipe needs: the arithmetic against the real modules, and what the command prints and refuses."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from data.shards import write_shard_file
from recipes import footprint
from recipes.errors import UserError
from recipes.footprint import (
    GIB,
    SEQUENCE_BYTES,
    Cache,
    cached_layers,
    drafter_key_value_bytes,
    read_target,
    served_drafter_bytes,
    tap_bytes,
)
from recipes.job import Job, Phase
from recipes.load import load_recipe
from recipes.needs import count_misfits, durations, plan_phases
from recipes.plan import PUBLISHED_WIDTHS, find_target
from recipes.remedies import propose
from recipes.schema import Target as TargetSection
from serve.tree_gdn_commit_kernels import allocate_kept
from tests.small_training import DRAFTER, HIDDEN, TAPS_SIZE, make_sequence
from train.drafter import DFlashDrafter

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
TINY, FLAGSHIP = RECIPES / "tiny_cpu.yaml", RECIPES / "qwen36_dflash.yaml"
ALL_AT_ONCE = ("data.policy=keep", "rounds.count=1")
BF16 = 2


def widths_of(name: str) -> dict:
    return json.loads(PUBLISHED_WIDTHS.read_text())[name]["config"]


def plan_of(path: Path, *overrides: str) -> Job:
    recipe = load_recipe(path, overrides)
    known = find_target(recipe.target)
    return Job(recipe, read_target(known.config, known.source), known.is_fetched)


def phase_of(job: Job, name: str) -> Phase:
    (found,) = (phase for phase in plan_phases(job) if phase.name == name)
    return found


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPES / "plan.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(scope="module")
def flagship() -> Job:
    return plan_of(FLAGSHIP)


@pytest.fixture(scope="module")
def tiny() -> Job:
    return plan_of(TINY)


# Parameters


@pytest.mark.parametrize("path", [TINY, FLAGSHIP])
def test_a_drafter_has_the_parameters_of_the_real_module(path):
    job = plan_of(path)
    with torch.device("meta"):
        drafter = DFlashDrafter(job.recipe.drafter, job.target.hidden_size)
    assert job.num_parameters == count(drafter)


def test_the_flagships_drafter_has_1_73_billion_parameters(flagship):
    assert flagship.num_parameters == 1_730_213_120


def test_the_embedded_target_has_the_parameters_of_its_files(tiny, embedded_target):
    sizes = []
    for path in embedded_target.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes += [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    assert tiny.target.count_published_parameters() == sum(sizes)


def test_the_flagships_target_has_the_parameters_of_transformers_model_and_27_78_billion_in_all(flagship):
    config = widths_of("Qwen/Qwen3.6-27B")
    text = {key: value for key, value in config["text_config"].items() if not key.startswith("mtp")}
    with torch.device("meta"):
        model = modeling_qwen3_5.Qwen3_5ForCausalLM(
            configuration_qwen3_5.Qwen3_5TextConfig(**text, tie_word_embeddings=False)
        )
        tower = modeling_qwen3_5.Qwen3_5VisionModel(
            configuration_qwen3_5.Qwen3_5VisionConfig(**config["vision_config"])
        )
    target = flagship.target
    assert target.count_text_parameters() == count(model)
    assert target.count_served_parameters() == count(model) + count(tower)
    assert round(target.count_published_parameters() / 1e9, 2) == 27.78


def test_published_widths_are_those_that_steps_are_timed_at(flagship):
    from tests.step_time import flagship_config  # noqa: PLC0415 - it is a script

    timed = read_target(flagship_config(64), "tests/step_time.py")
    assert timed.count_text_parameters() == flagship.target.count_text_parameters()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("config_class", "model_class"), [(Qwen3Config, Qwen3ForCausalLM), (LlamaConfig, LlamaForCausalLM)]
)
def test_a_dense_target_has_the_parameters_of_transformers_model(config_class, model_class, tied):
    config = config_class(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=100,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = model_class(config)
    assert read_target(config.to_dict(), "here").count_text_parameters() == count(model)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3", "num_hidden_layers": 2}, "'hidden_size'"),
    ],
)
def test_a_target_that_cannot_be_counted_is_refused_by_name(config, words):
    with pytest.raises(UserError, match=re.escape(words)):
        read_target(config, "there")


# Caches and states


def vllm_specs(job: Job, ranks: int, drafts: int, block: int) -> dict:
    """One layer of each kind, as vLLM's layers describe themselves."""
    target, drafter = job.target, job.recipe.drafter
    gdn = target.gdn
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        ranks, gdn.key_heads, gdn.value_heads, gdn.key_dim, gdn.value_dim, gdn.conv_kernel, drafts
    )
    own = {
        "num_kv_heads": target.key_value_heads // ranks,
        "head_size": target.head_dim,
        "dtype": torch.bfloat16,
    }
    drafted = {
        "num_kv_heads": drafter.num_key_value_heads // ranks,
        "head_size": drafter.head_dim,
        "dtype": torch.bfloat16,
    }
    return {
        "attention": FullAttentionSpec(block_size=block, **own),
        "recurrent": MambaSpec(block_size=block, shapes=shapes, dtypes=(torch.bfloat16, torch.float32)),
        "full": FullAttentionSpec(block_size=block, **drafted),
        "sliding": SlidingWindowSpec(block_size=block, sliding_window=drafter.sliding_window, **drafted),
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drafts", [0, 15])
@pytest.mark.parametrize("path", [TINY, FLAGSHIP])
def test_keys_values_and_states_take_the_bytes_of_vllms_specs(path, ranks, drafts):
    job = plan_of(path)
    specs = vllm_specs(job, ranks, drafts, block=1)
    assert job.target.key_value_bytes(BF16, ranks) == specs["attention"].page_size_bytes
    assert drafter_key_value_bytes(job.recipe.drafter, BF16, ranks) == specs["full"].page_size_bytes
    assert job.target.gdn.state_bytes(BF16, ranks, drafts) == specs["recurrent"].page_size_bytes


def test_a_slot_of_the_flagship_takes_153_9_megabytes_in_its_48_layers(flagship):
    gdn = flagship.target.gdn
    assert gdn.num_layers * gdn.state_bytes(BF16) == pytest.approx(153.9e6, rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drafts", [0, 15])
@pytest.mark.parametrize("path", [TINY, FLAGSHIP])
def test_pages_are_as_large_as_vllm_makes_them(path, ranks, drafts):
    job = plan_of(path)
    cache = Cache(cached_layers(job.target, job.recipe.drafter, BF16, ranks, drafts), 8192)
    specs = unify_kv_cache_spec_page_size(vllm_specs(job, ranks, drafts, cache.block_tokens))
    assert {spec.page_size_bytes for spec in specs.values()} == {cache.page_bytes}


def test_the_flagships_blocks_hold_784_tokens(flagship):
    # as vLLM 0.32 logs it for this model without a drafter
    assert Cache(cached_layers(flagship.target, None, BF16, 1, 0), 8192).block_tokens == 784


def test_a_request_takes_pages_of_each_layer(flagship):
    cache = Cache(cached_layers(flagship.target, flagship.recipe.drafter, BF16, 2, 15), 8192)
    tokens, block = 4096, cache.block_tokens
    full, windows = math.ceil(tokens / block), math.ceil(tokens / block) + 1
    assert cache.count_pages(tokens, state_slots=1) == 16 * full + 48 + 4 * windows + 1 * full
    assert cache.count_pages(tokens, 16) - cache.count_pages(tokens, 1) == 48 * 15


def test_groups_of_layers_are_filled_up_to_one_size():
    kinds = [footprint.Layers(5, token_bytes=64), footprint.Layers(12, token_bytes=64, window=10)]
    cache = Cache(kinds, in_flight_tokens=4)
    assert cache.count_pages(16, state_slots=1) == 5 * 1 + 15 * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_trees_keep_what_the_engine_allocates_for_them(flagship, ranks):
    gdn, batch, rows = flagship.target.gdn, 32, 16
    kept = allocate_kept(
        gdn.num_layers,
        batch,
        rows,
        gdn.channels // ranks,
        gdn.key_heads // ranks,
        gdn.value_heads // ranks,
        gdn.key_dim,
        gdn.value_dim,
        torch.empty(0, dtype=torch.bfloat16, device="meta"),
    )
    allocated = sum(part.numel() * part.element_size() for part in vars(kept).values())
    assert gdn.kept_bytes(BF16, ranks, batch, rows) == allocated


def test_a_served_drafter_is_split_but_for_its_projection(flagship):
    drafter = flagship.recipe.drafter
    projection, keys = 5 * 5120 * 5120, 5 * 2 * 1024 * 5120
    whole = served_drafter_bytes(drafter, 5120, BF16, 1)
    assert whole == (flagship.num_parameters + keys) * BF16
    assert served_drafter_bytes(drafter, 5120, BF16, 2) == (whole + projection * BF16) / 2


def test_a_shard_takes_the_bytes_of_its_file(tmp_path):
    sequences = [make_sequence(index, num_tokens=50) for index in range(20)]
    write_shard_file(tmp_path, 0, sequences, [str(index) for index in range(20)])
    (file,) = tmp_path.glob("*.safetensors")
    counted = 20 * 50 * (tap_bytes(DRAFTER, HIDDEN, sequences[0].hidden.element_size()) + SEQUENCE_BYTES)
    assert tap_bytes(DRAFTER, HIDDEN, 4) == TAPS_SIZE * 4
    assert file.stat().st_size == pytest.approx(counted, rel=0.03)


# Phases


def test_the_flagship_is_what_the_design_says(flagship):
    target, drafter = flagship.target.count_served_parameters(), flagship.num_parameters
    serving, training = (phase_of(flagship, f"{name}: memory of each GPU") for name in ("serve", "train"))
    rows = {row.what: row.gib for row in (*serving.rows, *training.rows)}
    assert rows["target"] == pytest.approx(target * 2 / 2 / GIB)
    assert rows["target"] == pytest.approx(25.5, abs=0.05)
    # weights and fp32 sums of gradients; masters and two moments divided by two ranks
    assert rows["drafter, gradients, masters, moments"] == pytest.approx(drafter * (6 + 12 / 2) / GIB)
    assert serving.fits
    assert training.fits
    assert serving.need_gib + training.need_gib > flagship.recipe.hardware.gpu_gib  # so they take turns


def test_the_flagship_fits_and_lacks_disk_alone_where_all_shards_stay(flagship):
    assert all(phase.fits for phase in plan_phases(flagship))
    assert [phase.name for phase in plan_phases(plan_of(FLAGSHIP, *ALL_AT_ONCE)) if not phase.fits] == [
        "disk"
    ]


def test_the_demo_fits(tiny):
    assert all(phase.fits for phase in plan_phases(tiny))


def test_rolling_shards_need_a_rounds_room():
    everything = phase_of(plan_of(FLAGSHIP, *ALL_AT_ONCE), "disk").rows[0].num_bytes
    shard = (399_999 + 4096) * (61_440 + SEQUENCE_BYTES)
    for settings, share in [(["rounds.count=8"], 1 / 8), (["rounds.count=5", "rounds.first_share=0.4"], 0.4)]:
        row = phase_of(plan_of(FLAGSHIP, "data.policy=rolling", *settings), "disk").rows[0]
        assert row.num_bytes == pytest.approx(share * everything + shard)
    alone = phase_of(plan_of(FLAGSHIP, "rounds.count=1"), "disk").rows[0]
    assert alone.num_bytes == everything


def test_an_engine_shares_its_gpu_with_the_others_of_the_data_phase():
    name, settings = (
        "serve: memory of each GPU",
        ["serve.kv_cache_gib=1", "hardware.gpus=1", "hardware.gpu_gib=80", "rounds.count=1"],
    )
    one, three = (phase_of(plan_of(TINY, *settings, f"data.engines={engines}"), name) for engines in (1, 3))
    assert three.need_gib == pytest.approx(3 * one.need_gib)


def test_what_nobody_says_is_not_checked():
    job = plan_of(FLAGSHIP, "hardware={gpus: 2}")
    assert all(phase.fits for phase in plan_phases(job))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["serve.tensor_parallel_size=4"], "serve.tensor_parallel_size <= 2"),
        (["data.engines=2"], "data.engines <= 1"),
        (["data.engines=3", "serve.tensor_parallel_size=1"], "serve.kv_cache_gib"),
        (["train.sequences_per_step=7"], "write 6"),
    ],
)
def test_engines_and_ranks_that_do_not_go_into_the_gpus_are_told(overrides, words):
    (misfit,) = count_misfits(plan_of(FLAGSHIP, *overrides).recipe)
    assert words in misfit


def test_hours_are_told_where_a_rate_is_and_tokens_where_none_is(flagship, tiny):
    regenerate, train = durations(tiny)
    assert regenerate.hours == pytest.approx(6200 * 48 / 2270 / 3600)
    assert train.hours == pytest.approx(1600 * 16 * 240 / 2600 / 3600)
    assert [each.hours for each in durations(flagship)] == [None, None]
    assert "204,800,000" in durations(flagship)[0].formula


# Remedies


LACKING = {
    "disk": [*ALL_AT_ONCE],
    "shards at any time": ["data.disk_gib=200", "hardware.disk_gib=30000"],
    "regenerate: host memory": ["hardware.host_gib=60"],
    "serve: memory of each GPU": ["serve.tensor_parallel_size=1"],
    "serve: cache of an engine": ["serve.kv_cache_gib=1"],
    "train: memory of each GPU": [
        "train.zero_stage=1",
        "train.offload_optimizer=false",
        "hardware.gpu_gib=32",
    ],
    "train: host memory": ["hardware.host_gib=40", "data.check_sequences=0"],
}


def apply(job: Job, proposal: str, beyond: int = 0) -> Job:
    """The recipe with a proposal's fields written; `beyond` goes further than a bound allows."""
    tree = job.recipe.model_dump()
    for path, sign, text in re.findall(r"([\w.]+)\s?(<=|>=|=)\s?(\S+)", proposal):
        value = json.loads(text) if re.fullmatch(r"[\d.]+|true|false", text) else text
        section, name = path.split(".")
        tree[section][name] = value if sign == "=" else value + (beyond if sign == "<=" else -beyond)
    return Job(type(job.recipe).model_validate(tree), job.target, job.is_fetched)


@pytest.mark.parametrize("name", LACKING)
def test_every_proposal_makes_its_phase_fit(name):
    job = plan_of(FLAGSHIP, *LACKING[name])
    phase = phase_of(job, name)
    assert not phase.fits
    proposals = propose(job, phase)
    assert proposals
    for proposal in proposals:
        changed = apply(job, proposal)
        assert phase_of(changed, name).fits, proposal
        fitted = {each.name for each in plan_phases(job) if each.fits}
        assert fitted <= {each.name for each in plan_phases(changed) if each.fits}, proposal


def test_a_proposed_bound_is_the_last_that_fits():
    flagship = plan_of(FLAGSHIP, *ALL_AT_ONCE)
    proposal = next(each for each in propose(flagship, phase_of(flagship, "disk")) if "num_prompts" in each)
    assert not phase_of(apply(flagship, proposal, beyond=1), "disk").fits


def test_settings_are_proposed_together_where_none_does_alone():
    overrides = ["hardware.gpu_gib=14", "train.zero_stage=1"]
    job = plan_of(FLAGSHIP, *overrides)
    (first, *_) = propose(job, phase_of(job, "train: memory of each GPU"))
    fitting = ["zero_stage=3", "offload_optimizer=true", "activation_checkpointing=true"]
    switches = " ".join([*(f"train.{each}" for each in fitting), "rounds.handover=stop"])
    assert first.startswith(f"{switches} train.num_anchors <= ")


# The command


def test_the_demo_is_planned_with_its_arithmetic_visible():
    done = run_plan(str(TINY))
    assert done.returncode == 0, done.stderr
    assert "6,200 prompts x 240 tokens x (2,048 taps + 5) bytes" in done.stdout
    assert "9.74 M parameters x 2 bytes" in done.stdout
    assert "does not fit" not in done.stdout


def test_the_flagship_with_all_its_shards_is_refused_for_its_disk_after_its_tables():
    done = run_plan(str(FLAGSHIP), *ALL_AT_ONCE)
    assert done.returncode == 2
    assert "27,357 M parameters x 2 bytes / 2 ranks" in done.stdout
    error = " ".join(done.stderr.split())
    assert "does not fit its hardware: disk: 23,592.2 GiB needed, hardware.disk_gib is 1,800.0" in error
    assert "data.policy=rolling rounds.count=16 | data.num_prompts <= " in error


def test_it_is_said_that_widths_are_published_ones_where_the_target_is_not_here():
    assert "not fetched yet; widths from published_widths.json" in " ".join(
        run_plan(str(FLAGSHIP)).stdout.split()
    )


def test_a_fetched_config_is_read_instead(tmp_path, monkeypatch):
    config = widths_of("Qwen/Qwen3.6-27B")
    config["text_config"]["num_hidden_layers"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("recipes.plan.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    known = find_target(TargetSection(model="Qwen/Qwen3.6-27B"))
    assert known.config["text_config"]["num_hidden_layers"] == 8
    assert "not fetched" not in known.source


def test_a_plan_needs_no_torch():
    code = "import sys, recipes.plan; sys.exit(any(name in sys.modules for name in ('torch', 'vllm')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wrong_override_is_refused_as_elsewhere():
    done = run_plan(str(TINY), "hardware.gpu=1")
    assert done.returncode == 2
    assert "the nearest valid path is hardware.gpus" in " ".join(done.stderr.split())


def test_final_states_are_one_more_tap_of_what_is_captured():
    without = ["data.final_states=false", "train.objective.kind=cross_entropy"]
    assert [plan_of(FLAGSHIP, *changes).tap_bytes for changes in (without, [])] == [51_200, 61_440]
