"""What an engine is started with: environment, arguments, the plan behind a command line, and refusals."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drafters import EMBEDDED_TARGET, REPOSITORY, TINY_RECIPE, tiny_recipe, write_random_drafter

from recipes.errors import MISTAKE, UserError
from recipes.manifest import CheckpointManifest, identify_target, provenance, write_json
from serve import engine
from serve.drafter_config import PAIRWISE_NAME
from serve.engine import SECTION, child_environment, engine_arguments, is_cuda, make_stock, read_budget
from serve.plan import Request, make_plan
from serve.ports import find_free_port, require_free_port
from serve.step_costs import StepCosts, keep_costs, read_costs

RUN = REPOSITORY / "serve" / "run.py"
on_cpu = pytest.mark.skipif(is_cuda(), reason="the CPU build's settings")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A checkpoint without draftsmith.json."""
    return write_random_drafter(tmp_path_factory.mktemp("published"))


@pytest.fixture
def ours(tmp_path) -> Path:
    """A checkpoint that names its target."""
    return write_manifest(write_random_drafter(tmp_path / "checkpoint-3"))


def test_a_stock_engine_holds_nothing_of_ours():
    recipe = tiny_recipe()
    arguments = engine_arguments(recipe.target, recipe.serve, None, None)
    environment = child_environment()
    make_stock(arguments, environment)
    assert SECTION not in arguments["additional_config"]
    assert environment["VLLM_PLUGINS"] == ""


def test_a_missing_checkpoint_is_said_to_be_missing():
    with pytest.raises(UserError, match="nowhere: found no such folder"):
        make_plan(Request(Path("nowhere"), None, str(EMBEDDED_TARGET), None, None))


def write_manifest(ckpt: Path, **target_changes: object) -> Path:
    recipe = tiny_recipe()
    manifest = CheckpointManifest(
        target=identify_target(recipe.target).model_copy(update=target_changes),
        recipe=recipe.model_dump(mode="json"),
        provenance=provenance(),
        step=3,
        sequences_seen=24,
        tokens_seen=2400,
    )
    write_json(ckpt / "draftsmith.json", manifest)
    return ckpt


def request(**changes: object) -> Request:
    return Request(
        **({"ckpt": None, "recipe": None, "target": None, "settings": None, "budget": None} | changes)
    )


LAUNCHERS = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT CROSS_RANK CROSS_SIZE"
    " OMPI_COMM_WORLD_RANK PMI_RANK TORCHELASTIC_RUN_ID DS_ENV_FILE"
)


