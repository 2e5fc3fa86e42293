"""What tests of draft trees are run on: a dense and a hybrid target, with prompts and untrained drafters."""

from dataclasses import dataclass
from pathlib import Path

import torch
from drafters import EMBEDDED_TARGET, random_weights, write_checkpoint, write_random_drafter
from test_serve_parity import DRAFTER, VOCAB, write_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.groups import render
from data.prompts import load_prompts
from serve.checkpoint import load_target_config, published_config

BLOCK_SIZE = 8
NUM_SLOTS = BLOCK_SIZE - 1
DENSE_LENGTHS = (5, 17, 40, 9, 33)


@dataclass(frozen=True)
class Case:
    target: str
    ckpt: str
    prompts: list[list[int]]


def write_dense_case(folder: Path) -> Case:
    """A few layers, loud enough that greedy text does not repeat itself, and a drafter with windows."""
    target = write_target(folder / "target")
    drafter = DRAFTER.model_copy(update={"block_size": BLOCK_SIZE})
    config = published_config(drafter, load_target_config(str(target))) | {"dtype": "float32"}
    weights = {name: weight.float() for name, weight in random_weights(config, seed=3).items()}
    ckpt = write_checkpoint(folder / "drafter", config, weights)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(1, VOCAB - 1, (length,), generator=generator).tolist() for length in DENSE_LENGTHS
    ]
    return Case(str(target), str(ckpt), prompts)


def write_hybrid_case(folder: Path) -> Case:
    """The embedded target, whose Gated DeltaNet layers keep a state, and a drafter of the demo's shape."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    prompts = [prompt.token_ids for prompt in render(load_prompts("stdlib:heldout", 5), tokenizer)]
    return Case(str(EMBEDDED_TARGET), str(write_random_drafter(folder / "drafter")), prompts)


@torch.inference_mode()
def greedy_texts(case: Case, num_tokens: int) -> list[list[int]]:
    """Prompts with the target's own continuation in fp32, by transformers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small only waits for the others, on a busy machine for minutes
    model = AutoModelForCausalLM.from_pretrained(case.target, dtype=torch.float32).eval()
    greedy = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = [model.generate(torch.tensor([prompt]), **greedy)[0].tolist() for prompt in case.prompts]
    torch.set_num_threads(threads)
    return texts
