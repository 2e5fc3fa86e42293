"""One state slot a request for Gated DeltaNet, whatever a tree's size: it is verified without writing."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention as _Layer
else:
    _Layer = object


_LAYER = "QwenGatedDeltaNetAttention"  # vLLM looks a replacement up by the name of the class it replaces


def register_gdn(layer_class: type, backend_class: type) -> None:
    """Replaces Gated-DeltaNet layer and metadata for the engine of this process; idempotent."""
    if op_registry_oot.get(_LAYER) is layer_class:
        return
    PluggableLayer.register_oot(layer_class, name=_LAYER)
    path = f"{backend_class.__module__}.{backend_class.__name__}"
    register_backend(MambaAttentionBackendEnum.GDN_ATTN, path, is_mamba=True)


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
