"""serve/seam/metrics.py: what the server counts of its trees."""

from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    import vllm.v1.worker.cpu_worker  # noqa: F401  (its patches come before the rest)

from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.v1.engine import async_llm
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from serve.seam import metrics
from serve.seam.metrics import TreeStatLogger, install_metrics, num_delivered


def config_of(**tree: object) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="target"),
        additional_config={"draftsmith": {"tree": {"num_slots": 7} | tree}},
    )


LABELS = {"model_name": "target", "engine": "0"}


def iteration(num_tokens: int, num_first: int, num_later: int) -> IterationStats:
    stats = IterationStats()
    stats.num_generation_tokens = num_tokens
    stats.time_to_first_tokens_iter = [0.1] * num_first
    stats.inter_token_latencies_iter = [0.1] * num_later
    return stats


def verified(*trees: tuple[int, int]) -> SchedulerStats:
    """Trees of so many nodes, accepted so deep."""
    drafting = SpecDecodingStats.new(15)
    for num_nodes, depth in trees:
        drafting.observe_draft(num_nodes, depth)
    return SchedulerStats(spec_decoding_stats=drafting)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def logger(registry) -> TreeStatLogger:
    return TreeStatLogger(config_of(), registry=registry)


def test_nodes_and_depths_are_counted(logger, registry):
    logger.record(verified((15, 0), (15, 3), (7, 7)), None)
    logger.record(verified((15, 3)), None)
    assert registry.get_sample_value("draftsmith:verified_nodes_total", LABELS) == 52
    for depth, count in [("0.0", 1), ("2.0", 1), ("3.0", 3), ("6.0", 3), ("8.0", 4), ("+Inf", 4)]:
        name = "draftsmith:accepted_depth_bucket"
        assert registry.get_sample_value(name, LABELS | {"le": depth}) == count
    assert registry.get_sample_value("draftsmith:accepted_depth_sum", LABELS) == 13


def test_tokens_after_the_end_of_an_answer_are_not_delivered(logger, registry):
    """Five were accepted, but the answer ended at the second of them."""
    logger.record(verified((15, 5)), iteration(num_tokens=2, num_first=0, num_later=1))
    assert registry.get_sample_value("draftsmith:delivered_draft_tokens_total", LABELS) == 1


@pytest.mark.parametrize(
    ("stats", "count"),
    [
        (iteration(3, 3, 0), 0),  # prompts, a token each
        (iteration(9, 1, 2), 6),
        (iteration(0, 0, 1), 0),  # an output without tokens
    ],
)
def test_the_targets_own_tokens_are_not_drafts(stats, count):
    assert num_delivered(stats) == count


def test_where_each_step_chooses_its_rows_are_counted_and_no_nodes(registry):
    logger = TreeStatLogger(config_of(costs={"known": None, "path": None}), registry=registry)
    for rows in (9, 40):
        stats = verified((15, 2))
        stats.cudagraph_stats = CUDAGraphStat(rows, 64, 64 - rows, "FULL")
        logger.record(stats, None)
    assert registry.get_sample_value("draftsmith:step_rows_sum", LABELS) == 49
    assert registry.get_sample_value("draftsmith:step_rows_count", LABELS) == 2
    assert registry.get_sample_value("draftsmith:verified_nodes_total", LABELS) is None
    assert registry.get_sample_value("draftsmith:accepted_depth_sum", LABELS) == 4


def test_steps_without_drafts_and_without_statistics_count_nothing(logger, registry):
    logger.record(SchedulerStats(), None)
    logger.record(None, None)
    assert registry.get_sample_value("draftsmith:verified_nodes_total", LABELS) == 0


def test_our_server_gets_them_beside_what_vllm_loads(monkeypatch):
    monkeypatch.setattr(async_llm, "load_stat_logger_plugin_factories", lambda: ["another"])
    monkeypatch.setattr(metrics, "check_signatures", lambda _: None)  # of the function that was replaced
    install_metrics()
    assert async_llm.load_stat_logger_plugin_factories() == ["another", TreeStatLogger]
