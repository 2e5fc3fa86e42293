"""The four layouts of a DFlash drafter's config.json, each rewritten as the published one.

What a file says in other words is rewritten with a note; what cannot be served, or can be read in two ways,
is refused by name.  Called by `serve/formats.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from recipes.errors import UserError
from serve.drafter_config import ARCHITECTURE, CONFIG_NAME, SLIDING, PublishedConfig, parse_config
from serve.drafter_fit import config_differences

Json = dict[str, Any]
Noted = tuple[Json, list[str]]  # keys, and a sentence on whatever was done to find them

_SHOWN_PROBLEMS = 5


class Format(StrEnum):
    """Where a drafter's config.json says what."""

    PUBLISHED = "published"
    """z-lab's: Qwen3 fields, and `dflash_config` with layer ids and mask id.  `block_size` stands beside it
    (its Qwen3 and LLaMA drafters, and ours) or in it (Qwen3.5 and later).  ModelOpt and NeMo write it too."""
    PUBLISHED_OLD = "published-old"
    """The same without `dflash_config`: all at the top, where z-lab's `_draft_value` looks as well."""
    SPECULATORS = "speculators"
    """vllm-project/speculators up to 0.9: Qwen3 fields in `transformer_layer_config`, settings at the top."""
    OPEN_SPEC = "open-spec"
    """Its successor, Open Spec Config 0.0.0: Qwen3 fields at the top, settings in `speculative_config`."""


_OPEN_SPEC_KEYS = (  # required: speculators/open_spec_config.py, `DFlashSpeculativeConfig`
    *("method", "speculative_tokens", "target_layer_ids", "target_layer_start_idx"),
    *("sample_from_anchor", "mask_token_id", "sliding_window_non_causal"),
)

_OPEN_SPEC_IDS_FROM_1 = "target_layer_ids (target_layer_start_idx 1)"
_FIRST_ID = {
    # Where layer ids may stand -> what the first layer is called there; an id means that layer's output.
    # z-lab's `extract_context_feature` takes hidden_states[id + 1], of which the first is the embedding
    "target_layer_ids": 0,
    # speculators keeps vLLM's ids, "after that many layers": vLLM's `update_dflash` subtracts 1 for z-lab's
    "aux_hidden_state_layer_ids": 1,
    # vLLM's `get_eagle3_aux_layers_from_config` adds 1 to target_layer_ids and nothing to these
    "eagle_aux_hidden_state_layer_ids": 1,
    "layer_ids": 1,
    _OPEN_SPEC_IDS_FROM_1: 1,
}

_UNSERVED: dict[str, tuple[object, str]] = {
    # key -> the value that changes nothing (as null does), and what any other means
    "attention_bias": (False, "the published tensors have no biases"),
    "attention_sink_bias": (False, "attention sinks are not served"),
    "add_swa_attention_sink_bias": (False, "attention sinks are not served"),
    "attention_value_scale": (1.0, "scaled values are not served"),
    "hidden_act": ("silu", "the engine computes silu"),
    "is_neox_style": (True, "only the half-split rotary layout is served"),
    "partial_rotary_factor": (1.0, "trainers differ in what they rotate then; only whole heads are served"),
    "input_embedding_scale": (1.0, "the engine does not scale a DFlash drafter's embeddings"),
    "logit_scale": (1.0, "the published format has no scaled logits"),
    "has_own_lm_head": (False, "the head must be the target's"),
    "use_aux_hidden_state": (True, "a drafter without the target's states is no DFlash drafter"),
    "sample_from_anchor": (False, "its anchor drafts as well, which vLLM's DFlash refuses"),
    "shift_label": (False, "its anchor drafts as well, which vLLM's DFlash refuses"),
    "projector_type": ("dflash", "the head of another kind of drafter is not served"),
    "quantization_config": (None, "quantised weights are not read; get the drafter in bfloat16"),
    # DFlash2's, DSpark's, Domino's and LiLiCorr's, in config.json files that call themselves DFlash
    "conv_kernel_size": (0, "the head of another kind of drafter is not served"),
    "selector_rank": (0, "the head of another kind of drafter is not served"),
    "markov_rank": (0, "the head of another kind of drafter is not served"),
    "gru_hidden_dim": (0, "the head of another kind of drafter is not served"),
    "lilicorr_enabled": (False, "the head of another kind of drafter is not served"),
}
_MONOTONE = ("output_multiplier", "final_logit_softcapping")  # z-lab's `compute_logits`; not in vLLM's DFlash

