"""serve/seam/: inert unless asked, and refusing by name whatever it does not know."""

import importlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
from transformers import AutoModelForCausalLM
from vllm.v1.worker.worker_base import WorkerWrapperBase

import serve.seam
from serve.capture import capture_options
from serve.seam import SeamOptions, read_options, register
from serve.seam.checks import (
    CAPTURE_FIELDS,
    CAPTURE_SIGNATURES,
    CPU_TREE_SIGNATURES,
    CUDA_TREE_SIGNATURES,
    METRICS_FIELDS,
    METRICS_SIGNATURES,
    SELECTOR_SIGNATURES,
    SWAP_SIGNATURES,
    TREE_SIGNATURES,
    WORKER_SIGNATURES,
    SeamError,
    check_fields,
    check_signatures,
    check_version,
)
from tests.drafters import EMBEDDED_TARGET, tiny_recipe, write_random_drafter

if not torch.cuda.is_available():
    importlib.import_module("vllm.v1.worker.cpu_worker")  # its patches come before the runner

from serve.seam.budgets import CostOptions, check_identity, install_budgets
from serve.seam.cuda_runtime import is_alike
from serve.seam.processor import _mend_context_keys
from serve.seam.selector_speculator import SelectorSpeculator
from serve.seam.speculator import TreeSpeculator
from serve.seam.tree_state import needs_chain
from serve.seam.trees import check_tree_config, choose_speculator, confirm_trees

REPOSITORY = Path(__file__).parent.parent


def test_nothing_is_asked_of_us_by_default():
    assert read_options({}) is None
    assert read_options({"gdn_prefill_backend": "triton"}) is None


def test_an_empty_section_captures_nothing():
    assert read_options({"draftsmith": {}}) == SeamOptions(None)


def test_capture_options_are_read_back():
    assert read_options(capture_options([1, 3])) == SeamOptions((1, 3))


def test_the_installed_plugin_is_ours_and_wraps_once():
    (plugin,) = metadata.entry_points(group="vllm.general_plugins", name="draftsmith")
    assert plugin.load() is register
    register()
    wrapped = WorkerWrapperBase.init_device
    register()
    assert WorkerWrapperBase.init_device is wrapped


def test_what_trees_ask_for_is_read():
    assert read_options({"draftsmith": {"tree": {"num_slots": 7}}}) == SeamOptions(num_slots=7)
    chains = {"draftsmith": {"tree": {"num_slots": 7, "chains": True}}}
    assert read_options(chains) == SeamOptions(num_slots=7, chains=True)
    reserving = {"draftsmith": {"tree": {"num_slots": 7, "reserved": 5}}}
    assert read_options(reserving) == SeamOptions(num_slots=7, reserved=5)
    costs = {"known": None, "path": None}
    adapting = {"draftsmith": {"tree": {"num_slots": 7, "costs": costs}}}
    assert read_options(adapting) == SeamOptions(num_slots=7, costs=costs)


def test_an_unknown_option_is_refused():
    with pytest.raises(SeamError, match="captrue"):
        read_options({"draftsmith": {"captrue": {}}})


@pytest.mark.parametrize("version", ["0.31.1", "0.33.0", "1.0.0", "dev"])
def test_another_vllm_is_refused(version):
    with pytest.raises(SeamError, match=version):
        check_version(version)


def test_this_vllm_has_the_signatures_and_fields_we_know():
    check_version(vllm.__version__)
    check_signatures({**WORKER_SIGNATURES, **CAPTURE_SIGNATURES, **TREE_SIGNATURES, **CUDA_TREE_SIGNATURES})
    check_signatures({**METRICS_SIGNATURES, **SWAP_SIGNATURES, **SELECTOR_SIGNATURES})
    if not torch.cuda.is_available():
        check_signatures(CPU_TREE_SIGNATURES)
    check_fields({**CAPTURE_FIELDS, **METRICS_FIELDS})


