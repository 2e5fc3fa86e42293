"""How large a target, a drafter and an engine's cache are: exact arithmetic on shapes, without torch.

Nothing is read here.  `recipes.train_footprint` is the trainer's part.  Called by what `recipes/plan.py` is
made of.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.errors import UserError
from recipes.schema import Drafter, Lora

GIB = 2**30
FP32 = 4
DTYPE_BYTES = {"bfloat16": 2, "float32": FP32}
SERVED_NODES = 15
"""Of a draft tree where a recipe measures none: `serve.engine.DEFAULT_BUDGET`."""
SEQUENCE_BYTES = 4 + 1
"""Of a token in a shard, besides its tap states: id and loss mask."""

# The target


@dataclass(frozen=True)
class GatedDeltaNet:
    """The linear-attention layers of a Qwen3.5 hybrid."""

    num_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def channels(self) -> int:
        """Convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def count_parameters(self, hidden_size: int) -> int:
        """Of one layer's mixer."""
        values = self.value_heads * self.value_dim
        projections = hidden_size * (self.channels + values + 2 * self.value_heads) + values * hidden_size
        return projections + self.channels * self.conv_kernel + 2 * self.value_heads + self.value_dim

    def state_bytes(self, dtype_bytes: int, ranks: int = 1, num_drafts: int = 0) -> int:
        """One slot of one layer on a rank: convolution in the model's dtype, recurrent state in fp32.

        Of a chain the convolution's line is longer by its drafts (vLLM's `gated_delta_net_state_shape`).
        """
        conv = self.channels // ranks * (self.conv_kernel - 1 + num_drafts) * dtype_bytes
        return conv + self.value_heads // ranks * self.value_dim * self.key_dim * FP32

    def kept_bytes(self, dtype_bytes: int, ranks: int, batch: int, num_rows: int) -> int:
        """What trees of num_rows rows keep until they are committed (`KeptLayers`, all layers on a rank)."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * (self.value_dim + 1)
        a_row = (self.channels + keys) * dtype_bytes + values * FP32
        return self.num_layers * batch * num_rows * a_row // ranks


@dataclass(frozen=True)
class Vision:
    """The vision tower of a Qwen3.5 wrapper, which an engine loads too."""

    depth: int
    hidden_size: int
    intermediate_size: int
    out_size: int
    patch_values: int
    """Of one patch: channels x frames x height x width."""
    num_positions: int
    merged: int
    """Patches that make one token."""

    def count_parameters(self) -> int:
        size, merged = self.hidden_size, self.merged * self.hidden_size
        block = 4 * size * size + 2 * size * self.intermediate_size + 9 * size + self.intermediate_size
        merger = 2 * size + merged * (merged + 1) + (merged + 1) * self.out_size
        return (self.patch_values + 1 + self.num_positions) * size + self.depth * block + merger


DENSE = "qwen3", "llama"
"""Values of model_type."""


@dataclass(frozen=True)
class Target:
    """What a config.json says of a target's size: dense Qwen3 or Llama, or Qwen3.5 with its Gated-DeltaNet
    layers."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    attention_layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    gated: bool
    """Whether queries come with an output gate of their size."""
    norms_heads: bool
    """Queries and keys, one norm each for all heads."""
    tied: bool
    gdn: GatedDeltaNet | None
    vision: Vision | None
    mtp_layers: int
    """Published beside the model; neither engine nor trainer loads them."""

    @property
    def num_layers(self) -> int:
        return self.attention_layers + (self.gdn.num_layers if self.gdn else 0)

    def count_text_parameters(self) -> int:
        parts = self.vocab_size * self.hidden_size * (1 if self.tied else 2) + self.hidden_size
        mlp = self.num_layers * (3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size)
        recurrent = self.gdn.num_layers * self.gdn.count_parameters(self.hidden_size) if self.gdn else 0
        return parts + mlp + self.attention_layers * self._count_attention() + recurrent

    def count_served_parameters(self) -> int:
        """What an engine holds."""
        return self.count_text_parameters() + (self.vision.count_parameters() if self.vision else 0)

    def count_published_parameters(self) -> int:
        """What lies on the disk. A layer of multi-token prediction: one of attention, behind a projection."""
        size = self.hidden_size
        layer = self._count_attention() + 3 * size * self.intermediate_size + 2 * size
        return self.count_served_parameters() + self.mtp_layers * (layer + 2 * size * size + 3 * size)

    def _count_attention(self) -> int:
        queries, keys = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        inputs = (2 if self.gated else 1) * queries + 2 * keys
        return self.hidden_size * (inputs + queries) + (2 * self.head_dim if self.norms_heads else 0)

    def key_value_bytes(self, dtype_bytes: int, ranks: int = 1) -> int:
        """Of a token in one attention layer's cache on a rank; a rank holds one head at least."""
        return 2 * max(1, self.key_value_heads // ranks) * self.head_dim * dtype_bytes

    def widest_layer(self, ranks: int = 1) -> int:
        """Of a token, on a rank: the elements that a layer's widest step reads and writes."""
        mlp = 3 * self.intermediate_size
        mixed = 3 * (self.gdn.channels + self.gdn.value_heads * self.gdn.value_dim) if self.gdn else 0
        return max(mlp, mixed) // ranks


def read_target(config: Mapping[str, Any], source: str) -> Target:
    """From a config.json; `source` names it in the UserError for a model that cannot be counted."""
    text = config.get("text_config", config)
    kind = text.get("model_type", "")
    hybrid = kind.startswith("qwen3_5_text") or kind == "qwen3_5"
    if not hybrid and kind not in DENSE:
        known = ", ".join(DENSE)
        raise UserError(
            f"{source}: model_type is {kind!r}; plans count dense targets ({known}) and Qwen3.5 hybrids"
            " (qwen3_5)"
        )
    if text.get("attention_bias") or text.get("mlp_bias"):
        raise UserError(f"{source}: attention_bias or mlp_bias is set; plans count targets without")
    try:
        return _read_text(text, config, hybrid=hybrid)
    except KeyError as missing:
        raise UserError(f"{source}: a plan needs {missing.args[0]!r}, found no such key") from None


def _read_text(text: Mapping[str, Any], config: Mapping[str, Any], *, hybrid: bool) -> Target:
    num_layers = text["num_hidden_layers"]
    linear = _count_linear(text) if hybrid else 0
    vision = config.get("vision_config") if hybrid else None
    return Target(
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        vocab_size=text["vocab_size"],
        attention_layers=num_layers - linear,
        heads=text["num_attention_heads"],
        key_value_heads=text["num_key_value_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        gated=hybrid,
        norms_heads=text["model_type"] != "llama",
        tied=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
        gdn=_read_gdn(text, linear) if linear else None,
        vision=_read_vision(vision) if vision else None,
        mtp_layers=text.get("mtp_num_hidden_layers", 0),
    )


def _count_linear(text: Mapping[str, Any]) -> int:
    """Where layers are not named, every full_attention_interval-th is attention (transformers' rule)."""
    if text.get("layer_types"):
        return list(text["layer_types"]).count("linear_attention")
    return text["num_hidden_layers"] - text["num_hidden_layers"] // text["full_attention_interval"]


def _read_gdn(text: Mapping[str, Any], num_layers: int) -> GatedDeltaNet:
    return GatedDeltaNet(
        num_layers=num_layers,
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        conv_kernel=text["linear_conv_kernel_dim"],
    )


def _read_vision(vision: Mapping[str, Any]) -> Vision:
    return Vision(
        depth=vision["depth"],
        hidden_size=vision["hidden_size"],
        intermediate_size=vision["intermediate_size"],
        out_size=vision["out_hidden_size"],
        patch_values=vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
        num_positions=vision["num_position_embeddings"],
        merged=vision["spatial_merge_size"] ** 2,
    )


# The drafter


def count_drafter_parameters(drafter: Drafter, hidden_size: int) -> int:
    """All of a published checkpoint; embedding and head are the target's."""
    queries, keys = query_size(drafter), key_size(drafter)
    attention = hidden_size * (2 * queries + 2 * keys) + 2 * drafter.head_dim
    layer = attention + 3 * hidden_size * drafter.intermediate_size + 2 * hidden_size
    return drafter.num_hidden_layers * layer + _projection_size(drafter, hidden_size) + 2 * hidden_size


def count_adapter_parameters(drafter: Drafter, hidden_size: int, lora: Lora) -> int:
    """What is trained of a drafter with low-rank adapters: two matrices beside each of their targets."""
    queries, keys, between = query_size(drafter), key_size(drafter), drafter.intermediate_size
    widths = {  # of a projection's input and output together
        "q_proj": hidden_size + queries,
        "k_proj": hidden_size + keys,
        "v_proj": hidden_size + keys,
        "o_proj": queries + hidden_size,
        "gate_proj": hidden_size + between,
        "up_proj": hidden_size + between,
        "down_proj": between + hidden_size,
    }
    return drafter.num_hidden_layers * lora.rank * sum(widths[target] for target in lora.targets)


def served_drafter_bytes(drafter: Drafter, hidden_size: int, dtype_bytes: int, ranks: int) -> int:
    """On a rank of vLLM 0.32: layers are split, `fc` is not, and keys' and values' weights are held twice."""
    projection = _projection_size(drafter, hidden_size)
    split = count_drafter_parameters(drafter, hidden_size) - projection
    fused = 2 * drafter.num_hidden_layers * key_size(drafter) * hidden_size
    return ((split + fused) // ranks + projection) * dtype_bytes


def drafter_key_value_bytes(drafter: Drafter, dtype_bytes: int, ranks: int = 1) -> int:
    """Of a token in one layer's cache on a rank."""
    return 2 * max(1, drafter.num_key_value_heads // ranks) * drafter.head_dim * dtype_bytes


def tap_bytes(drafter: Drafter, hidden_size: int, dtype_bytes: int) -> int:
    """Of a token's tap states."""
    return len(drafter.target_layer_ids) * hidden_size * dtype_bytes


def query_size(drafter: Drafter) -> int:
    return drafter.num_attention_heads * drafter.head_dim


def key_size(drafter: Drafter) -> int:
    return drafter.num_key_value_heads * drafter.head_dim


def _projection_size(drafter: Drafter, hidden_size: int) -> int:
    return len(drafter.target_layer_ids) * hidden_size * hidden_size


# The engine's cache: pages of one size, of which every layer of a request takes its own


@dataclass(frozen=True)
class Layers:
    """Layers of a kind: attention with bytes a token, or recurrent with bytes a slot."""

    count: int
    token_bytes: int = 0
    slot_bytes: int = 0
    window: int | None = None


@dataclass(frozen=True)
class Cache:
    """How vLLM 0.32 pages the caches of an engine, on one rank.

    A page of attention holds so many tokens that a recurrent state fits one too (`platforms.interface`,
    `unify_kv_cache_spec_page_size`).  Layers are grouped in equal numbers, a kind's last group filled up.
    """

    layers: Sequence[Layers]
    in_flight_tokens: int
    """Tokens of steps that are not settled: a window holds on to them."""

    ALIGNMENT = 16

    @property
    def block_tokens(self) -> int:
        """Of the first attention layers' page, before pages are made equal."""
        slot = max((kind.slot_bytes for kind in self.layers), default=0)
        first = next(kind.token_bytes for kind in self.layers if kind.token_bytes)
        return self.ALIGNMENT * max(1, math.ceil(slot / (self.ALIGNMENT * first)))

    @property
    def page_bytes(self) -> int:
        return max(max(kind.slot_bytes, self.block_tokens * kind.token_bytes) for kind in self.layers)

    def count_pages(self, num_tokens: int, state_slots: int) -> int:
        """Of one request of num_tokens."""
        return sum(
            self._padded(kind.count) * self._pages_of(kind, num_tokens, state_slots) for kind in self.layers
        )

    def request_bytes(self, num_tokens: int, state_slots: int) -> int:
        return self.count_pages(num_tokens, state_slots) * self.page_bytes

    def _pages_of(self, kind: Layers, num_tokens: int, state_slots: int) -> int:
        if kind.slot_bytes:
            return state_slots
        own = self.block_tokens * kind.token_bytes
        tokens = self.block_tokens * (self.page_bytes // own if self.page_bytes % own == 0 else 1)
        if kind.window is None:
            return math.ceil(num_tokens / tokens)
        seen = min(kind.window - 1 + self.in_flight_tokens, num_tokens)
        return math.ceil(seen / tokens) + 1  # a window may begin anywhere in a page

    def _padded(self, count: int) -> int:
        fewest, most = (pick(kind.count for kind in self.layers) for pick in (min, max))
        size = most if most < 1.5 * fewest else fewest
        return math.ceil(count / size) * size


def cached_layers(
    target: Target, drafter: Drafter | None, dtype_bytes: int, ranks: int, num_drafts: int
) -> list[Layers]:
    """Of an engine, with a drafter or without."""
    kinds = [Layers(target.attention_layers, token_bytes=target.key_value_bytes(dtype_bytes, ranks))]
    if target.gdn:
        slot = target.gdn.state_bytes(dtype_bytes, ranks, num_drafts)
        kinds.append(Layers(target.gdn.num_layers, slot_bytes=slot))
    if drafter is not None:
        token = drafter_key_value_bytes(drafter, dtype_bytes, ranks)
        sliding = drafter.layer_types.count("sliding_attention")
        kinds.append(Layers(sliding, token_bytes=token, window=drafter.sliding_window))
        kinds.append(Layers(drafter.num_hidden_layers - sliding, token_bytes=token))
    return [kind for kind in kinds if kind.count]