_QWEN3_DEFAULTS = {  # transformers' Qwen3Config, which readers and writers of all four formats go through
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "attention_dropout": 0.0,
}
_QWEN3_MAX_WINDOW_LAYERS = 28
_SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_target_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
)
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_READ_KEYS = {
    *(*PublishedConfig.model_fields, *_FIRST_ID, *_UNSERVED, *_MONOTONE, *_QWEN3_DEFAULTS, *_TOKEN_KEYS),
    *("torch_dtype", "rope_scaling", "use_sliding_window", "max_window_layers", "use_swa", "swa_window_size"),
    *("is_causal", "causal", "sliding_window_non_causal", "draft_vocab_size", "target_hidden_size"),
}
_IDLE_KEYS = {  # say nothing about what is computed
    *("auto_map", "transformers_version", "_name_or_path", "_attn_implementation", "use_cache"),
    *("tie_word_embeddings", "id2label", "label2id", "problem_type", "return_dict", "is_encoder_decoder"),
    *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "max_anchors"),
    *("speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config"),
    *("open_spec_config_version", "speculative_config", "speculators_metadata"),
}


def rewrite_config(layout: Format, raw: Json, source: str) -> tuple[Json, Json, list[str]]:
    """The published config less its dtype, all keys of the file as one mapping, and notes on both.

    Raises UserError for what cannot be served or is ambiguous.
    """
    flat, layout_notes = _FLATTEN[layout](raw, source)
    config, config_notes = _published(flat, source)
    return config, flat, [*layout_notes, *config_notes]


def refuse_unread(source: str, problems: Iterable[str]) -> None:
    """Raises UserError with the first problems, if there are any."""
    found = list(problems)
    if found:
        more = [f"and {len(found) - _SHOWN_PROBLEMS} more"] if len(found) > _SHOWN_PROBLEMS else []
        lines = [*found[:_SHOWN_PROBLEMS], *more]
        raise UserError("\n  ".join([f"{source} cannot be read as a DFlash drafter:", *lines]))


# A config.json of any layout, as one mapping


def _flatten_published(raw: Json, source: str) -> Noted:
    nested = raw.get("dflash_config") or {}
    outer = {key: value for key, value in raw.items() if key != "dflash_config"}
    flat = _merge(outer, nested, f"{source}: {CONFIG_NAME} and its dflash_config")
    if not nested:
        return flat, [f"mask id and layer ids stand at the top of {CONFIG_NAME}: written into dflash_config"]
    moved = "block_size" in nested and "block_size" not in raw
    return flat, ["block_size stands in dflash_config: written beside it"] if moved else []


def _flatten_speculators(raw: Json, source: str) -> Noted:
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"{source}: {CONFIG_NAME} has no transformer_layer_config, the drafter's own layers")
    about = raw.get("speculators_config") or {}
    proposals = [method.get("speculative_tokens") or 0 for method in about.get("proposal_methods") or []]
    if max(proposals, default=0) >= (raw.get("block_size") or 0) > 0:
        raise UserError(
            f"{source}: blocks of {raw['block_size']} that propose {max(proposals)} tokens: its anchor drafts"
            " as well, which vLLM's DFlash refuses"
        )
    # the outer model_type is speculators' own; a layer without one is a Qwen3 layer (models/dflash/config.py)
    flat = {"sliding_window_non_causal": None, **raw, "model_type": "qwen3", **layer}
    return flat, _target_notes((about.get("verifier") or {}).get("name_or_path"))


