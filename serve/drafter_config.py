"""What a published DFlash config.json says, typed, and the tensors that follow from it.

The format is that of z-lab's checkpoints, which stock vLLM 0.32 loads (models/qwen3_dflash.py): Qwen3 fields,
`dflash_config`, and the tensors `layers.*`, `fc`, `hidden_norm` and `norm` only: embedding and head are the
target's.  DFlash2 drafters (models/qwen3_dflash2.py) have convolutions and a selector besides.  Whether a
config fits a target is asked in `serve.drafter_fit`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes.errors import UserError
from recipes.problems import describe_problem
from recipes.schema import LayerType

ARCHITECTURE = "DFlashDraftModel"
SELECTOR_ARCHITECTURE = "DFlash2DraftModel"
CONFIG_NAME = "config.json"
SLIDING = "sliding_attention"
PAIRWISE_NAME = Path("pairwise") / "head.safetensors"
"""A pairwise head (`serve.pairwise`), where those who load a checkpoint's own weights do not look."""
SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""What a DFlash2 drafter says besides, in `dflash_config`, the only place where vLLM looks for them."""

Shapes = dict[str, tuple[int, ...]]
Positive = Annotated[int, Field(gt=0)]


class PublishedConfig(BaseModel):
    """A drafter's config.json, the keys of `dflash_config` lifted to the top (where some files have them)."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    architectures: list[str]
    model_type: str
    block_size: Annotated[int, Field(ge=2)]
    target_layer_ids: Annotated[list[int], Field(min_length=1)]
    mask_token_id: int
    hidden_size: Positive
    vocab_size: Positive
    num_hidden_layers: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    layer_types: list[LayerType] | None = None
    """None: every layer sees the whole context, both ways inside the block."""
    sliding_window: int | None = None
    num_target_layers: int | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    is_causal: bool | None = None
    """Inside the block; None: sliding layers are, full layers are not."""
    sample_from_anchor: bool | None = None
    """Whether the anchor's slot drafts as well."""
    dtype: str = "bfloat16"
    # DFlash2's
    conv_kernel_size: int | None = None
    """Taps: a slot's own state and those of the slots before it."""
    conv_group_size: int | None = None
    """Channels that share what the state adds to the kernel."""
    selector_rank: int | None = None
    selector_top_k: int | None = None
    """Candidates of a slot."""
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    """Of the logits that the selector adds to.  None: 1, as above."""
    final_logit_softcapping: float | None = None

    @property
    def has_selector(self) -> bool:
        """Whether it is a DFlash2 drafter."""
        return self.architectures == [SELECTOR_ARCHITECTURE]

    def resolved_layer_types(self) -> list[LayerType]:
        full: LayerType = "full_attention"
        return self.layer_types or [full] * self.num_hidden_layers


def parse_config(config: Mapping[str, Any], source: str) -> PublishedConfig:
    """`source` names the file in the UserError that a missing or mistyped key raises."""
    nested = config.get("dflash_config") or {}
    twice = [key for key in nested if key in config and config[key] != nested[key]]
    if twice:
        raise UserError(
            f"{source}: {twice} stand in {CONFIG_NAME} and in its dflash_config, with other values"
        )
    outside = [key for key in SELECTOR_KEYS if key in config and key not in nested]
    if outside and config.get("architectures") == [SELECTOR_ARCHITECTURE]:
        raise UserError(
            f"{source}: {outside} stand beside dflash_config, where vLLM does not look: move them in"
        )
    try:
        return PublishedConfig.model_validate({**config, **nested})
    except ValidationError as invalid:
        lines = [describe_problem(details) for details in invalid.errors()]
        raise UserError("\n  ".join([f"{source}: {CONFIG_NAME} is no DFlash drafter's", *lines])) from invalid


def expected_tensors(config: Mapping[str, Any]) -> Shapes:
    """Name -> shape of every tensor of a checkpoint with this config.json, weights as [out, in]."""
    c = parse_config(config, "drafter")
    shapes: Shapes = {
        "fc.weight": (c.hidden_size, len(c.target_layer_ids) * c.hidden_size),
        "hidden_norm.weight": (c.hidden_size,),
        "norm.weight": (c.hidden_size,),
    }
    for i in range(c.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in _layer_tensors(c).items()}
    return shapes | _selector_tensors(c) if c.has_selector else shapes


def pairwise_tensors(vocab_size: int, hidden_size: int, rank: int) -> Shapes:
    """Those of `serve.pairwise.PairwiseTables`."""
    return {
        "parents_Vr": (vocab_size, rank),
        "children_Vr": (vocab_size, rank),
        "gate_rD": (rank, hidden_size),
        "rest_r": (rank,),
    }


def _layer_tensors(c: PublishedConfig) -> Shapes:
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {
        "input_layernorm": (c.hidden_size,),
        "self_attn.q_proj": (queries, c.hidden_size),
        "self_attn.k_proj": (keys, c.hidden_size),
        "self_attn.v_proj": (keys, c.hidden_size),
        "self_attn.o_proj": (c.hidden_size, queries),
        "self_attn.q_norm": (c.head_dim,),
        "self_attn.k_norm": (c.head_dim,),
        "post_attention_layernorm": (c.hidden_size,),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size),
    }


def _selector_tensors(c: PublishedConfig) -> Shapes:
    """Of vLLM's `DFlashGroupedConv`, one around attention and MLP of each layer, and `CandidateSelector`."""
    taps, group, rank = c.conv_kernel_size, c.conv_group_size, c.selector_rank
    assert taps and group and rank, f"a DFlash2 drafter's keys were not checked: {taps}, {group}, {rank}"
    shapes: Shapes = {}
    for i in range(c.num_hidden_layers):
        for conv in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
            # before the sublayer and after it
            shapes[f"{conv}.base_kernel"] = (2, taps, c.hidden_size)
            shapes[f"{conv}.kernel_projection.weight"] = (2 * taps * (c.hidden_size // group), c.hidden_size)
    return shapes | {
        "candidate_selector.predecessor_codebook": (c.vocab_size, rank),
        "candidate_selector.successor_codebook": (c.vocab_size, rank),
        "candidate_selector.hidden_projection.weight": (rank, c.hidden_size),
    }