@pytest.mark.parametrize("name", [*LAUNCHERS.split(), "VLLM_CPU_KVCACHE_SPACE"])
def test_an_engine_does_not_inherit(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert name not in child_environment()


@pytest.mark.parametrize("name", ["PATH", "HF_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"])
def test_an_engine_inherits(monkeypatch, name):
    monkeypatch.setenv(name, "kept")
    assert child_environment()[name] == "kept"


@on_cpu
def test_triton_is_interpreted_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert child_environment()["TRITON_INTERPRET"] == "1"


@on_cpu
def test_an_engine_leaves_a_core_free_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert child_environment()["OMP_NUM_THREADS"] == str(max(1, cores - 1))


ALLOCATOR = "PYTORCH_ALLOC_CONF"
GIVE_BACK = "pinned_max_cached_size_mb:16"


@pytest.mark.parametrize(
    ("torch_version", "inherited", "settings"),
    [
        ("2.13.0", {}, GIVE_BACK),
        ("2.13.0+cu130", {ALLOCATOR: "max_split_size_mb:64"}, f"max_split_size_mb:64,{GIVE_BACK}"),
        ("2.14.1", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, f"backend:native,{GIVE_BACK}"),
        ("2.13.0", {ALLOCATOR: "pinned_max_cached_size_mb:9"}, "pinned_max_cached_size_mb:9"),
        ("2.12.0", {}, None),  # it would not know the word
    ],
)
def test_on_a_gpu_host_memory_of_sleeping_weights_is_given_back(
    monkeypatch, torch_version, inherited, settings
):
    monkeypatch.setattr("serve.engine.is_cuda", lambda: True)
    monkeypatch.setattr("serve.engine.version", lambda _: torch_version)
    for name in (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    environment = child_environment()
    assert environment.get(ALLOCATOR) == settings
    monkeypatch.setattr("os.environ", environment)
    assert child_environment() == environment  # or a process would start itself anew for ever


def test_the_chain_drafts_a_token_less_than_a_block(published):
    recipe = tiny_recipe()
    speculative = engine_arguments(recipe.target, recipe.serve, published, None)["speculative_config"]
    assert speculative == {"method": "dflash", "model": str(published), "num_speculative_tokens": 7}


@pytest.mark.parametrize("budget", [None, 15])
def test_a_target_of_made_up_weights_is_drafted_for_by_the_checkpoints_own(published, budget):
    """vLLM would make the drafter's up as well."""
    recipe = tiny_recipe()
    for load_format, expected in (("auto", {}), ("dummy", {"draft_load_config": {"load_format": "auto"}})):
        target = recipe.target.model_copy(update={"load_format": load_format})
        speculative = engine_arguments(target, recipe.serve, published, budget)["speculative_config"]
        ordinary = engine_arguments(recipe.target, recipe.serve, published, budget)["speculative_config"]
        assert speculative == ordinary | expected


def test_budget_zero_loads_no_drafter(published):
    recipe = tiny_recipe()
    plain = engine_arguments(recipe.target, recipe.serve, None, None)
    assert engine_arguments(recipe.target, recipe.serve, published, 0) == plain
    assert "speculative_config" not in plain


@pytest.mark.parametrize("budget", [-1, 64])
def test_a_budget_out_of_range_is_refused_by_name(published, budget):
    recipe = tiny_recipe()
    with pytest.raises(UserError, match=f"budget {budget}: expected 1 to 63"):
        engine_arguments(recipe.target, recipe.serve, published, budget)
    with pytest.raises(UserError, match="expected 1 to 63"):
        make_plan(request(ckpt=published, recipe=TINY_RECIPE, budget=budget))


@pytest.mark.parametrize(("text", "nodes"), [(None, 15), ("chain", None), ("0", 0), ("63", 63)])
def test_a_budget_is_read_as_users_write_it(text, nodes):
    assert read_budget(text) == (nodes, False)


def test_an_automatic_budget_is_trees_that_adapt(published, tmp_path):
    nodes, adapts = read_budget("auto")
    costs = {"draft": [[4, 0.5]], "verify": [[8, 1.0], [64, 3.0]]}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    serve = tiny_recipe().serve.model_copy(update={"step_costs": tmp_path / "costs.json"})
    arguments = engine_arguments(tiny_recipe().target, serve, published, nodes, adapts=adapts)
    assert arguments["speculative_config"]["num_speculative_tokens"] == nodes == 31
    told = arguments["additional_config"][SECTION]["tree"]["costs"]
    assert told["known"] == {"draft": [(4, 0.5)], "verify": [(8, 1.0), (64, 3.0)], "of": {}}
    assert arguments["cudagraph_metrics"]  # rows of each step on /metrics


def test_where_nothing_can_be_measured_costs_are_asked_for(published):
    recipe = tiny_recipe()
    with pytest.raises(UserError, match=r"--budget auto .*name a file of costs in serve.step_costs"):
        engine_arguments(recipe.target, recipe.serve, published, 31, adapts=True)


def test_costs_that_are_not_there_yet_are_measured_and_kept(published, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "is_cuda", lambda: True)
    costs, eager = tmp_path / "new" / "costs.json", {"enforce_eager": False}
    serve = tiny_recipe().serve.model_copy(update={"step_costs": costs, **eager})
    arguments = engine_arguments(tiny_recipe().target, serve, published, 31, adapts=True)
    told = arguments["additional_config"][SECTION]["tree"]["costs"]
    assert told == {"known": None, "path": str(costs)}
    measured = StepCosts([(1, 0.5)], [(1, 2.5)], {"device": "mine"})
    keep_costs(measured, costs)
    assert read_costs(costs) == measured
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "holds no step costs"),
        ("[]", "holds no step costs"),
        ('{"draft": [[1, 1]]}', "holds no step costs"),
        ('{"draft": [[1, 1]], "verify": []}', "verify needs ascending sizes"),
        ('{"draft": [[1, 1]], "verify": [[8, 1], [4, 2]]}', "verify needs ascending sizes"),
        ('{"draft": [[1, 1]], "verify": [[8, 0]]}', "milliseconds above 0"),
    ],
)
def test_a_file_of_other_things_than_costs_is_refused_by_name(text, said, published, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(text)
    serve = tiny_recipe().serve.model_copy(update={"step_costs": path})
    with pytest.raises(UserError, match=f"costs.json.*{said}"):
        engine_arguments(tiny_recipe().target, serve, published, 31, adapts=True)


@pytest.mark.parametrize("text", ["64", "-1", "many", "7.5", ""])
def test_a_budget_that_is_none_is_refused_by_name(text):
    with pytest.raises(UserError, match=f"budget {text}: expected"):
        read_budget(text)


@on_cpu
def test_a_tree_has_as_many_drafts_as_nodes_and_the_drafters_depth(published):
    recipe = tiny_recipe()
    arguments = engine_arguments(recipe.target, recipe.serve, published, 31)
    assert arguments["speculative_config"]["num_speculative_tokens"] == 31
    assert arguments["additional_config"][SECTION] == {"tree": {"num_slots": 7}}
    assert arguments["enforce_eager"]


@on_cpu
def test_rows_are_reserved_in_trees_alone(published):
    recipe = tiny_recipe("serve.reserve_chain=5")
    for budget, asked in ((15, {"tree": {"num_slots": 7, "reserved": 5}}), (None, {}), (0, {})):
        arguments = engine_arguments(recipe.target, recipe.serve, published, budget)
        assert arguments["additional_config"][SECTION] == asked


def test_the_command_line_reserves_rows_before_the_recipe_does(ours):
    reserving = tiny_recipe("serve.reserve_chain=5").model_dump(mode="json")
    manifest = json.loads((ours / "draftsmith.json").read_text())
    (ours / "draftsmith.json").write_text(json.dumps(manifest | {"recipe": reserving}))
    for given, found in ((None, 5), (3, 3), (0, 0)):
        assert make_plan(request(ckpt=ours, budget=15, reserve_chain=given)).serve.reserve_chain == found


def test_rows_are_not_reserved_where_steps_leave_out_nodes(published):
    given = {"ckpt": published, "recipe": TINY_RECIPE, "budget": 31, "adapts": True}
    with pytest.raises(UserError, match=r"--budget auto and serve\.reserve_chain 5: .*--reserve-chain 0"):
        make_plan(request(**given, reserve_chain=5))
    recipe = tiny_recipe("serve.reserve_chain=5")
    with pytest.raises(UserError, match=r"--budget auto and serve\.reserve_chain 5"):
        engine_arguments(recipe.target, recipe.serve, published, 31, adapts=True)
    assert make_plan(request(**given, reserve_chain=0)).adapts


@on_cpu
def test_a_pairwise_head_has_the_chain_drafted_by_us(published, tmp_path):
    recipe = tiny_recipe()
    without = engine_arguments(recipe.target, recipe.serve, published, None)
    assert without["additional_config"][SECTION] == {}
    ckpt = shutil.copytree(published, tmp_path / "with_head")
    (ckpt / PAIRWISE_NAME).parent.mkdir()
    (ckpt / PAIRWISE_NAME).touch()
    arguments = engine_arguments(recipe.target, recipe.serve, ckpt, None)
    assert arguments["speculative_config"]["num_speculative_tokens"] == 7
    assert arguments["additional_config"][SECTION] == {"tree": {"num_slots": 7, "chains": True}}
    assert arguments["enforce_eager"]


def test_trees_on_a_gpu_keep_its_graphs(monkeypatch, published):
    monkeypatch.setattr("serve.engine.is_cuda", lambda: True)
    recipe = tiny_recipe("serve.enforce_eager=false")
    assert not engine_arguments(recipe.target, recipe.serve, published, 15)["enforce_eager"]


@pytest.mark.parametrize(("settings", "asks"), [(["serve.compile=false"], True), ([], False)])
def test_without_the_compiler_a_gpu_keeps_graphs_of_decoding(monkeypatch, settings, asks):
    monkeypatch.setattr("serve.engine.is_cuda", lambda: True)
    recipe = tiny_recipe("serve.enforce_eager=false", *settings)
    arguments = engine_arguments(recipe.target, recipe.serve, None, None)
    expected = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if asks else None
    assert arguments.get("compilation_config") == expected
    eager = tiny_recipe("serve.enforce_eager=true", *settings)
    assert "compilation_config" not in engine_arguments(eager.target, eager.serve, None, None)


def test_the_kv_cache_is_as_large_as_the_recipe_says():
    recipe = tiny_recipe("serve.kv_cache_gib=0.5")
    assert engine_arguments(recipe.target, recipe.serve, None, None)["kv_cache_memory_bytes"] == 2**29


def test_without_a_size_a_gpu_gives_what_it_has_to_the_kv_cache(monkeypatch):
    recipe = tiny_recipe()
    monkeypatch.setattr("serve.engine.is_cuda", lambda: True)
    assert "kv_cache_memory_bytes" not in engine_arguments(recipe.target, recipe.serve, None, None)


def test_the_cpu_kernels_are_asked_for_in_the_seams_own_section():
    from serve.seam import SECTION  # noqa: PLC0415 - torch, which no other test here needs

    recipe = tiny_recipe()
    asked = engine_arguments(recipe.target, recipe.serve, None, None)["additional_config"]
    assert (SECTION in asked) is not is_cuda()


@pytest.mark.parametrize(
    ("on_gpu", "ranks", "is_said"), [(False, 1, True), (False, 2, False), (True, 1, False)]
)
def test_a_worker_alone_is_in_its_engines_process(monkeypatch, on_gpu, ranks, is_said):
    """On a GPU vLLM has it so itself."""
    recipe = tiny_recipe(f"serve.tensor_parallel_size={ranks}")
    monkeypatch.setattr("serve.engine.is_cuda", lambda: on_gpu)
    arguments = engine_arguments(recipe.target, recipe.serve, None, None)
    assert ("UniProcExecutor" in arguments.get("distributed_executor_backend", "")) is is_said


def test_a_checkpoint_brings_its_own_target_and_settings(ours):
    plan = make_plan(request(ckpt=ours))
    assert (plan.target, plan.serve) == (tiny_recipe().target, tiny_recipe().serve)


def test_latest_is_resolved_to_the_checkpoint_it_names(ours):
    latest = ours.parent / "latest"
    latest.symlink_to(ours.name)
    assert make_plan(request(ckpt=latest)).ckpt == ours


def test_a_checkpoint_for_another_target_is_refused(ours):
    write_manifest(ours, fingerprint="0" * 64, model="some/other")
    for given in ({}, {"recipe": TINY_RECIPE}, {"target": str(EMBEDDED_TARGET)}):
        with pytest.raises(UserError, match="a checkpoint for another target: it was made for some/other"):
            make_plan(request(ckpt=ours, **given))


def test_a_published_checkpoint_needs_to_be_told_its_target(published):
    with pytest.raises(UserError, match=r"--recipe RECIPE or --target MODEL"):
        make_plan(request(ckpt=published))
    assert make_plan(request(ckpt=published, target=str(EMBEDDED_TARGET))).serve.max_model_len == 4096
    assert make_plan(request(ckpt=published, recipe=TINY_RECIPE)).serve.max_model_len == 512


def test_a_target_alone_is_served_plainly():
    assert make_plan(request(target=str(EMBEDDED_TARGET))).drafter is None


def test_two_sources_of_the_target_are_refused(published):
    with pytest.raises(UserError, match="--recipe and --target"):
        make_plan(request(ckpt=published, recipe=TINY_RECIPE, target="x/y"))


def test_nothing_to_serve_is_refused():
    with pytest.raises(UserError, match="nothing to serve"):
        make_plan(request())


def test_a_manifest_whose_recipe_has_no_target_is_refused(ours):
    path = ours / "draftsmith.json"
    content = json.loads(path.read_text())
    del content["recipe"]["target"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"draftsmith\.json: its recipe does not load"):
        make_plan(request(ckpt=ours))


def test_a_free_port_can_be_had_and_a_taken_one_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1 port {port}: .*in use; --port \d+ is free"):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", find_free_port())


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        require_free_port("192.0.2.1", 8000)


