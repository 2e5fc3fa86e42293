"""serve/pairwise_kernels.py against its twin in torch: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
from kernel_compile import run_apart

from serve import pairwise
from serve.pairwise import PairwiseTables
from serve.pairwise_kernels import fill_table, walk_chain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, VOCAB = 24, 61
CASES = [  # requests, slots, candidates, rank
    (1, 1, 1, 1),
    (2, 3, 5, 7),
    (3, 7, 15, 32),
    (1, 15, 31, 40),
    (2, 2, 61, 64),
]


def draw(
    batch: int, num_slots: int, count: int, rank: int, dtype: torch.dtype
) -> tuple[PairwiseTables, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch + num_slots + count)
    shapes = (VOCAB, rank), (VOCAB, rank), (rank, HIDDEN), (rank,)
    tables = PairwiseTables(
        *(torch.randn(shape, generator=generator).mul(0.4).to(DEVICE, dtype) for shape in shapes)
    )
    hidden_BLD = torch.randn(batch, num_slots, HIDDEN, generator=generator).to(DEVICE, dtype)
    probs_BLV = torch.randn(batch, num_slots, VOCAB, generator=generator).log_softmax(-1)
    log_probs_BLC, tokens_BLC = (each.contiguous().to(DEVICE) for each in probs_BLV.topk(count))
    anchors_B = torch.randint(0, VOCAB, (3 * batch,), generator=generator, dtype=torch.int32).to(DEVICE)[::3]
    return tables, hidden_BLD, anchors_B, tokens_BLC, log_probs_BLC


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_table_is_the_twins(case, dtype):
    drafted = draw(*case, dtype)
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if DEVICE == "cpu" else {"rtol": 1e-3, "atol": 2e-3}
    torch.testing.assert_close(fill_table(*drafted), pairwise.fill_table(*drafted), **tolerance)


def test_forbidden_candidates_stay_forbidden_and_no_score_is_above_zero():
    tables, hidden_BLD, anchors_B, tokens_BLC, log_probs_BLC = draw(2, 3, 5, 7, torch.float32)
    log_probs_BLC[:, :, 3:] = -torch.inf
    scores_BLCC = fill_table(tables, hidden_BLD, anchors_B, tokens_BLC, log_probs_BLC)
    assert (scores_BLCC[..., 3:] == -torch.inf).all()
    assert scores_BLCC[..., :3].isfinite().all()
    assert (scores_BLCC <= 0).all()


@pytest.mark.parametrize("case", CASES)
def test_the_chain_is_the_twins_equal_scores_included(case):
    batch, num_slots, count, _ = case
    generator = torch.Generator().manual_seed(count)
    scores_BLCC = (
        -torch.randint(0, 3, (batch, num_slots, count, count), generator=generator).float().to(DEVICE)
    )
    assert torch.equal(walk_chain(scores_BLCC), pairwise.walk_chain(scores_BLCC))


COMPILE = """
from kernel_compile import stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from serve.pairwise_kernels import _fill_kernel, _walk_kernel

def build(kernel, target, kinds, constants, warps):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind for name, kind in zip(names, kinds)}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=target, options={"num_warps": warps})

for arch in (86, 90):
    target = GPUTarget("cuda", arch, 32)
    for count in (16, 64):
        tables = ["*bf16"] * 4
        kinds = [*tables, "*i32", "*i64", "*fp32", "*fp32", "i32", "i32", "i32", "", ""]
        fill = build(_fill_kernel, target, kinds, {"COUNT": count, "STEP": 32}, 4)
        walk = build(_walk_kernel, target, ["*fp32", "*i64", "i32", "i32", ""], {"COUNT": count}, 1)
        for kernel in (fill, walk):
            print(stack_bytes(kernel.asm["cubin"]), kernel.metadata.shared)
"""


def test_the_kernels_compile_for_sm_86_and_sm_90_without_spills(tmp_path):
    built = run_apart(COMPILE, tmp_path)
    assert len(built) == 8
    for stack, shared in built:
        assert stack == 0
        assert shared <= 48 * 1024
