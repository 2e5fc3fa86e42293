"""The drafter's elementwise work: its maths against stock torch, compiled against eager, and what it keeps.

Without a GPU it is compiled for a CPU: by a C++ compiler where roundings count, else into graphs alone.
"""

# R=rows  H=heads  d=head dim  D=hidden  F=intermediate

import shutil
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from small_training import DRAFTER, HIDDEN, VOCAB, make_sequence
from test_train_step import assert_same, start, take_steps, train_settings
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from recipes.schema import Lora
from train import pointwise
from train.batches import pack
from train.drafter import MLP, DFlashDrafter, rotation_at
from train.lora import adapt

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-6
HAS_COMPILER = IS_CUDA or shutil.which("g++") is not None

Tensors = tuple[torch.Tensor, ...]
Way = Callable[..., torch.Tensor | Tensors]


def stock_norm(x, weight):
    norm = nn.RMSNorm(len(weight), eps=EPS).to(x)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def stock_add_and_norm(x_RD, change_RD, weight_D):
    sum_RD = x_RD + change_RD
    return sum_RD, stock_norm(sum_RD, weight_D)


def stock_norm_and_rotate(x_RHd, weight_d, cos_Rd, sin_Rd):
    """With halves and signs as the published code has them."""
    half = x_RHd.shape[-1] // 2
    cos_R1d, sin_R1d = cos_Rd[:, None], torch.cat([-sin_Rd[:, :half], sin_Rd[:, half:]], -1)[:, None]
    normed_RHd = stock_norm(x_RHd, weight_d)
    turned_RHd = torch.cat([-normed_RHd[..., half:], normed_RHd[..., :half]], -1)
    return normed_RHd * cos_R1d + turned_RHd * sin_R1d


def stock_swiglu(gate_RF, up_RF):
    return functional.silu(gate_RF) * up_RF


def with_eps(function: Way, weight_at: int, fuses: bool) -> Way:
    """`function` where eps stands behind the weight."""

    def call(*given: torch.Tensor) -> torch.Tensor | Tensors:
        chosen = pointwise.choose(function, fuses, given[0])
        return chosen(*given[: weight_at + 1], EPS, *given[weight_at + 1 :])

    return call


WAYS: dict[str, tuple[Way, Callable[[bool], Way]]] = {
    "norm": (stock_norm, partial(with_eps, pointwise.norm, 1)),
    "add_and_norm": (stock_add_and_norm, partial(with_eps, pointwise.add_and_norm, 2)),
    "norm_and_rotate": (stock_norm_and_rotate, partial(with_eps, pointwise.norm_and_rotate, 1)),
    "swiglu": (stock_swiglu, lambda fuses: partial(pointwise.multiply_gated, fuses=fuses)),
}


def draw(name: str, rows: int, dtype: torch.dtype, heads: int = 3) -> tuple[list[torch.Tensor], Tensors]:
    """Leaves, and what needs no gradient."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_()

    def weight(size: int) -> torch.Tensor:
        return nn.Parameter(1 + 0.2 * normal(size).detach())

    if name == "norm":
        return [normal(rows, 40), weight(40)], ()
    if name == "add_and_norm":
        return [normal(rows, 40), normal(rows, 40), weight(40)], ()
    if name == "norm_and_rotate":
        rotation = rotation_at(torch.arange(rows, device=DEVICE) * 7, 16, 1e4, dtype)
        return [normal(rows, heads, 16), weight(16)], rotation
    return [normal(rows, 56), normal(rows, 56)], ()


def run(way: Way, leaves: list[torch.Tensor], others: Tensors) -> Tensors:
    """Outputs and the leaves' gradients, for some gradient of the outputs."""
    outputs = way(*leaves, *others)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    slopes = [torch.linspace(-1, 1, each.numel()).view(each.shape).to(each) for each in outputs]
    return *(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, slopes)


def in_fp32(tensors: Tensors | list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.detach().float().requires_grad_(each.requires_grad) for each in tensors]


def mean_errors(found: Tensors, expected: Tensors) -> list[float]:
    pairs = zip(found, expected, strict=True)
    return [float((mine.float() - other).square().mean().sqrt()) for mine, other in pairs]


@pytest.fixture
def compiled_here(monkeypatch) -> Iterator[None]:
    """Without a GPU: into the compiler's own graphs, of which torch runs each operator."""
    quick = partial(torch.compile, backend="aot_eager_decomp_partition")
    yield from compiling(monkeypatch, torch.compile if IS_CUDA else quick)


@pytest.fixture
def fused_here(monkeypatch) -> Iterator[None]:
    yield from compiling(monkeypatch, torch.compile)


def compiling(monkeypatch, how: Callable) -> Iterator[None]:
    monkeypatch.setattr(pointwise, "COMPILED_ON", {DEVICE.type})
    monkeypatch.setattr(torch, "compile", how)
    pointwise._compile.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    pointwise._compile.cache_clear()


# Maths


@pytest.mark.parametrize("name", WAYS)
def test_values_and_gradients_are_stock_torchs_to_the_bit(name):
    stock, ours = WAYS[name]
    for dtype in (FP32, BF16):
        inputs = draw(name, 13, dtype)
        assert all(map(torch.equal, run(stock, *inputs), run(ours(False), *inputs)))


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no g++")
@pytest.mark.parametrize("name", ["add_and_norm", "norm_and_rotate", "swiglu"])
def test_fused_bf16_is_no_further_from_fp32_than_eager(name, fused_here):
    stock, ours = WAYS[name]
    leaves, others = draw(name, 130, BF16)
    exact = run(stock, in_fp32(leaves), tuple(in_fp32(others)))
    eager, fused = (mean_errors(run(ours(fuses), leaves, others), exact) for fuses in (False, True))
    assert counters["stats"]["unique_graphs"] > 0
    assert all(mine < 1.05 * other for mine, other in zip(fused, eager, strict=True)), (fused, eager)


