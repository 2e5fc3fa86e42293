"""What is done with rows of logits: Triton, interpreted or on a GPU, against plain torch and autograd."""

import pytest
import torch
from kernel_compile import run_apart
from torch.nn import functional as F

from recipes.schema import Objective as Settings
from train import head_kernels, head_rows
from train.head import find_rows
from train.objective import Objective

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there, the interpreter
SIZES = [(rows, vocabulary) for rows in (1, 7) for vocabulary in (5, 1000, 4097)]
TOLERANCES = {
    torch.float32: {"atol": 3e-6, "rtol": 1e-5},
    # of slopes: a step of bf16, 2^-7, where two fp32 values lie on either side of a rounding edge
    torch.bfloat16: {"atol": 1e-6, "rtol": 8e-3},
}
FROM_DISTRIBUTIONS = ["kl", "total_variation", "lk"]
DTYPES = list(TOLERANCES)


def draw(num_rows: int, vocabulary: int, dtype: torch.dtype = torch.float32):
    """Logits of a drafter and of a teacher, labels, and two weights a row."""
    generator = torch.Generator().manual_seed(num_rows * vocabulary)
    logits_RV, teacher_RV = (
        (3 * torch.randn(num_rows, vocabulary, generator=generator)).to(DEVICE, dtype) for _ in range(2)
    )
    labels_R = torch.randint(0, vocabulary, (num_rows,), generator=generator).to(DEVICE)
    labels_R[0] = vocabulary - 1
    weights_2R = torch.rand(2, num_rows, generator=generator).to(DEVICE)
    return logits_RV, teacher_RV, labels_R, weights_2R