@pytest.mark.parametrize(
    ("symbol", "parameters"),
    [
        ("serve.capture:CaptureSink.finish", ("self", "finished_req_ids")),  # another parameter
        ("serve.capture:CaptureSink.gone", ("self",)),
        ("serve.gone:CaptureSink", ()),
    ],
)
def test_a_changed_symbol_is_refused_by_name(symbol, parameters):
    with pytest.raises(SeamError, match=symbol):
        check_signatures({symbol: parameters})


def test_a_missing_field_is_refused_by_name():
    with pytest.raises(SeamError, match=r"serve\.spool:StepTaps.*slots"):
        check_fields({"serve.spool:StepTaps": ("starts", "slots")})


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What tests/capture_probe.py captured beside a drafter, in chunks, with preemptions."""
    folder = tmp_path_factory.mktemp("probe")
    drafter, out = write_random_drafter(folder / "drafter"), folder / "out.pt"
    command = [sys.executable, str(REPOSITORY / "tests" / "capture_probe.py"), str(drafter), str(out)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "GOMP_SPINCOUNT": "1000"}
    subprocess.run(command, env=environment, check=True, timeout=300)
    return torch.load(out)


@pytest.mark.engine
def test_rows_are_complete_and_of_the_right_tokens_beside_a_drafter_in_chunks_and_preempted(probe):
    assert probe["repeated"] > 0  # some rows were computed twice
    for prompt, text, hidden, token_ids in probe["captured"]:
        tokens = [*prompt, *text]
        assert len(hidden) == len(token_ids) >= len(tokens) - 1
        assert token_ids.tolist()[: len(tokens) - 1] == tokens[:-1]


@pytest.mark.engine
def test_rows_are_the_transformers_models_beside_a_drafter_in_chunks_and_preempted(probe):
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.bfloat16)
    for prompt, text, hidden, _ in probe["captured"]:
        tokens = torch.tensor([[*prompt, *text]])
        with torch.inference_mode():
            states = model(tokens, output_hidden_states=True).hidden_states
        rows = tokens.shape[1] - 1
        for tap, layer in enumerate(tiny_recipe().drafter.target_layer_ids):
            found = hidden[:rows, 256 * tap : 256 * (tap + 1)].float()
            cosine = torch.cosine_similarity(found, states[layer + 1][0, :rows].float(), dim=-1)
            assert cosine.min() > 0.998, (layer, int(cosine.argmin()), float(cosine.min()))


def tree_config(**changes: object) -> SimpleNamespace:
    """What trees run with, as vLLM's config holds it."""
    settings = {
        "speculative_config.method": "dflash",
        "speculative_config.draft_sample_method": "greedy",
        "device_config.device_type": "cpu",
        "model_config.get_sliding_window": lambda: None,
        "model_config.logits_processors": None,
        "lora_config": None,
        "speculative_config.enable_adaptive_verification": False,
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.decode_context_parallel_size": 1,
        "parallel_config.prefill_context_parallel_size": 1,
        "cache_config.cache_dtype": "auto",
        "cache_config.mamba_cache_mode": "none",
    }
    config = SimpleNamespace()
    for path, value in (settings | changes).items():
        *parents, name = path.split(".")
        at = config
        for parent in parents:
            if not hasattr(at, parent):
                setattr(at, parent, SimpleNamespace())
            at = getattr(at, parent)
        setattr(at, name, value)
    return config


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("speculative_config.method", "eagle3", "dflash drafter, found eagle3"),
        ("speculative_config.draft_sample_method", "probabilistic", "draft_sample_method greedy"),
        ("speculative_config.enable_adaptive_verification", True, "leave out enable_adaptive_verification"),
        ("device_config.device_type", "xpu", "CPU or CUDA, not on xpu"),
        ("model_config.get_sliding_window", lambda: 128, "sliding windows"),
        ("model_config.logits_processors", ["mine"], "logits processors"),
        ("lora_config", object(), "LoRA"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size 1"),
        ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size 1"),
        ("cache_config.cache_dtype", "fp8", "kv cache dtype fp8"),
        ("cache_config.mamba_cache_mode", "align", "prefix caching of hybrid targets"),
    ],
)
def test_what_trees_cannot_do_is_refused_by_name(setting, value, said):
    check_tree_config(tree_config())
    with pytest.raises(SeamError, match=said):
        check_tree_config(tree_config(**{setting: value}))


