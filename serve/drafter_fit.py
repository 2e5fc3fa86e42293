"""Whether a drafter fits a target: the differences, one sentence each, in config and in tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.errors import UserError
from serve.drafter_config import (
    ARCHITECTURE,
    SELECTOR_ARCHITECTURE,
    SELECTOR_KEYS,
    SLIDING,
    PublishedConfig,
    Shapes,
)
from serve.headers import TensorHeader

STORED_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # config.json's word -> safetensors'
MOST_SELECTED = 256
"""Candidates of a slot that trees can grow on (`serve.tree_grow_kernels.grow_trees`)."""
_SHOWN_DIFFERENCES = 5


def config_differences(c: PublishedConfig, target: Mapping[str, Any]) -> Iterator[str]:
    """One sentence per thing in a drafter's config that cannot be served with this target."""
    if c.architectures != [ARCHITECTURE] and not c.has_selector:
        yield (
            f"architectures is {c.architectures}, a DFlash drafter says {[ARCHITECTURE]},"
            f" a DFlash2 drafter {[SELECTOR_ARCHITECTURE]}"
        )
    if c.model_type != "qwen3":
        yield f"model_type is {c.model_type!r}, only drafters of type 'qwen3' are served"
    if c.dtype not in STORED_DTYPES:
        yield f"dtype is {c.dtype!r}, write one of {', '.join(STORED_DTYPES)}"
    if c.sample_from_anchor:
        yield "sample_from_anchor is True: its anchor drafts as well, which vLLM's DFlash refuses"
    yield from _target_differences(c, target)
    yield from _attention_differences(c)
    yield from _selector_differences(c) if c.has_selector else _foreign_keys(c)


def _target_differences(c: PublishedConfig, target: Mapping[str, Any]) -> Iterator[str]:
    for key in ("hidden_size", "vocab_size"):
        if getattr(c, key) != target[key]:
            yield f"{key} is {getattr(c, key)}, the target's is {target[key]}"
    depth = target["num_hidden_layers"]
    if c.num_target_layers not in (None, depth):
        yield f"num_target_layers is {c.num_target_layers}, the target has {depth}"
    if c.target_layer_ids != sorted(set(c.target_layer_ids)):
        yield f"target_layer_ids is {c.target_layer_ids}, ids must ascend, each once"
    # the last layer is left out because transformers returns it after the final norm, vLLM before it
    outside = [i for i in c.target_layer_ids if not 0 <= i < depth - 1]
    if outside:
        yield f"target_layer_ids has {outside}, the target's {depth} layers can be tapped at 0 to {depth - 2}"
    if not 0 <= c.mask_token_id < target["vocab_size"]:
        yield f"mask_token_id is {c.mask_token_id}, the target's vocabulary has {target['vocab_size']} ids"


def _attention_differences(c: PublishedConfig) -> Iterator[str]:
    if c.num_attention_heads % c.num_key_value_heads:
        yield (
            f"num_attention_heads is {c.num_attention_heads}, no multiple of"
            f" num_key_value_heads {c.num_key_value_heads}"
        )
    if c.head_dim % 2:
        yield f"head_dim is {c.head_dim}, rotary positions need an even one"
    types = c.resolved_layer_types()
    if len(types) != c.num_hidden_layers:
        yield f"layer_types has {len(types)} entries, num_hidden_layers is {c.num_hidden_layers}"
    if SLIDING in types and (c.sliding_window or 0) < 1:
        yield f"sliding_window is {c.sliding_window}, but layer_types has {SLIDING} layers"
    yield from _rope_differences(c)


def _rope_differences(c: PublishedConfig) -> Iterator[str]:
    thetas = {c.rope_theta, (c.rope_parameters or {}).get("rope_theta")} - {None}
    if not thetas:
        yield "rope_theta is missing; vLLM would assume 1e6: write it, and rope_parameters as well"
    if len(thetas) > 1:
        yield f"rope_theta is {c.rope_theta}, rope_parameters says {c.rope_parameters['rope_theta']}"  # type: ignore[index]


def _foreign_keys(c: PublishedConfig) -> Iterator[str]:
    for key in SELECTOR_KEYS:
        if getattr(c, key):
            yield f"{key} is {getattr(c, key)}, but only a DFlash2 drafter has it ({SELECTOR_ARCHITECTURE})"


def _selector_differences(c: PublishedConfig) -> Iterator[str]:
    for key in SELECTOR_KEYS:
        if (getattr(c, key) or 0) < 1:
            yield f"{key} is {getattr(c, key)}, a DFlash2 drafter has at least 1"
    if c.hidden_size % (c.conv_group_size or 1):
        yield f"conv_group_size is {c.conv_group_size}, no divisor of hidden_size {c.hidden_size}"
    most = min(MOST_SELECTED, c.vocab_size)
    if (c.selector_top_k or 0) > most:
        yield f"selector_top_k is {c.selector_top_k}, trees grow on {most} candidates of a slot at most"
    if c.output_multiplier is not None and c.output_multiplier <= 0:
        yield f"output_multiplier is {c.output_multiplier}, vLLM ranks candidates under positive ones alone"


def tensor_differences(
    found: Mapping[str, TensorHeader], expected: Shapes, stored_dtype: str
) -> Iterator[str]:
    """One sentence per tensor that is missing, unknown, misshapen or of another precision."""
    for name in sorted(found.keys() - expected.keys()):
        yield f"{name} does not belong in a drafter checkpoint{_extra_reason(name)}"
    for name, shape in expected.items():
        if name not in found:
            yield f"{name} {list(shape)} is missing"
        elif found[name].shape != shape:
            yield f"{name} has shape {list(found[name].shape)}, expected {list(shape)}"
        elif found[name].dtype != stored_dtype:
            yield f"{name} is stored as {found[name].dtype}, the config's dtype is {stored_dtype}"


def _extra_reason(name: str) -> str:
    shared = any(part in ("embed_tokens", "lm_head") for part in name.split("."))
    return ": the engine would overwrite the target's own with it" if shared else ""


def refuse(source: str, differences: Iterator[str]) -> None:
    """Raises UserError with the first differences, if there are any."""
    found = list(differences)
    if not found:
        return
    more = len(found) - _SHOWN_DIFFERENCES
    lines = found[:_SHOWN_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])
    raise UserError(f"{source} does not fit its target:\n  " + "\n  ".join(lines))
