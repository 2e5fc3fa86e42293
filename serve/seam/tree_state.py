"""What a tree changes about the target's state in a step: positions, who sees whom, and what is kept.

Mixed in before the model state class that vLLM chose (`vllm.v1.worker.gpu.model_states`).  Order of a step:
preprocess_state, prepare_attn, prepare_inputs, forward, sampler, postprocess_state, propose.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode

from serve.engine import CHAIN_REQUEST
from serve.seam.runtime import TreeRuntime
from serve.seam.speculator import TreeSpeculator
from serve.seam.verifier import TreeVerifier

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_states.interface import ModelState as _State
else:
    _State = object


class TreeState(_State):
    """Rows stay linear and keep a cache slot each; only positions and visibility follow the tree."""

    runtime: TreeRuntime
    speculator: TreeSpeculator
    verifier_class: type[TreeVerifier]

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        self.runtime.admit(req_index, chain_only=needs_chain(new_req_data.sampling_params))

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        config = self.vllm_config.speculative_config
        return sampler, self.verifier_class(sampler, config, self.device, self.runtime)

    def preprocess_state(self, input_batch: Any, *args: Any) -> None:
        super().preprocess_state(input_batch, *args)
        self.runtime.begin(input_batch)

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: Any,
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        run_as_trees(input_batch)
        metadata = super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture,
            **kwargs,
        )
        is_full_graph = cudagraph_mode == CUDAGraphMode.FULL
        self.runtime.attach(
            metadata,
            input_batch,
            block_tables,
            slot_mappings,
            for_capture=for_capture,
            is_full_graph=is_full_graph,
        )
        return metadata

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        positions = inputs.get("positions", input_batch.positions)
        return inputs | {"positions": self.runtime.move_positions(input_batch, positions)}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        return inputs | self.runtime.dummy_inputs(inputs, num_tokens)

    def postprocess_state(self, idx_mapping: torch.Tensor, *args: Any) -> None:
        super().postprocess_state(idx_mapping, *args)
        self.runtime.commit()  # before the drafter runs: it overwrites the slot mappings

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        layers = self.vllm_config.compilation_config.static_forward_context
        of_drafter = self.speculator.draft_attn_layer_names
        self.runtime.bind(
            [
                {name: layers[name] for name in group.layer_names if name not in of_drafter}
                for group in kv_cache_config.kv_cache_groups
            ]
        )


def run_as_trees(input_batch: Any) -> None:
    """Tells vLLM's metadata that every request with drafts is verified, in place.

    To keep a step's shape vLLM gives a prompt's last token placeholders for drafts if it is computed beside
    running requests.  It calls that a prefill where nothing was computed before, in a prompt of one token.
    Of such rows the first alone counts.
    """
    drafts_B, runs_B = input_batch.num_draft_tokens_per_req, input_batch.prefill_runs_as_decode_np
    if drafts_B is not None and runs_B is not None:
        input_batch.prefill_runs_as_decode_np = runs_B | (drafts_B > 0)


def needs_chain(params: Any) -> bool:
    """Whether these sampling settings look at the drafts before a row as if they were its past.

    That is so on a chain alone, and stock code is right there: penalties, bad words, grammars and thinking
    budgets do.  A request may also ask for a chain: `serve.engine.CHAIN_REQUEST`.
    """
    return params is not None and (
        (params.extra_args or {}).items() >= CHAIN_REQUEST.items()
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.bad_words)
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None
    )