def _flatten_open_spec(raw: Json, source: str) -> Noted:
    settings = raw.get("speculative_config") or {}
    absent = [key for key in _OPEN_SPEC_KEYS if settings.get(key) is None]
    if absent:
        raise UserError(f"{source}: its speculative_config lacks {', '.join(absent)}")
    method, start = settings["method"], settings["target_layer_start_idx"]
    if method != "dflash" or start not in (0, 1):
        raise UserError(
            f"{source}: its speculative_config says method {method!r} and target_layer_start_idx {start!r},"
            " expected 'dflash' and 0 or 1"
        )
    same = ("sample_from_anchor", "mask_token_id", "sliding_window_non_causal", "draft_vocab_size")
    flat = {
        **raw,
        **{key: settings.get(key) for key in same},
        "block_size": settings["speculative_tokens"] + (not settings["sample_from_anchor"]),
        _OPEN_SPEC_IDS_FROM_1 if start else "target_layer_ids": settings["target_layer_ids"],
    }
    return flat, _target_notes(settings.get("verifier"))


def _target_notes(target: str | None) -> list[str]:
    return [f"the file names its target: {target}"] if target else []


_FLATTEN: dict[Format, Callable[[Json, str], Noted]] = {
    Format.PUBLISHED: _flatten_published,
    Format.PUBLISHED_OLD: _flatten_published,
    Format.SPECULATORS: _flatten_speculators,
    Format.OPEN_SPEC: _flatten_open_spec,
}


def _merge(outer: Json, inner: Json, where: str) -> Json:
    """Both, where they agree; null says nothing."""
    said = {key: value for key, value in inner.items() if value is not None}
    twice = [key for key in said if outer.get(key) is not None and outer[key] != said[key]]
    if twice:
        raise UserError(f"{where} both say {', '.join(twice)}, with other values; keep the right one")
    return {**outer, **said}


# That mapping, as the published config


def _published(flat: Json, source: str) -> Noted:
    """The published config, but for `dtype`, which the weights decide."""
    refuse_unread(source, _unserved(flat))
    ids, id_notes = _target_layer_ids(flat, source)
    own = {"architectures": [ARCHITECTURE], "dtype": "bfloat16", "target_layer_ids": ids}
    c = parse_config({**flat, **own}, source)
    layers, layer_notes = _layer_keys(c, flat, source)
    rope, rope_notes = _rope_keys(flat, source)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": c.model_type,
        "dtype": c.dtype,
        "block_size": c.block_size,
        **{key: getattr(c, key) for key in _SHAPE_KEYS if getattr(c, key) is not None},
        "hidden_act": "silu",
        "attention_bias": False,
        **{key: usual if flat.get(key) is None else flat[key] for key, usual in _QWEN3_DEFAULTS.items()},
        **layers,
        **rope,
        **{key: flat.get(key) for key in _TOKEN_KEYS},
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": ids},
    }
    refuse_unread(source, config_differences(parse_config(config, source), _least_target(c)))
    return config, [*id_notes, *layer_notes, *rope_notes, *_left_out_keys(flat, c)]


def _least_target(c: PublishedConfig) -> Json:
    """The smallest target that this drafter can belong to, for what can be checked without the real one."""
    depth = c.num_target_layers or max(c.target_layer_ids) + 2
    return {"hidden_size": c.hidden_size, "vocab_size": c.vocab_size, "num_hidden_layers": depth}


def _unserved(flat: Json) -> Iterator[str]:
    for key, (neutral, meaning) in _UNSERVED.items():
        if flat.get(key) not in (None, neutral):
            yield f"{key} is {flat[key]!r}: {meaning}"
    draft, vocab = flat.get("draft_vocab_size"), flat.get("vocab_size")
    if draft not in (None, vocab):
        yield (
            f"draft_vocab_size is {draft} of {vocab}: a reduced vocabulary (d2t, t2d and a head of its own)"
            " is not served here, but stock vLLM serves this folder as it is"
        )
    wide, width = flat.get("target_hidden_size"), flat.get("hidden_size")
    if wide not in (None, width):
        yield f"target_hidden_size is {wide}, hidden_size {width}: a drafter must be as wide as its target"


