"""Greedy text with trees in fp32, 64 prompts of 64 tokens: each token is the best after those before it.

The judge is transformers, which reads each whole text once.  Texts of which that holds are greedy decoding's.
"""

import pytest
import torch
from drafters import EMBEDDED_TARGET
from transformers import AutoModelForCausalLM, AutoTokenizer
from tree_probe import run_engines
from tree_rounds import Round, Spec, Told
from tree_targets import Case, write_dense_case

from data.groups import render
from data.prompts import load_prompts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="fp32, which FlashAttention does not know"),
]

NUM_PROMPTS, NUM_TOKENS, BUDGET = 64, 64, 15
NEAR_TIE = 1e-4  # of logits
SERVE = {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
REFERENCE = EMBEDDED_TARGET.parent / "drafter"


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def case(request, tmp_path_factory) -> Case:
    if request.param == "hybrid":
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
        prompts = [each.token_ids for each in render(load_prompts("stdlib:heldout", NUM_PROMPTS), tokenizer)]
        return Case(str(EMBEDDED_TARGET), str(REFERENCE), prompts)
    dense = write_dense_case(tmp_path_factory.mktemp("dense"))
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 60, (NUM_PROMPTS,), generator=generator).tolist()
    prompts = [torch.randint(1, 200, (length,), generator=generator).tolist() for length in lengths]
    return Case(dense.target, dense.ckpt, prompts)


@pytest.fixture(scope="module")
def told(case, tmp_path_factory) -> Told:
    spec = Spec(case.target, case.ckpt, BUDGET, {"text": Round(case.prompts, NUM_TOKENS)}, SERVE)
    return run_engines({"trees": spec}, tmp_path_factory.mktemp("many"))["trees"]["text"]


@torch.inference_mode()
def behind_best(case: Case, texts: list[list[int]]) -> torch.Tensor:
    """By how much the target finds another token better, of each token of each text."""
    model = AutoModelForCausalLM.from_pretrained(case.target, dtype=torch.float32).eval()
    found = []
    for prompt, text in zip(case.prompts, texts, strict=True):
        logits_TV = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        found.append(logits_TV.amax(-1) - logits_TV.gather(1, torch.tensor(text)[:, None])[:, 0])
    return torch.stack(found)


def test_every_token_is_the_targets_best(case, told):
    assert [len(text) for text in told.texts] == [NUM_TOKENS] * NUM_PROMPTS
    behind = behind_best(case, told.texts)
    ties = int((behind > 0).sum())
    print(f"{behind.numel()} tokens, {ties} of them second at a near-tie, at most {behind.max():.1e} behind")
    assert behind.max() < NEAR_TIE


def test_a_wrong_token_would_show(case, told):
    texts = [list(text) for text in told.texts]
    texts[7][40] = (texts[7][40] + 1) % 200
    assert behind_best(case, texts)[7, 40] > NEAR_TIE


def test_trees_were_verified_and_accepted(told):
    assert len(told.verified) > NUM_PROMPTS
    assert all(each.num_drafts == len(each.parents) == BUDGET for each in told.verified[:NUM_PROMPTS])
    assert sum(len(each.path) for each in told.verified) > 0
