"""One state slot a request for Gated DeltaNet, whatever a tree's size: it is verified without writing."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention as _Layer
else:
    _Layer = object


class OneStateSlot(_Layer):
    """Mixed in before `QwenGatedDeltaNetAttention`, which takes a slot for every draft."""

    def get_state_shape(self) -> Any:
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            self.tp_size,
            self.num_k_heads,
            self.num_v_heads,
            self.head_k_dim,
            self.head_v_dim,
            self.conv_kernel_size,
            0,
        )

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return replace(super().get_kv_cache_spec(vllm_config), num_speculative_blocks=0)
