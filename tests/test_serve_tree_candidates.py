"""serve/tree_candidates.py and its kernels against a sort: interpreted on a CPU, compiled on a GPU."""

# T=rows of logits  V=vocabulary  C=candidates of a row

from collections.abc import Callable

import pytest
import torch
from kernel_compile import run_apart

from serve import tree_candidates, tree_candidates_kernels
from serve.tree_candidates import Candidates

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"  # on a CPU the kernels are interpreted
SHARED_BYTES = 99 * 1024  # that sm_86 gives one block of threads
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCABULARY = 248_320

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of an interpreted log(0) or NaN

Rank = Callable[[torch.Tensor, int], Candidates]
both_ways = pytest.mark.parametrize(
    "rank",
    [tree_candidates_kernels.rank_candidates, tree_candidates.rank_candidates],
    ids=["triton", "torch"],
)


def sort_row(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]


def assert_ranked(found: Candidates, logits_TV: torch.Tensor, count: int) -> None:
    """As a sort of each row has it, with log-probabilities of fp64."""
    rows_TV = logits_TV.double().cpu()
    expected_TC = torch.tensor([sort_row(row, count) for row in rows_TV.tolist()])
    assert found.tokens_TC.dtype == torch.int64
    assert found.log_probs_TC.dtype == torch.float32
    assert torch.equal(found.tokens_TC.cpu(), expected_TC)
    values_TC = rows_TV.gather(1, expected_TC)
    log_probs_TC = values_TC - rows_TV.logsumexp(1, keepdim=True)
    log_probs_TC[values_TC == -torch.inf] = -torch.inf
    torch.testing.assert_close(found.log_probs_TC.cpu().double(), log_probs_TC, rtol=2e-6, atol=2e-5)


def draw_logits(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """A row of every kind."""
    generator = torch.Generator().manual_seed(num_tokens)
    noise_V = 4 * torch.randn(num_tokens, generator=generator)
    is_allowed_V = torch.rand(num_tokens, generator=generator) < 9 / num_tokens
    is_allowed_V[num_tokens // 2] = True
    rows = [
        noise_V,
        (noise_V / 4).round(),  # about seven values, zeros of both signs among them
        torch.full_like(noise_V, -1.5),
        noise_V.where(is_allowed_V, -torch.inf),  # as a rule more candidates than it allows
        noise_V + 120,  # where exp overflows
        noise_V - 120,  # where it vanishes
    ]
    return torch.stack(rows).to(DEVICE, dtype)


# The order


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "count"),
    [(1, 1), (5, 1), (5, 5), (31, 7), (32, 15), (33, 2), (33, 33), (1000, 15), (4096, 31), (5003, 7)],
)
def test_candidates_are_the_first_of_a_sort(num_tokens, count, dtype, rank):
    logits_TV = draw_logits(num_tokens, dtype)
    assert_ranked(rank(logits_TV, count), logits_TV, count)


@both_ways
@pytest.mark.parametrize(
    ("num_tokens", "count"), [(300, 300), (5003, 63), (70_001, 7), (131_073, 2), (VOCABULARY, 15)]
)
def test_many_candidates_and_large_vocabularies_too(num_tokens, count, rank):
    logits_TV = draw_logits(num_tokens, torch.bfloat16)[1:2]
    assert_ranked(rank(logits_TV, count), logits_TV, count)


@both_ways
def test_the_last_place_goes_to_the_lowest_of_its_equals(rank):
    logits_TV = torch.zeros(1, 5003, device=DEVICE)
    logits_TV[0, [5002, 4000, 77, 4095]] = torch.tensor([1.0, 2.0, 1.0, 1.0], device=DEVICE)
    assert rank(logits_TV, 1).tokens_TC.tolist() == [[4000]]
    assert rank(logits_TV, 3).tokens_TC.tolist() == [[4000, 77, 4095]]
    assert rank(logits_TV, 6).tokens_TC.tolist() == [[4000, 77, 4095, 5002, 0, 1]]


@both_ways
def test_neighbours_of_one_group_may_take_every_place(rank):
    logits_TV = draw_logits(5003, torch.bfloat16)[:2]
    logits_TV[0, 4960:4992] += 100
    logits_TV[1, 4971:5003] += 100
    assert_ranked(rank(logits_TV, 31), logits_TV, 31)


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_is_a_zero_whatever_its_sign(dtype, rank):
    logits_TV = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0, -2.0]], device=DEVICE, dtype=dtype)
    assert rank(logits_TV, 6).tokens_TC.tolist() == [[0, 1, 3, 4, 2, 5]]


@both_ways
def test_values_that_only_fp32_tells_apart_are_told_apart(rank):
    tiny = torch.finfo(torch.float32).smallest_normal
    row = [1.0, 1.0 + 2**-23, -1.0, -1.0 - 2**-23, tiny, tiny / 2, -tiny / 2, -tiny, 1e38, -1e38]
    logits_TV = torch.tensor([row], device=DEVICE)
    assert rank(logits_TV, 10).tokens_TC.tolist() == [[8, 1, 0, 4, 5, 6, 7, 2, 3, 9]]


# Rows


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_lie_anywhere(dtype, rank):
    wide_TV = draw_logits(1100, dtype)
    for logits_TV in (wide_TV[:2, :1000], wide_TV[::3, 3:1000], wide_TV[1].expand(3, -1), wide_TV[1:2, 96:]):
        assert_ranked(rank(logits_TV, 15), logits_TV, 15)