# Compilation


@pytest.mark.parametrize("name", WAYS)
def test_any_number_of_rows_is_compiled_once(name, compiled_here):
    stock, ours = WAYS[name]
    for rows in (13, 2, 30, 7):
        inputs = draw(name, rows, FP32)
        for mine, other in zip(run(ours(True), *inputs), run(stock, *inputs), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == (2 if name == "swiglu" else 1)  # both of its passes
    assert not counters["graph_break"]


def test_queries_and_keys_are_compiled_once_each(compiled_here):
    _, ours = WAYS["norm_and_rotate"]
    for rows, heads in ((13, 4), (9, 2), (30, 2), (7, 4)):
        run(ours(True), *draw("norm_and_rotate", rows, FP32, heads))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("rows", [0, 1])
def test_a_single_row_or_none_is_not_compiled(rows, compiled_here):
    for name, (_, ours) in WAYS.items():
        run(ours(True), *draw(name, rows, FP32))
    assert not counters["stats"]


def test_a_cpu_compiles_nothing():
    assert pointwise.choose(pointwise.norm, True, torch.ones(3, 4)) is pointwise.norm


def test_not_wanted_is_not_compiled(compiled_here):
    drafter = make_drafter()
    drafter.fuse(False)
    gradients(drafter)
    assert not counters["stats"]


# The drafter


def make_drafter(lora: Lora | None = None) -> DFlashDrafter:
    torch.manual_seed(0)
    drafter = DFlashDrafter(DRAFTER, HIDDEN).to(DEVICE)
    if lora is not None:
        adapt(drafter, lora)
    return drafter


def gradients(drafter: DFlashDrafter) -> list[torch.Tensor]:
    batch = pack(
        [make_sequence(0, 20), make_sequence(1, 15)], [torch.tensor([7, 9, 15]), torch.tensor([6])], DRAFTER
    )
    embedding_VD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    batch = batch.to(DEVICE, FP32)
    embedded_QD = embedding_VD.to(DEVICE)[batch.input_ids_Q]
    inputs = batch.taps_SE, batch.context_positions_S, embedded_QD, batch.block_positions_Q, batch.views
    drafter(*inputs).square().sum().backward()
    return [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["all", "lora"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_fused_drafter_has_the_gradients_of_one_that_is_not(recompute, lora, compiled_here):
    plain, fused = make_drafter(lora), make_drafter(lora)
    fused.fuse(True)
    fused.recompute_layers = recompute
    expected, found = gradients(plain), gradients(fused)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


@pytest.fixture(scope="module")
def reference(ranks):
    return take_steps(*start(ranks, train_settings()), ranks)


@pytest.mark.parametrize(("stage", "recompute"), [(2, True), (3, False), (3, True)])
def test_engines_learn_the_same_with_a_fused_drafter(stage, recompute, ranks, reference, compiled_here):
    learner, feed = start(ranks, train_settings(zero_stage=stage))
    learner.engine.module.fuse(True)
    learner.engine.module.recompute_layers = recompute
    assert_same(take_steps(learner, feed, ranks), reference, 1e-5)
    assert counters["stats"]["unique_graphs"] > 0


# What is kept for the backward pass


def kept_bytes(drafter: DFlashDrafter, monkeypatch) -> int:
    """Of the drafter's layers, parameters left out."""
    kept = []
    hooks = pointwise.saved_tensors_hooks

    def counting(keep: Callable, restore: Callable) -> hooks:
        def count(saved: torch.Tensor) -> object:
            kept.append(keep(saved))
            return kept[-1]

        return hooks(count, restore)

    monkeypatch.setattr(pointwise, "saved_tensors_hooks", counting)
    gradients(drafter)
    own = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    storages = [each.untyped_storage() for each in kept if isinstance(each, torch.Tensor)]
    sizes = {each.data_ptr(): each.nbytes() for each in storages if each.data_ptr() not in own}
    return sum(sizes.values())


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["all", "lora"])
def test_an_mlp_keeps_gate_and_up_neither_the_gates_silu_nor_their_product(lora, monkeypatch):
    ours = kept_bytes(make_drafter(lora), monkeypatch)
    monkeypatch.setattr(MLP, "forward", plainly)
    rows = 4 * DRAFTER.block_size
    spared = 2 * DRAFTER.num_hidden_layers * rows * DRAFTER.intermediate_size * FP32.itemsize
    assert ours == kept_bytes(make_drafter(lora), monkeypatch) - spared


def plainly(mlp: MLP, x_QD: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(functional.silu(mlp.gate_proj(x_QD)) * mlp.up_proj(x_QD))


def test_the_product_is_all_that_is_computed_again():
    """No matrix product is."""
    with torch.autograd.profiler.profile() as profile:
        gradients(make_drafter())
    ours = count(profile, "aten::mm")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MLP, "forward", plainly)
        with torch.autograd.profiler.profile() as profile:
            gradients(make_drafter())
    assert ours == count(profile, "aten::mm")


def count(profile: torch.autograd.profiler.profile, name: str) -> int:
    return sum(event.name == name for event in profile.function_events)
