"""How the vLLM engine is set up: its process environment and its arguments.

One home for both, so that the engine that makes the training data and the one that judges a drafter are the
same.  Does not import vllm: the environment must be right before anyone does.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from recipes.errors import UserError
from recipes.load import resolve_model
from recipes.schema import Serve, Target
from serve.checkpoint import read_drafter_config
from serve.drafter_config import PAIRWISE_NAME, parse_config
from serve.step_costs import read_costs, tell_costs

# What a launcher (deepspeed, torchrun, mpirun) tells its ranks; an engine that reads it joins their group.
_RANK_VARIABLES = frozenset(
    prefix + name for prefix in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")
) | {"LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_RANK_PREFIXES = ("CROSS_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "DS_")
# The recipe is the only home of these.
_OVERRIDING_VARIABLES = frozenset({"VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING"})
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is set
_GIVE_BACK, _GIVES_BACK = "pinned_max_cached_size_mb", Version("2.13")
_CPU_CACHE_GIB = 1.0
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""As its class is named: said as "uni", vLLM's CPU platform takes another."""
PLAIN_BUDGET = 0
MOST_NODES = 63
"""Of a tree: its rows, the committed token's with them, fit the bits of a word."""
DEFAULT_BUDGET = 15
"""Nodes of a tree where nobody says: as many rows as the chain of a block of 16, so no step is longer, and
most of what larger trees accept (LOG.md, "draft trees on a GPU")."""
CHAIN = "chain"
"""What a command line calls the budget None."""
AUTO = "auto"
"""What a command line calls trees of which each step verifies as much as is worth its cost."""
AUTO_NODES = 31
"""That such a step may verify of a tree."""
CHAIN_REQUEST = {"draftsmith_chain": True}
"""SamplingParams.extra_args of a request that wants a chain from an engine that drafts trees."""
SECTION = "draftsmith"
"""What is asked of our plugin (serve/seam/), in vLLM's additional_config."""


def is_cuda() -> bool:
    """Whether the installed engine is vLLM's CUDA build; its CPU build is the distribution vllm-cpu."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


def child_environment() -> dict[str, str]:
    """os.environ for a process that imports vllm: no launcher's ranks, and what this device's build needs."""
    inherited = {name: value for name, value in os.environ.items() if not _is_foreign(name)}
    if is_cuda():
        return inherited | _common_variables() | _cuda_variables()
    return _cpu_defaults() | inherited | _common_variables() | {"TRITON_INTERPRET": "1"}


def enter_environment() -> None:
    """Starts this process anew in the engine's environment: some of it is read before Python's first line."""
    environment = child_environment()
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def _is_foreign(name: str) -> bool:
    return name in _RANK_VARIABLES | _OVERRIDING_VARIABLES or name.startswith(_RANK_PREFIXES)


def _common_variables() -> dict[str, str]:
    return {
        # said aloud, so that an engine that cannot have the V2 runner refuses instead of taking another
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _cpu_defaults() -> dict[str, str]:
    # vLLM leaves a core free where it starts workers, but not where the engine runs inside its driver: there
    # OpenMP's threads wait for one another, 457 ms a chain step of 16 requests against 99 (2 busy cores); and
    # threads that spin less while they wait leave the cores to whoever works, 49 ms a step against 66 to 118
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "1000"}


def _cuda_variables() -> dict[str, str]:
    sampler = {} if _has_flashinfer() else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return sampler | _allocator_settings()


def _allocator_settings() -> dict[str, str]:
    """torch's own and the user's: host memory that weights sleep in is given back when they wake.

    Left alone, torch keeps it, and rounds each weight's up to a power of two (54 GB of them to 80).
    """
    given = next(filter(None, map(os.environ.get, _ALLOCATOR_VARIABLES)), "")
    if Version(version("torch")) < _GIVES_BACK or _GIVE_BACK in given:
        return {}  # an older torch refuses words that it does not know
    return {_ALLOCATOR_VARIABLES[0]: ",".join(filter(None, [given, f"{_GIVE_BACK}:16"]))}


def _has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def engine_arguments(
    target: Target,
    serve: Serve,
    ckpt: Path | None,
    budget: int | None,
    swappable: Mapping[str, Any] | None = None,
    *,
    adapts: bool = False,
    sleeps: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs (and of LLM).

    `budget` None drafts the stock DFlash chain with the checkpoint, or what its pairwise head prefers;
    PLAIN_BUDGET decodes without a drafter, any other number drafts trees of so many nodes, of which a step
    verifies as much as is worth its cost where the engine `adapts`.  `swappable`:
    options of `serve.served.Served`, where other checkpoints may take the drafter's place while the engine
    runs.  `sleeps`: on CUDA the engine may leave the GPU to others for a while; a CPU's has no such mode, and
    is as without.
    """
    check_budget(budget)
    check_reserve(serve, adapts=adapts)
    arguments = _target_arguments(target) | _capacity_arguments(serve) | _device_arguments(serve)
    if sleeps and is_cuda():
        arguments |= {"enable_sleep_mode": True, "sleep_mode_offload_cudagraph": True}
    if ckpt is None or budget == PLAIN_BUDGET:
        return arguments
    speculative, options = _drafting(ckpt, budget, serve.reserve_chain)
    if adapts:
        options["tree"]["costs"] = _step_costs(serve)
        arguments["cudagraph_metrics"] = True  # rows of each step, on /metrics
    if target.load_format == "dummy":  # the target's weights alone are made up
        speculative |= {"draft_load_config": {"load_format": "auto"}}
    arguments["speculative_config"] = speculative
    if swappable is not None:
        options["swap"] = swappable
    if options:
        arguments["additional_config"].setdefault(SECTION, {}).update(options)
    if "tree" in options:
        # vLLM's compiler cannot look into plain torch's loops, which a CPU runs
        arguments["enforce_eager"] = serve.enforce_eager or not is_cuda()
    return arguments