def test_a_cpu_has_no_costs_of_its_own():
    with pytest.raises(SeamError, match=r"a CPU's steps are not measured, name a file in serve.step_costs"):
        install_budgets("cpu", CostOptions.parse({"known": None, "path": None}))


def test_costs_of_another_engine_are_refused_by_name():
    mine, told = {"device": "NVIDIA H200", "nodes": "31"}, {"draft": [(1, 1.0)], "verify": [(1, 1.0)]}
    for of in ({}, mine):
        check_identity(CostOptions.parse({"known": told | {"of": of}, "path": "costs.json"}), mine)
    other = CostOptions.parse({"known": told | {"of": mine | {"nodes": "15"}}, "path": "costs.json"})
    with pytest.raises(SeamError, match=r"costs.json: step costs of .*'nodes': '15'.*this engine is .*'31'"):
        check_identity(other, mine)


@pytest.mark.parametrize(
    ("rows", "drafts", "is_eligible", "found"),
    [
        ([1, 1], None, True, True),
        ([16, 4, 1], [15, 3, 0], True, True),
        ([16, 40], [15, 0], True, False),  # a prompt's part
        ([1, 1], None, False, False),  # a prompt's first token
    ],
)
def test_a_step_that_a_graph_may_take_has_one_row_of_each_requests_own(rows, drafts, is_eligible, found):
    batch = SimpleNamespace(
        num_scheduled_tokens=np.array(rows),
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
        decode_graph_eligible=is_eligible,
    )
    assert is_alike(batch) is found


def test_the_drafters_architecture_chooses_the_speculator():
    assert choose_speculator(["DFlashDraftModel"]) is TreeSpeculator
    assert choose_speculator(["DFlash2DraftModel"]) is SelectorSpeculator
    with pytest.raises(SeamError, match="LiLiCorrDraftModel"):
        choose_speculator(["LiLiCorrDraftModel"])


def sampling(**changes: object) -> SimpleNamespace:
    settings = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "bad_words": [],
        "structured_outputs": None,
        "thinking_token_budget": None,
        "extra_args": None,
    }
    return SimpleNamespace(**settings | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"bad_words": ["x"]},
        {"structured_outputs": object()},
        {"thinking_token_budget": 9},
        {"extra_args": {"draftsmith_chain": True, "other": 1}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sampling_that_looks_at_the_drafts_before_a_row_gets_a_chain(changes):
    assert not needs_chain(sampling())
    assert not needs_chain(None)
    assert needs_chain(sampling(**changes))


def test_an_engine_without_trees_is_refused_in_a_process_that_had_some(monkeypatch):
    monkeypatch.setattr(serve.seam, "_had_trees", [])
    serve.seam._refuse_mixture(SeamOptions())
    serve.seam._refuse_mixture(SeamOptions(num_slots=7))
    serve.seam._refuse_mixture(SeamOptions(num_slots=7))
    with pytest.raises(SeamError, match="new process"):
        serve.seam._refuse_mixture(SeamOptions())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's mend")
def test_a_second_engine_of_a_process_may_mend_the_context_keys_again():
    _mend_context_keys()
    _mend_context_keys()


def test_another_speculator_than_ours_ends_the_start():
    with pytest.raises(SeamError, match="the speculator in use is SimpleNamespace"):
        confirm_trees(SimpleNamespace(speculator=SimpleNamespace()))