def run_command_line(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=60)


def test_check_says_what_fits(ours):
    done = run_command_line("--ckpt", ours, "--check")
    assert done.returncode == 0, done.stderr
    assert "fits its target" in done.stdout
    assert "after target layers 2, 4, 6" in done.stdout


def test_the_trees_that_nobody_asked_for_are_named(ours):
    assert "trees of 15 nodes, 7 deep at most" in run_command_line("--ckpt", ours, "--check").stdout
    chain = run_command_line("--ckpt", ours, "--budget", "chain", "--check").stdout
    assert "the DFlash chain, 7 drafts a step" in chain
    assert "the DFlash chain" in run_command_line("--ckpt", ours, "--stock", "--check").stdout


def test_reserved_rows_are_named_and_need_trees(ours):
    done = run_command_line("--ckpt", ours, "--reserve-chain", "99", "--check")
    assert "7 deep at most; each begins with the greedy chain's first 7" in " ".join(done.stdout.split())
    for budget in ("chain", "0"):
        done = run_command_line("--ckpt", ours, "--budget", budget, "--reserve-chain", "5", "--check")
        assert done.returncode == MISTAKE
        assert "--reserve-chain 5 is of draft trees" in done.stderr


def test_stock_vllm_has_no_trees(ours):
    done = run_command_line("--ckpt", ours, "--stock", "--budget", "15", "--check")
    assert done.returncode == MISTAKE
    assert "--stock has no trees" in done.stderr


def test_check_ends_with_2_where_something_does_not_fit(published):
    (damaged := published / "copy").mkdir()
    (damaged / "config.json").write_text((published / "config.json").read_text())
    done = run_command_line("--ckpt", damaged, "--target", EMBEDDED_TARGET, "--check")
    assert done.returncode == MISTAKE
    assert "lacks its weights" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_ends_with_2_before_anything_is_loaded(published):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, start = taken.getsockname()[1], time.monotonic()
        done = run_command_line("--ckpt", published, "--recipe", TINY_RECIPE, "--port", port)
    assert done.returncode == MISTAKE
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr
    assert time.monotonic() - start < 20  # an engine takes longer


def test_a_process_follows_its_parent_out():
    child = (
        "import os, time, serve.lifetime as l; l.follow_parent(os.getppid());"
        " print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child_pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 10
    while _is_running(child_pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_process_whose_parent_is_gone_already_ends_at_once():
    code = "import serve.lifetime as l; l.follow_parent(-1); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=os.environ)
    assert done.stdout == b""