def make_stock(arguments: dict[str, Any], environment: dict[str, str]) -> None:
    """Takes everything of ours out of an engine but the Triton backend that a CPU needs; in place."""
    arguments["additional_config"].pop(SECTION, None)
    environment["VLLM_PLUGINS"] = ""  # vLLM loads the plugins named here: none


class Budget(NamedTuple):
    """As `engine_arguments` takes it."""

    nodes: int | None
    adapts: bool = False


def read_budget(text: str | None) -> Budget:
    """A budget as users write it: a number of nodes, "chain", "auto", or None for the default.

    Raises UserError for anything else.
    """
    if text is None:
        return Budget(DEFAULT_BUDGET)
    if text == CHAIN:
        return Budget(None)
    if text == AUTO:
        return Budget(AUTO_NODES, adapts=True)
    try:
        budget = int(text)
    except ValueError:
        raise UserError(
            f"--budget {text}: expected a number of nodes, 0 to {MOST_NODES}, {CHAIN} or {AUTO}"
        ) from None
    check_budget(budget)
    return Budget(budget)


def check_budget(budget: int | None) -> None:
    """Raises UserError for a budget that is not served."""
    if budget is not None and not PLAIN_BUDGET <= budget <= MOST_NODES:
        raise UserError(
            f"budget {budget}: expected 1 to {MOST_NODES} for trees, or {PLAIN_BUDGET} for plain decoding;"
            f" write {CHAIN} for vLLM's own chain"
        )


def check_reserve(serve: Serve, *, adapts: bool) -> None:
    """Raises UserError where a step leaves out a tree's last nodes, likelier ones than those reserved."""
    if adapts and serve.reserve_chain:
        raise UserError(
            f"--budget auto and serve.reserve_chain {serve.reserve_chain}: auto leaves out a tree's last"
            " nodes as its least likely, and where rows are reserved they are not; give --reserve-chain 0,"
            " or a number of nodes in --budget"
        )


def _target_arguments(target: Target) -> dict[str, Any]:
    return {
        "model": resolve_model(target.model),
        "revision": target.revision,
        "dtype": target.dtype,
        "load_format": target.load_format,
    }


def _capacity_arguments(serve: Serve) -> dict[str, Any]:
    return {
        "max_model_len": serve.max_model_len,
        "max_num_seqs": serve.max_num_seqs,
        "max_num_batched_tokens": serve.max_num_batched_tokens,
        "tensor_parallel_size": serve.tensor_parallel_size,
        "enforce_eager": serve.enforce_eager,
        # a cached prefix has no hidden states to capture, and vLLM's CPU build refuses it for hybrid targets
        "enable_prefix_caching": False,
    }


def _device_arguments(serve: Serve) -> dict[str, Any]:
    if not is_cuda():
        # the section of serve/seam/: bit-equal stand-ins for the kernels that crawl in Triton's interpreter
        cache = _cache_arguments(serve.kv_cache_gib or _CPU_CACHE_GIB)
        return cache | _process_arguments(serve) | {"additional_config": {SECTION: {}}}
    kernels = {} if _has_flashinfer() else {"gdn_prefill_backend": "triton"}
    arguments = {"gpu_memory_utilization": serve.gpu_memory_utilization, "additional_config": kernels}
    if not (serve.compile or serve.enforce_eager):
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return arguments | (_cache_arguments(serve.kv_cache_gib) if serve.kv_cache_gib else {})


def _process_arguments(serve: Serve) -> dict[str, Any]:
    """A worker alone is in its engine's process, as on a GPU: on a CPU vLLM starts it apart, to give OpenMP
    its threads, of which `_cpu_defaults` takes care, and imports itself once more for it."""
    return {"distributed_executor_backend": _ONE_PROCESS} if serve.tensor_parallel_size == 1 else {}


def _cache_arguments(gib: float) -> dict[str, Any]:
    return {"kv_cache_memory_bytes": int(gib * 2**30)}


def _step_costs(serve: Serve) -> dict[str, Any]:
    """What the plugin is told: costs that are known, and where measured ones are to be kept.

    Read here, once, since an engine's ranks have to know the same.  Raises UserError for another file, and
    where nothing is known and nothing can be measured.
    """
    path = serve.step_costs
    known = None if path is None or not path.exists() else read_costs(path)
    if known is None and (serve.enforce_eager or not is_cuda()):
        raise UserError(
            "--budget auto needs to know what steps cost, and only CUDA graphs are measured: name a file of"
            " costs in serve.step_costs, or give a number of nodes"
        )
    told = None if known is None else tell_costs(known)
    return {"known": told, "path": None if path is None else str(path.resolve())}


def _drafting(ckpt: Path, budget: int | None, reserve_chain: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """vLLM's speculative_config, and what our plugin is asked for."""
    num_slots = parse_config(read_drafter_config(ckpt), str(ckpt)).block_size - 1
    speculative = {"method": "dflash", "model": str(ckpt), "num_speculative_tokens": budget or num_slots}
    tree: dict[str, Any] = {"num_slots": num_slots}
    if budget:
        return speculative, {"tree": tree | ({"reserved": reserve_chain} if reserve_chain else {})}
    if (ckpt / PAIRWISE_NAME).exists():
        return speculative, {"tree": tree | {"chains": True}}
    return speculative, {}