def _left_out_keys(flat: Json, c: PublishedConfig) -> Iterator[str]:
    for key in _MONOTONE:
        if flat.get(key) is not None:
            yield f"{key} {flat[key]} left out: vLLM applies none; drafts stay, a tree's scores change"
    unknown = sorted(key for key in flat.keys() - _READ_KEYS - _IDLE_KEYS if flat[key] is not None)
    if unknown:
        yield f"keys that no DFlash reader is known to use left out: {', '.join(unknown)}"
    if c.num_target_layers is None:
        yield "num_target_layers is not said: this project and vLLM do without, z-lab's own code does not"


def _target_layer_ids(flat: Json, source: str) -> tuple[list[int], list[str]]:
    """Layers tapped, counted from 0, from every place that names them.

    No formula fills them in: z-lab's own is wrong for most of its drafters (z-lab/dflash issue 156), and
    where it gives as many layers, but others, nothing fails except acceptance (sglang issue 37475).
    """
    said = {key: flat[key] for key in _FIRST_ID if flat.get(key) is not None}
    for key, ids in said.items():
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise UserError(f"{source}: {key} is {ids!r}, expected a list of layer ids")
    if not said:
        raise UserError(
            f"{source}: {CONFIG_NAME} does not say which target layers are tapped: write"
            " dflash_config.target_layer_ids, the layers it was trained on, counted from 0"
        )
    read = {key: [i - _FIRST_ID[key] for i in ids] for key, ids in said.items()}
    ids = next(iter(read.values()))
    if any(other != ids for other in read.values()):
        readings = "; ".join(f"{key} {said[key]} means {read[key]} counted from 0" for key in said)
        raise UserError(
            f"{source}: its layer ids contradict each other: {readings}; keep the right ones alone,"
            " as dflash_config.target_layer_ids counted from 0"
        )
    depth = flat.get("num_target_layers")
    refuse_unread(source, (problem for key in said for problem in _id_problems(key, said[key], depth)))
    return ids, list(_id_notes(said, ids))


def _id_problems(key: str, said: list[int], depth: int | None) -> Iterator[str]:
    """Signs that ids are counted otherwise than their place means."""
    first, lowest = _FIRST_ID[key], min(said)
    counted = f"{key} is {said}, counted from {first} by its format"
    if lowest < first:
        meaning = "the embedding, not a layer" if lowest == first - 1 == 0 else "no layer"
        write = "write them as dflash_config.target_layer_ids alone"
        yield f"{counted}: {lowest} is {meaning}; if they are counted from 0, {write}"
    if depth is not None and max(said) - first >= depth:
        write = f"; if they are counted from 1, write {[i - 1 for i in said]}" if first == 0 else ""
        yield f"{counted}, but num_target_layers is {depth}{write}"


def _id_notes(said: Mapping[str, list[int]], ids: list[int]) -> Iterator[str]:
    for key in said:
        if _FIRST_ID[key] == 1:
            yield f"layer ids {_listed(said[key])} ({key}) counted from 1: read as {_listed(ids)}"


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(str(i) for i in ids)


def _layer_keys(c: PublishedConfig, flat: Json, source: str) -> Noted:
    """Kinds of layers, their window, and `is_causal` where their kinds do not say it (sliding is causal).

    Sources: vLLM's `_resolve_layer_attention` for use_swa and swa_window_size, which ModelOpt writes beside
    full layer_types, whose mask stays theirs; transformers' Qwen3Config for absent layer_types.
    """
    said: list[str] = list(c.layer_types or _qwen3_layer_types(c, flat))
    notes = [] if c.layer_types else [f"no layer_types: {' '.join(said)}, as transformers fills them in"]
    is_causal, causality_notes = _is_causal(flat, said, source)
    causal = [kind == SLIDING if is_causal is None else is_causal for kind in said]
    types = said
    if flat.get("use_swa") and SLIDING not in said:
        types = [SLIDING] * c.num_hidden_layers
        notes.append("use_swa written as sliding layer_types")
    windows = {flat.get("swa_window_size"), c.sliding_window} - {None}
    if len(windows) > 1:
        raise UserError(f"{source}: swa_window_size and sliding_window are {windows}; keep the right one")
    if SLIDING in types and not flat.get("use_sliding_window", True):
        notes.append("use_sliding_window false written as true: layer_types has sliding layers")
    keys = {
        "layer_types": types,
        "sliding_window": next(iter(windows), None),
        "use_sliding_window": SLIDING in types,
        "max_window_layers": c.num_hidden_layers,
    }
    if causal != [kind == SLIDING for kind in types]:
        keys["is_causal"] = causal[0]  # of all layers: a flag, or full layers that became sliding ones
        notes.append(f"is_causal {causal[0]} for every layer, whatever its kind")
    return keys, [*notes, *causality_notes]


