"""The DFlash drafter: exactly the published computation, with the published tensor names.

Context is a row of the target's tapped states per token, projected once and read by every layer as keys and
values; the blocks' rows (the target's embeddings of [anchor, mask, ...]) run through the layers.  Neither the
target's embedding nor its head is here, and no loss: `train.step` puts those around it.
Sources: arXiv 2602.06036, section 4, and the published checkpoints' config.json.
"""

# S=context rows  Q=block rows  E=taps x hidden  D=hidden  F=intermediate
# H=heads  G=key-value heads  d=head dim  R=any rows

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recipes.schema import Drafter, LayerType
from train import pointwise
from train.attention import View, attend
from train.pointwise import Rotation


def rotation_at(positions_R: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotary angles of all `head_dim` dimensions, computed in fp32."""
    exponents = torch.arange(0, head_dim, 2, device=positions_R.device, dtype=torch.float32) / head_dim
    angles = positions_R[:, None].float() * theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


class Norm(nn.RMSNorm):
    """What is done with a norm is in its own forward pass: there alone ZeRO-3 has the weight gathered."""

    fuses = False


class RMSNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pointwise.choose(pointwise.norm, self.fuses, x)(x, self.weight, self.eps)


class SumNorm(Norm):
    def forward(self, x_RD: torch.Tensor, change_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and it normed."""
        add_and_norm = pointwise.choose(pointwise.add_and_norm, self.fuses, x_RD)
        return add_and_norm(x_RD, change_RD, self.weight, self.eps)


class RotaryNorm(Norm):
    def forward(self, x_RHd: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Heads, normed and rotated."""
        norm_and_rotate = pointwise.choose(pointwise.norm_and_rotate, self.fuses, x_RHd)
        return norm_and_rotate(x_RHd, self.weight, self.eps, *rotation)


class Attention(nn.Module):
    """Block rows attend to context and to blocks; the same key and value weights serve both."""

    def __init__(self, shape: Drafter, hidden_size: int):
        super().__init__()
        self.head_dim = shape.head_dim
        query_size = shape.num_attention_heads * shape.head_dim
        key_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=False)
        self.q_norm = RotaryNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = RotaryNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(
        self,
        x_QD: torch.Tensor,
        context_SD: torch.Tensor,
        block_rotation: Rotation,
        context_rotation: Rotation,
        view: View,
    ) -> torch.Tensor:
        query_QHd = self.q_norm(self._heads(self.q_proj(x_QD)), block_rotation)
        of_context = self._keys_and_values(context_SD, context_rotation)
        of_blocks = self._keys_and_values(x_QD, block_rotation)
        return self.o_proj(attend(query_QHd, of_context, of_blocks, view).flatten(1))

    def _keys_and_values(self, x_RD: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        key_RGd = self.k_norm(self._heads(self.k_proj(x_RD)), rotation)
        return key_RGd, self._heads(self.v_proj(x_RD))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    fuses = False

    def __init__(self, shape: Drafter, hidden_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, hidden_size, bias=False)

    def forward(self, x_QD: torch.Tensor) -> torch.Tensor:
        product_QF = pointwise.multiply_gated(self.gate_proj(x_QD), self.up_proj(x_QD), self.fuses)
        return self.down_proj(product_QF)


class Layer(nn.Module):
    def __init__(self, shape: Drafter, hidden_size: int):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape, hidden_size)
        self.post_attention_layernorm = SumNorm(hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape, hidden_size)

    def forward(
        self,
        x_QD: torch.Tensor,
        context_SD: torch.Tensor,
        block_rotation: Rotation,
        context_rotation: Rotation,
        view: View,
    ) -> torch.Tensor:
        normed_QD = self.input_layernorm(x_QD)
        change_QD = self.self_attn(normed_QD, context_SD, block_rotation, context_rotation, view)
        x_QD, normed_QD = self.post_attention_layernorm(x_QD, change_QD)
        return x_QD + self.mlp(normed_QD)


class DFlashDrafter(nn.Module):
    """Its state_dict is a published checkpoint's `model.safetensors`.

    Set `recompute_layers` to keep only the layers' inputs for the backward pass (activation checkpointing);
    otherwise what is kept of a layer leaves out what `train.pointwise` makes again.
    """

    def __init__(self, shape: Drafter, hidden_size: int):
        super().__init__()
        self.shape = shape
        self.hidden_size = hidden_size
        self.recompute_layers = False
        self.fc = nn.Linear(len(shape.target_layer_ids) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape, hidden_size) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.shape.initializer_range)

    def fuse(self, is_wanted: bool) -> None:
        """Whether a GPU has the elementwise work compiled."""
        for module in self.modules():
            if isinstance(module, Norm | MLP):
                module.fuses = is_wanted

    def forward(
        self,
        taps_SE: torch.Tensor,
        context_positions_S: torch.Tensor,
        embeddings_QD: torch.Tensor,
        block_positions_Q: torch.Tensor,
        views: Mapping[LayerType, View],
    ) -> torch.Tensor:
        """The block rows after the final norm, ready for the target's head. [Q, D]"""
        context_SD = self.hidden_norm(self.fc(taps_SE))
        head_dim, theta, dtype = self.shape.head_dim, self.shape.rope_theta, embeddings_QD.dtype
        context_rotation = rotation_at(context_positions_S, head_dim, theta, dtype)
        block_rotation = rotation_at(block_positions_Q, head_dim, theta, dtype)
        x_QD = embeddings_QD
        for layer, kind in zip(self.layers, self.shape.layer_types, strict=True):
            x_QD = self._pass(layer, x_QD, context_SD, block_rotation, context_rotation, views[kind])
        return self.norm(x_QD)

    def _pass(self, layer: nn.Module, *inputs: object) -> torch.Tensor:
        if self.recompute_layers:
            return checkpoint(layer, *inputs, use_reentrant=False)
        with pointwise.products_made_again():
            return layer(*inputs)
