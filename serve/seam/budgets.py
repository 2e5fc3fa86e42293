"""How much of its trees a step verifies: what is worth its cost, over the whole batch at once.

vLLM's `AdaptiveVerificationManager` does it for chains.  Steps' costs are measured once graphs are captured;
each step takes as many drafts as give the most expected tokens a second, the likeliest of all requests,
within the sizes that graphs have, down to none.  Any prefix of a tree is the best tree of its size, so it
does for trees as it is, where `serve.tree_confidence` says how likely nodes are.

Patched names, as `vllm.v1.worker.gpu.model_runner` imports them: maybe_create_adaptive_verification_manager,
which asks attention backends whether they read on the device what was chosen there, and trees' do; and
resolve_adaptive_cudagraph_mode, which takes an engine without graphs for a mistake.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from serve.seam.checks import BUDGET_FIELDS, BUDGET_SIGNATURES, SeamError, check_fields, check_signatures
from serve.step_costs import Curve, StepCosts, keep_costs, parse_costs

_logger = init_logger("vllm.draftsmith")  # below vllm's own, whose settings it shares

_STEPS_OF_A_LINE = 1000
"""After as many the log says what was chosen."""


@dataclass(frozen=True)
class CostOptions:
    """What the engine was told of them."""

    known: StepCosts | None
    """None: they are measured."""
    path: Path | None
    """Where known ones come from, or measured ones go."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "CostOptions":
        """Of the options that `serve.engine` writes."""
        known, path = given["known"], given["path"]
        return cls(None if known is None else parse_costs(known), None if path is None else Path(path))


class TreeBudgets(AdaptiveVerificationManager):
    """Known costs are taken as they are, others measured."""

    def __init__(self, costs: CostOptions, identity: Mapping[str, str], *args: Any) -> None:
        super().__init__(*args)
        self._costs, self._identity = costs, identity
        self._chosen = self._offered = self._steps = 0
        if costs.known is not None:
            self.set_cost_curves(costs.known.draft, costs.known.verify)

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        batches = super().batches_to_profile(capture_sizes)
        return batches if self._costs.known is None else iter(())

    def set_initial_cost_curves(self, samples: Any) -> None:
        if self._costs.known is None:
            super().set_initial_cost_curves(samples)

    def set_cost_curves(self, draft_curve: Curve, verify_curve: Curve) -> None:
        super().set_cost_curves(draft_curve, verify_curve)
        _logger.info(
            "a step costs by rows of the target (ms): %s; and by requests, for the drafter: %s",
            _show(verify_curve),
            _show(draft_curve),
        )
        if self._costs.known is None and self._costs.path is not None:
            keep_costs(StepCosts(draft_curve, verify_curve, self._identity), self._costs.path)

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: Mapping[str, list[int]]
    ) -> int:
        num_tokens = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        left_out = sum(num_tokens_per_req.values()) - num_tokens
        self._count(sum(map(len, draft_tokens.values())), left_out)
        return num_tokens

    def _count(self, offered: int, left_out: int) -> None:
        self._steps += 1
        self._offered += offered
        self._chosen += offered - left_out
        if self._steps == _STEPS_OF_A_LINE:
            _logger.info(
                "of %d steps' %.1f nodes on average, %.1f were verified",
                self._steps,
                self._offered / self._steps,
                self._chosen / self._steps,
            )
            self._chosen = self._offered = self._steps = 0


def _show(curve: Curve) -> str:
    return ", ".join(f"{size}: {ms:.2f}" for size, ms in curve)


def identify_engine(vllm_config: Any) -> dict[str, str]:
    """What an engine's steps cost depends on."""
    target, drafter = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    on_cuda = vllm_config.device_config.device_type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_cuda else "CPU",
        "target": _describe_model(target),
        "drafter": _describe_model(drafter),
        "tensor_parallel_size": str(vllm_config.parallel_config.tensor_parallel_size),
        "nodes": str(vllm_config.speculative_config.num_speculative_tokens),
    }


def _describe_model(config: Any) -> str:
    text = config.hf_text_config
    return f"{text.num_hidden_layers} layers of {text.hidden_size}, {text.vocab_size} tokens, {config.dtype}"


def check_identity(costs: CostOptions, identity: Mapping[str, str]) -> None:
    """Raises SeamError for known costs of another engine."""
    if costs.known is not None and costs.known.of and costs.known.of != identity:
        raise SeamError(
            f"{costs.path}: step costs of {dict(costs.known.of)}, this engine is {dict(identity)}; remove the"
            " file to have them measured, or name another in serve.step_costs"
        )


def install_budgets(device_type: str, costs: CostOptions) -> None:
    """For this process, whose engine's trees adapt then.

    Raises SeamError where no costs are known and none can be measured.
    """
    check_signatures(BUDGET_SIGNATURES)
    check_fields(BUDGET_FIELDS)
    if device_type == "cpu":
        if costs.known is None:
            raise SeamError("--budget auto: a CPU's steps are not measured, name a file in serve.step_costs")
        # compiling it takes longer than all else
        plain = adaptive_verification._assign_draft_token_budget
        adaptive_verification._assign_draft_token_budget_compiled = plain

    def create(
        *,
        req_states: Any,
        query_start_loc: torch.Tensor,
        num_bonus_tokens: int,
        max_total_logits: int,
        vllm_config: Any,
        **_backends: Any,
    ) -> TreeBudgets:
        has_graphs = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        if costs.known is None and not has_graphs:
            raise SeamError("--budget auto measures CUDA graphs: not with serve.enforce_eager")
        identity = identify_engine(vllm_config)
        check_identity(costs, identity)
        of_chains = req_states, query_start_loc, num_bonus_tokens, max_total_logits
        return TreeBudgets(costs, identity, *of_chains)

    def resolve(mode: Any, *, piecewise_capture_available: bool) -> Any:
        if not mode.has_full_cudagraphs():  # known costs need no graphs
            return mode
        return adaptive_verification.resolve_adaptive_cudagraph_mode(
            mode, piecewise_capture_available=piecewise_capture_available
        )

    model_runner.maybe_create_adaptive_verification_manager = create
    model_runner.resolve_adaptive_cudagraph_mode = resolve
