"""What vLLM's metrics do not say of draft trees, on the server's /metrics.

vLLM's own keep their names and meaning: drafts are verifications, draft tokens are verified nodes, and
accepted tokens are those of the accepted path, also where the answer ends within it.  Where each step chooses
how much it verifies (`serve.seam.budgets`), draft tokens are nodes that it could choose from, here as with
chains; the rows of a step say what was chosen.

Patched name: `vllm.v1.engine.async_llm.load_stat_logger_plugin_factories`, in our server alone.  vLLM's entry
point for loggers would turn statistics on for everybody who has this package, trees or not.
"""

from itertools import pairwise
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from vllm.v1.engine import async_llm
from vllm.v1.metrics.loggers import StatLoggerBase

from serve.engine import SECTION
from serve.seam.checks import METRICS_FIELDS, METRICS_SIGNATURES, check_fields, check_signatures

_LABELS = ("model_name", "engine")
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
_DEPTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 23, 31)


def install_metrics() -> None:
    """For the server of this process, whose engine drafts trees.  Raises SeamError as `serve.seam.checks`."""
    check_signatures(METRICS_SIGNATURES)
    check_fields(METRICS_FIELDS)
    load = async_llm.load_stat_logger_plugin_factories
    async_llm.load_stat_logger_plugin_factories = lambda: [*load(), TreeStatLogger]


class TreeStatLogger(StatLoggerBase):
    """Of one engine."""

    def __init__(
        self, vllm_config: Any, engine_index: int = 0, registry: CollectorRegistry = REGISTRY
    ) -> None:
        labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._rows: Histogram | None = None
        self._nodes: Counter | None = None
        if _adapts(vllm_config):
            self._rows = Histogram(
                "draftsmith:step_rows",
                "Rows that the target computed in a step: committed tokens, chosen nodes and prompts'.",
                _LABELS,
                buckets=_ROWS,
                registry=registry,
            ).labels(*labels)
        else:
            self._nodes = Counter(
                "draftsmith:verified_nodes",
                "Nodes of draft trees that the target verified.",
                _LABELS,
                registry=registry,
            ).labels(*labels)
        self._delivered = Counter(
            "draftsmith:delivered_draft_tokens",
            "Accepted nodes that became part of an answer: none after its end.",
            _LABELS,
            registry=registry,
        ).labels(*labels)
        self._depth = Histogram(
            "draftsmith:accepted_depth",
            "Nodes on the accepted path of a verified tree.",
            _LABELS,
            buckets=_DEPTHS,
            registry=registry,
        ).labels(*labels)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        drafting = scheduler_stats and scheduler_stats.spec_decoding_stats
        if self._rows and scheduler_stats and scheduler_stats.cudagraph_stats:
            self._rows.observe(scheduler_stats.cudagraph_stats.num_unpadded_tokens)
        if drafting:
            if self._nodes:
                self._nodes.inc(drafting.num_draft_tokens)
            self._observe_depths(drafting.num_drafts, drafting.num_accepted_tokens_per_pos)
        if iteration_stats:
            self._delivered.inc(num_delivered(iteration_stats))

    def _observe_depths(self, num_trees: int, reached: list[int]) -> None:
        """reached: how many paths have a node at depth 1, 2, ..."""
        at_least = [num_trees, *reached, 0]
        for depth, (here, further) in enumerate(pairwise(at_least)):
            for _ in range(here - further):
                self._depth.observe(depth)

    def log_engine_initialized(self) -> None:
        """Nothing: the engine says it itself (`serve.seam.trees.confirm_trees`)."""


def _adapts(vllm_config: Any) -> bool:
    return "costs" in vllm_config.additional_config[SECTION]["tree"]


def num_delivered(iteration: Any) -> int:
    """Tokens of an iteration that the target did not draw itself: an output's others were drafts."""
    own = len(iteration.time_to_first_tokens_iter) + len(iteration.inter_token_latencies_iter)
    return max(0, iteration.num_generation_tokens - own)
