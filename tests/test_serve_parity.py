"""A block as the trainer computes it, against the same block in vLLM's own drafter, slot by slot.

One engine in fp32 with a dense target small enough to run in transformers too: its taps go into the trainer's
forward, so the test also holds what a tap is.  Each convention moved by one must make the two differ.
"""

# K=slots of a block  D=hidden  V=vocabulary

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from drafters import random_weights, write_checkpoint
from probe_host import run_probe
from transformers import Qwen3Config, Qwen3ForCausalLM

from data.shards import Sequence
from recipes.schema import Drafter, Serve, Target
from serve.checkpoint import load_target_config, published_config
from serve.engine import engine_arguments
from train.batches import pack
from train.checkpoint import load_published
from train.drafter import DFlashDrafter

pytestmark = pytest.mark.engine

WINDOW, VOCAB = 8, 300
DRAFTER = Drafter(
    num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=WINDOW,
    block_size=4,
    target_layer_ids=[0, 2],
    mask_token_id=299,
    intermediate_size=192,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    rope_theta=1e4,
    max_position_embeddings=512,
)
# A prompt of n tokens has its block anchored at n: contexts that end before, at and after the window, or far.
PROMPT_LENGTHS = [1, 2, WINDOW - DRAFTER.block_size, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 150]


@dataclass(frozen=True)
class Served:
    """What the engine did with one prompt."""

    token_ids: list[int]
    """The prompt and the token it was answered with, which anchors the block."""
    hidden_KD: torch.Tensor
    """The drafter's slots 1..K-1 after its final norm."""


@dataclass(frozen=True)
class Pair:
    target: Qwen3ForCausalLM
    drafter: DFlashDrafter
    served: list[Served]


def write_target(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=0,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:  # loud enough that every tap and every position shows
                weight.mul_(3 if "mlp" in name or "v_proj" in name else 1)
    model.save_pretrained(folder)
    return folder


def serve_prompts(target: Path, ckpt: Path) -> list[Served]:
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - it reads the environment

    serve = Serve(max_model_len=256, max_num_seqs=2, max_num_batched_tokens=256, enforce_eager=True)
    arguments = engine_arguments(Target(model=str(target), dtype="float32"), serve, ckpt, None)
    engine = LLM(**arguments, skip_tokenizer_init=True, gpu_memory_utilization=0.3)
    seen: list[torch.Tensor] = []
    engine.collective_rpc(watch_drafts, args=(seen,))
    generator = torch.Generator().manual_seed(1)
    served = []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(1, VOCAB - 1, (length,), generator=generator).tolist()
        seen.clear()
        (output,) = engine.generate(
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True),
            use_tqdm=False,
        )
        served.append(Served([*prompt, *output.outputs[0].token_ids], seen[0]))
    return served


def main(out: Path, target: Path, ckpt: Path) -> None:
    torch.save([(each.token_ids, each.hidden_KD) for each in serve_prompts(target, ckpt)], out)


def watch_drafts(worker, seen: list[torch.Tensor]) -> None:
    speculator = worker.model_runner.speculator
    sample_draft = speculator.sample_draft

    def watching(hidden_states, *args, **kwargs):
        seen.append(hidden_states[: DRAFTER.block_size - 1].clone())
        return sample_draft(hidden_states, *args, **kwargs)

    speculator.sample_draft = watching


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("parity")
    target = write_target(folder / "target")
    config = published_config(DRAFTER, load_target_config(str(target))) | {"dtype": "float32"}
    weights = {name: weight.float() for name, weight in random_weights(config, seed=3).items()}
    ckpt = write_checkpoint(folder / "drafter", config, weights)
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    served = folder / "served"
    # apart: an engine's process group would be in the way of a trainer's
    run_probe("test_serve_parity", served, target, ckpt)
    told = [Served(*each) for each in torch.load(served)]
    return Pair(model, load_published(ckpt).float().eval(), told)


@torch.no_grad()
def train_side(
    pair: Pair, served: Served, *, taps: list[int] | None = None, drafter: Drafter = DRAFTER, shift: int = 0
) -> torch.Tensor:
    """The trainer's slots 1..K-1 of the same block; `shift` moves every position of the block. [K - 1, D]"""
    token_ids = torch.tensor(served.token_ids)
    states = pair.target(token_ids[None, :-1], output_hidden_states=True).hidden_states
    hidden = torch.cat([states[layer + 1][0] for layer in taps or DRAFTER.target_layer_ids], dim=-1)
    sequence = Sequence(token_ids.int(), torch.ones(len(token_ids), dtype=torch.bool), hidden)
    batch = pack([sequence], [torch.tensor([len(token_ids) - 1])], drafter)
    embedding_VD = pair.target.get_input_embeddings().weight
    slots_KD = pair.drafter(
        batch.taps_SE,
        batch.context_positions_S,
        embedding_VD[batch.input_ids_Q],
        batch.block_positions_Q + shift,
        batch.views,
    )
    return slots_KD[1:]


@pytest.mark.parametrize("case", range(len(PROMPT_LENGTHS)), ids=lambda i: f"anchor-{PROMPT_LENGTHS[i]}")
def test_a_block_is_the_same_in_the_trainer_and_in_the_engine(pair, case):
    served = pair.served[case]
    torch.testing.assert_close(train_side(pair, served), served.hidden_KD, atol=2e-4, rtol=2e-4)


def differs(pair: Pair, served: Served, **changes: object) -> bool:
    found = train_side(pair, served, **changes)
    return not torch.allclose(found, served.hidden_KD, atol=1e-2, rtol=0)


@pytest.mark.parametrize("case", range(len(PROMPT_LENGTHS)), ids=lambda i: f"anchor-{PROMPT_LENGTHS[i]}")
def test_a_tap_a_mask_id_or_a_position_off_by_one_shows(pair, case):
    served = pair.served[case]
    assert differs(pair, served, taps=[1, 2])
    assert differs(pair, served, taps=[0, 1])
    assert differs(pair, served, drafter=DRAFTER.model_copy(update={"mask_token_id": 298}))
    assert differs(pair, served, shift=1)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_shows_once_the_context_reaches_it(pair, off):
    wrong = DRAFTER.model_copy(update={"sliding_window": WINDOW + off})
    shows = {len(each.token_ids) - 1: differs(pair, each, drafter=wrong) for each in pair.served}
    last_slot = DRAFTER.block_size - 1
    reached = {anchor: anchor + last_slot >= min(WINDOW, WINDOW + off) for anchor in shows}
    assert shows == reached