@both_ways
def test_no_rows_have_no_candidates(rank):
    found = rank(torch.empty(0, 100, device=DEVICE), 7)
    assert found.tokens_TC.shape == found.log_probs_TC.shape == (0, 7)


@both_ways
def test_logits_are_left_as_they_were(rank):
    logits_TV = draw_logits(1000, torch.float32)[:2]
    before_TV = logits_TV.clone()
    rank(logits_TV, 7)
    assert torch.equal(logits_TV.view(torch.int32), before_TV.view(torch.int32))


@both_ways
def test_a_row_that_forbids_everything_has_no_probability_to_give(rank):
    logits_TV = draw_logits(4100, torch.bfloat16)[:3]
    logits_TV[1] = -torch.inf
    found = rank(logits_TV, 7)
    assert found.tokens_TC[1].tolist() == list(range(7))
    assert (found.log_probs_TC[1] == -torch.inf).all()
    for row in (0, 2):
        assert_ranked(rank(logits_TV[row : row + 1], 7), logits_TV[row : row + 1], 7)


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nan", [torch.nan, -torch.nan])
def test_nan_names_tokens_of_the_vocabulary_and_harms_no_other_row(nan, dtype, rank):
    logits_TV = draw_logits(45, dtype)[:4]
    logits_TV[0] = nan
    logits_TV[1, 3:40] = nan
    logits_TV[2, 44] = nan
    found = rank(logits_TV, 45)
    assert (found.tokens_TC.sort().values.cpu() == torch.arange(45)).all()
    last = Candidates(found.tokens_TC[3:], found.log_probs_TC[3:])
    assert_ranked(last, logits_TV[3:], 45)


@both_ways
def test_what_a_caller_may_not_ask(rank):
    logits_TV = torch.zeros(2, 8, device=DEVICE)
    for count in (0, 9):
        with pytest.raises(AssertionError, match=f"{count} candidates of 8 tokens"):
            rank(logits_TV, count)
    with pytest.raises(AssertionError, match="tokens lie 2 apart"):
        rank(logits_TV[:, ::2], 2)
    with pytest.raises(AssertionError, match="float64"):
        rank(logits_TV.double(), 2)


# On a GPU


@pytest.mark.skipif(not IS_CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "count"), [(15, 15), (120, 63), (1, 1)])
def test_a_graph_replays_the_ranking_of_other_logits(num_rows, count, dtype):
    draws = [torch.randn(num_rows, VOCABULARY, device=DEVICE).mul(4).to(dtype) for _ in range(3)]
    draws.append(draws[0].round())
    draws.append(torch.full_like(draws[0], 2.0))
    logits_TV = draws[0].clone()
    tree_candidates_kernels.rank_candidates(logits_TV, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tree_candidates_kernels.rank_candidates(logits_TV, count)
    for other in draws:
        logits_TV.copy_(other)
        graph.replay()
        expected = tree_candidates.rank_candidates(other, count)
        assert torch.equal(found.tokens_TC, expected.tokens_TC)
        torch.testing.assert_close(found.log_probs_TC, expected.log_probs_TC, rtol=2e-6, atol=2e-5)


COMPILE = """
import triton
from kernel_compile import stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from serve import tree_candidates_kernels as kernels

LONG, ALIGNED = ("keys", "tokens"), ("logits", "num_tokens", "row_stride")

def build(kernel, capability, floats, **sizes):
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(sizes, "constexpr")
    types |= {name: "*i64" for name in LONG} | {"logsumexps": "*fp32", "log_probs": "*fp32", "logits": floats}
    signature = {name: types[name] for name in kernel.arg_names}
    places = [kernel.arg_names.index(name) for name in ALIGNED if name not in sizes]
    attributes = {(place,): [["tt.divisibility", 16]] for place in places}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 4})

def report(kernel, capability, floats, **sizes):
    built = build(kernel, capability, floats, **sizes)
    wide = built.asm["ptx"].count("ld.global.v4.b32")
    print(built.metadata.shared, stack_bytes(built.asm["cubin"]), wide)

ones = dict(num_tokens=1, row_stride=1)  # which Triton makes constants of
more_ones = ones | dict(count=1, num_parts=1)
for capability in (86, 90):
    report(kernels._survey_kernel, capability, "*fp16", GROUPS=128, GROUP=32, **ones)
    report(kernels._take_kernel, capability, "*fp16", GROUPS=1, GROUP=32, PARTS=1, **more_ones)
    for floats in ("*bf16", "*fp32"):
        report(kernels._survey_kernel, capability, floats, GROUPS=32, GROUP=128)
        report(kernels._take_kernel, capability, floats, GROUPS=2048, GROUP=128, PARTS=64)
"""


def test_the_kernels_compile_for_sm_86_and_sm_90_without_spills_and_read_16_bytes_at_a_time(tmp_path):
    shared, stacks, wide_loads = zip(*run_apart(COMPILE, tmp_path), strict=True)
    assert len(shared) == 12
    assert max(shared) <= SHARED_BYTES
    assert max(stacks) == 0  # registers that spill go there
    bf16, fp32 = 4, 8  # loads by each of 128 threads for 4,096 logits
    assert wide_loads == (0, 0, bf16, 0, fp32, 0) * 2