def lse(logits_RV: torch.Tensor) -> torch.Tensor:
    return logits_RV.float().logsumexp(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocabulary"), SIZES)
def test_rows_are_read_as_by_the_twin(num_rows, vocabulary, dtype):
    logits_RV, _, labels_R, _ = draw(num_rows, vocabulary, dtype)
    found, expected = (on.read_rows(logits_RV, labels_R) for on in (head_kernels, head_rows))
    torch.testing.assert_close(vars(found), vars(expected), **TOLERANCES[torch.float32])
    torch.testing.assert_close(expected.lse_R, lse(logits_RV))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocabulary"), SIZES)
def test_drafter_and_teacher_are_compared_as_by_the_twin(num_rows, vocabulary, dtype):
    logits_RV, teacher_RV, _, _ = draw(num_rows, vocabulary, dtype)
    rows = (logits_RV, lse(logits_RV), teacher_RV, lse(teacher_RV))
    found, expected = (on.compare_rows(*rows) for on in (head_kernels, head_rows))
    torch.testing.assert_close(vars(found), vars(expected), **TOLERANCES[torch.float32])
    q_RV, p_RV = logits_RV.float().softmax(-1), teacher_RV.float().softmax(-1)
    torch.testing.assert_close(expected.kl_R, F.kl_div(q_RV.log(), p_RV, reduction="none").sum(-1))
    acceptance_R = torch.minimum(p_RV, q_RV).sum(-1)
    torch.testing.assert_close(1 - expected.variation_R, acceptance_R, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocabulary"), SIZES)
def test_slopes_to_labels_are_the_twins_and_autograds(num_rows, vocabulary, dtype):
    logits_RV, _, labels_R, (weights_R, _) = draw(num_rows, vocabulary, dtype)
    of_autograd = logits_RV.to(torch.float32, copy=True).requires_grad_()
    (weights_R * F.cross_entropy(of_autograd, labels_R, reduction="none")).sum().backward()
    for on in (head_kernels, head_rows):
        slope_RV = logits_RV.clone()
        on.slope_to_labels_(slope_RV, lse(logits_RV), labels_R, weights_R)
        torch.testing.assert_close(slope_RV, of_autograd.grad.to(dtype), **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocabulary"), SIZES)
def test_slopes_to_a_teacher_are_the_twins_and_autograds(num_rows, vocabulary, dtype):
    logits_RV, teacher_RV, _, (kl_weights_R, variation_weights_R) = draw(num_rows, vocabulary, dtype)
    of_autograd = logits_RV.to(torch.float32, copy=True).requires_grad_()
    q_RV, p_RV = of_autograd.softmax(-1), teacher_RV.float().softmax(-1)
    kl_R = (p_RV * (p_RV.log() - of_autograd.log_softmax(-1))).sum(-1)
    variation_R = (q_RV - p_RV).abs().sum(-1) / 2
    (kl_weights_R * kl_R + variation_weights_R * variation_R).sum().backward()
    rows = (lse(logits_RV), teacher_RV, lse(teacher_RV))
    for on in (head_kernels, head_rows):
        slope_RV, before_RV = logits_RV.clone(), teacher_RV.clone()
        pull_R = on.compare_rows(logits_RV, *rows).pull_R
        on.slope_to_teacher_(slope_RV, *rows, pull_R, kl_weights_R, variation_weights_R)
        torch.testing.assert_close(slope_RV, of_autograd.grad.to(dtype), **TOLERANCES[dtype])
        assert torch.equal(teacher_RV, before_RV)


@pytest.mark.parametrize("on", [head_kernels, head_rows])
def test_rows_that_lie_apart_are_read_and_written_in_their_places_alone(on):
    wide_RV, _, labels_R, (weights_R, _) = draw(3, 70)
    before_RV, logits_RV = wide_RV.clone(), wide_RV[:, :61]
    labels_R %= 61
    read = on.read_rows(logits_RV, labels_R)
    torch.testing.assert_close(read.lse_R, lse(before_RV[:, :61]))
    on.slope_to_labels_(logits_RV, read.lse_R, labels_R, weights_R)
    torch.testing.assert_close(logits_RV.sum(1), torch.zeros(3, device=DEVICE), atol=1e-6, rtol=0)
    assert torch.equal(wide_RV[:, 61:], before_RV[:, 61:])


@pytest.mark.parametrize("on", [head_kernels, head_rows])
def test_of_equal_logits_the_first_is_chosen(on):
    logits_RV = torch.zeros(2, 9000, device=DEVICE)
    logits_RV[1, [17, 4500, 8999]] = 2.0
    labels_R = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert on.read_rows(logits_RV, labels_R).tokens_R.tolist() == [0, 17]


@pytest.mark.parametrize("on", [head_kernels, head_rows])
def test_a_row_is_read_alike_wherever_its_largest_logits_lie(on):
    rising_V = torch.linspace(-60, 20, 9000, device=DEVICE)
    logits_RV = torch.stack([rising_V, rising_V.flip(0)])
    read = on.read_rows(logits_RV, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    torch.testing.assert_close(read.lse_R, lse(logits_RV))
    assert read.tokens_R.tolist() == [8999, 0]


@pytest.mark.parametrize("on", [head_kernels, head_rows])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rows_have_no_gap_and_no_slope(on, dtype):
    logits_RV, _, labels_R, weights_2R = draw(7, 4097, dtype)
    teacher_RV = logits_RV.clone()
    rows = on.read_rows(logits_RV, labels_R).lse_R, teacher_RV, on.read_rows(teacher_RV, labels_R).lse_R
    gap = on.compare_rows(logits_RV, *rows)
    on.slope_to_teacher_(logits_RV, *rows, gap.pull_R, *weights_2R)
    assert not any(each.any() for each in (gap.kl_R, gap.variation_R, gap.pull_R, logits_RV))


@pytest.mark.parametrize("on", [head_kernels, head_rows])
def test_large_logits_overflow_nothing(on):
    logits_RV = torch.tensor([[1e4, 1e4, -1e4], [-3e4, -3e4, -3e4]], device=DEVICE)
    labels_R = torch.tensor([2, 0], device=DEVICE)
    read = on.read_rows(logits_RV, labels_R)
    expected = torch.tensor([1e4, -3e4], device=DEVICE) + torch.tensor([2.0, 3.0], device=DEVICE).log()
    torch.testing.assert_close(read.lse_R, expected)


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter subtracts inf from inf
@pytest.mark.parametrize("sick", [torch.nan, torch.inf])
@pytest.mark.parametrize("on", [head_kernels, head_rows])
def test_a_logit_that_is_not_finite_makes_its_rows_loss_not_finite(on, sick):
    logits_RV, _, labels_R, _ = draw(7, 1000)
    logits_RV[3, 700] = sick
    read = on.read_rows(logits_RV, labels_R)
    finite = (read.lse_R - read.label_logits_R).isfinite()
    assert finite.tolist() == [True] * 3 + [False] + [True] * 3


@pytest.mark.parametrize("kind", ["cross_entropy", "d_pace", *FROM_DISTRIBUTIONS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_objective_is_the_same_with_kernels_as_with_all_logits_at_once(kind, dtype, monkeypatch):
    monkeypatch.setattr("train.objective.arithmetic_on", lambda device: head_kernels)
    monkeypatch.setattr("train.head.CHUNK_LOGITS", {DEVICE: 8 * 1000})
    generator = torch.Generator().manual_seed(0)
    supervised_AK = torch.rand(7, 5, generator=generator) < 0.8
    supervised_AK[:, 0] = False
    labels_AK = torch.randint(0, 1000, supervised_AK.shape, generator=generator)
    head_VD = torch.randn(1000, 16, generator=generator).to(DEVICE, dtype)
    states_QD = torch.randn(2, 35, 16, generator=generator).to(DEVICE, dtype)
    final_QD = states_QD[1] if kind in FROM_DISTRIBUTIONS else None
    rows = find_rows(labels_AK.to(DEVICE), supervised_AK.to(DEVICE), final_QD)
    hidden_RD = states_QD[0, rows.places_R].requires_grad_()
    objective, results = Objective(Settings(kind=kind)), []
    for loss in (objective.loss, objective.loss_at_once):
        drafted = loss(hidden_RD, head_VD, rows)
        (gradient,) = torch.autograd.grad(drafted.loss_sum, hidden_RD)
        results.append((drafted.loss_sum, drafted.tokens_R, gradient.float()))
    torch.testing.assert_close(results[0][:2], results[1][:2], atol=1e-5, rtol=1e-5)
    worst = (results[0][2] - results[1][2]).norm() / results[1][2].norm()
    assert worst < {torch.float32: 5e-5, torch.bfloat16: 1e-2}[dtype]


COMPILE = """
import triton
from kernel_compile import stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from train import head_kernels

LONG, ALIGNED = ("labels", "tokens"), ("logits", "teacher", "num_tokens", "row_stride", "teacher_stride")
KERNELS = ("_read_kernel", "_compare_kernel", "_label_slope_kernel", "_teacher_slope_kernel")

def build(kernel, capability, floats):
    types = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(LONG, "*i64")
    types |= dict.fromkeys(("num_tokens", "row_stride", "teacher_stride"), "i32") | {"STEP": "constexpr"}
    types |= dict.fromkeys(("logits", "teacher"), floats)
    signature = {name: types[name] for name in kernel.arg_names}
    places = [number for number, name in enumerate(kernel.arg_names) if name in ALIGNED]
    attributes = {(place,): [["tt.divisibility", 16]] for place in places}
    source = ASTSource(kernel, signature, {"STEP": head_kernels._STEP}, attributes)
    options = {"num_warps": head_kernels._WARPS}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

for capability in (86, 90):
    for floats in ("*bf16", "*fp32"):
        for name in KERNELS:
            built = build(getattr(head_kernels, name), capability, floats)
            wide = built.asm["ptx"].count("ld.global.v4.b32")
            print(built.metadata.shared, stack_bytes(built.asm["cubin"]), wide)
"""


def test_the_kernels_compile_for_sm_86_and_sm_90_without_spills_and_read_16_bytes_at_a_time(tmp_path):
    shared, stacks, wide_loads = zip(*run_apart(COMPILE, tmp_path), strict=True)
    assert max(shared) < 4096  # of an SM's 99 KiB
    assert max(stacks) == 0  # registers that spill go there
    bf16, fp32 = (2, 4, 2, 4), (4, 8, 4, 8)  # loads by each of 256 threads for a step, of one row or of two
    assert wide_loads == (*bf16, *fp32) * 2