def _qwen3_layer_types(c: PublishedConfig, flat: Json) -> Iterator[str]:
    first = flat.get("max_window_layers", _QWEN3_MAX_WINDOW_LAYERS)
    slides = flat.get("use_sliding_window") and c.sliding_window is not None
    for layer in range(c.num_hidden_layers):
        yield SLIDING if slides and layer >= first else "full_attention"


def _is_causal(flat: Json, kinds: list[str], source: str) -> tuple[bool | None, list[str]]:
    """The file's flag for all layers; None where it leaves that to their kinds.

    Sources: z-lab's `Qwen3DFlashAttention` and vLLM's `_dflash_layer_causal`, which knows `causal` as well.
    """
    if "sliding_window_non_causal" in flat:
        return _speculators_causality(flat["sliding_window_non_causal"], kinds, source)
    flags = {bool(flat[key]) for key in ("is_causal", "causal") if flat.get(key) is not None}
    if len(flags) > 1:
        raise UserError(f"{source}: is_causal and dflash_config.causal contradict each other; keep one")
    return next(iter(flags), None), []


def _speculators_causality(
    non_causal: bool | None, types: list[str], source: str
) -> tuple[bool | None, list[str]]:
    """As speculators trains (its models/dflash/attention.py): the flag is about sliding layers alone.

    vLLM 0.32 applies it to full layers as well (its pull request 56692).
    """
    if SLIDING not in types:
        return None, []
    if non_causal is None:
        raise UserError(
            f"{source}: sliding_window_non_causal is not said, which speculators takes for false and vLLM for"
            " true: write what it was trained with"
        )
    if non_causal:
        return False, []
    mixed = len(set(types)) > 1
    return None, ["full layers see a block both ways, sliding ones causally, as trained"] if mixed else []


def _rope_keys(flat: Json, source: str) -> Noted:
    """Both spellings: transformers 4 reads rope_theta, 5 reads rope_parameters.

    A drafter sees token indices, so the rows of a multimodal target's positions are one (speculators' own
    `normalize_rope` drops them too).  A missing base is refused: transformers would take 1e4, vLLM 1e6.
    """
    scaling, parameters = flat.get("rope_scaling") or {}, flat.get("rope_parameters") or {}
    rope = _merge(scaling, parameters, f"{source}: rope_parameters and rope_scaling")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{source}: rope_parameters differ between kinds of layers, which is not served")
    refuse_unread(source, _unserved({"partial_rotary_factor": rope.get("partial_rotary_factor")}))
    thetas = [theta for theta in (flat.get("rope_theta"), rope.get("rope_theta")) if theta is not None]
    if len(set(thetas)) != 1:
        raise UserError(
            f"{source}: rope_theta and rope_parameters.rope_theta are {flat.get('rope_theta')} and"
            f" {rope.get('rope_theta')}: write the one base that the drafter was trained with"
        )
    kind, theta = rope.get("rope_type", rope.get("type", "default")), float(thetas[0])
    own = {"rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta}
    mrope = sorted(key for key in rope if key.startswith("mrope"))
    rest = sorted(rope.keys() - own.keys() - {"type", "partial_rotary_factor", *mrope})
    notes = [
        *(["rope_scaling written as rope_parameters"] if scaling and not parameters else []),
        *([f"{', '.join(mrope)} left out: a drafter's positions are one row"] if mrope else []),
    ]
    return {"rope_theta": theta, "rope_parameters": {**own, **{key: rope[key] for key in rest}}}, notes
