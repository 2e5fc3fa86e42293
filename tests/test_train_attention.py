"""The trainer's attention three ways: kernels and tiles against the dense definition, forward and backward.

Without a GPU the kernels run in Triton's interpreter.  With one, also at the flagship's sizes.
"""

# Q=block rows  S=context rows  N=S+Q  H=heads  G=key-value heads  d=head dim  K=slots  C=context's boundaries

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from kernel_compile import run_apart

from recipes.schema import LayerType
from train.attention import View, attend, attend_densely
from train.attention_launch import attend_backward, attend_forward
from train.blocks import Places, block_places, context_places, join_places, visibility
from train.layout import GRAIN, Layout, lay_out
from train.tiles import Document, cut_tiles

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")  # on a CPU the kernels are interpreted
SHARED_BYTES = 99 * 1024  # that sm_86 gives one block of threads
ROOMY_BYTES = 163 * 1024  # sm_80
FULL, SLIDING = "full_attention", "sliding_attention"
FP32, BF16 = torch.float32, torch.bfloat16
# The largest error of an output or a gradient, over its largest value or 1
CLOSE = {FP32: 5e-5 if IS_CUDA else 1e-5, BF16: 2**-6}
COARSE = 1e-2  # what a wrong mask must exceed in fp32

ODD = ([0, 1, 7, 22], [9], [2, 3, 36], [0])
"""Anchors of documents: one has a single block, one nothing but an anchor at 0, which no context precedes."""
LONG = ([70, 71, 130], [0, 40])
"""Tiles with keys that all their rows see."""


@dataclass(frozen=True)
class Case:
    kind: LayerType
    window: int
    block_size: int
    group: int
    head_dim: int
    anchors: tuple[list[int], ...] = ODD
    dtype: torch.dtype = FP32
    kv_heads: int = 2

    def __str__(self) -> str:
        kind, dtype = self.kind.split("_")[0], str(self.dtype).removeprefix("torch.")
        return (
            f"{kind}-w{self.window}-K{self.block_size}-{self.group}x{self.kv_heads}-d{self.head_dim}-{dtype}"
        )

    @cached_property
    def documents(self) -> list[Document]:
        documents, first_row, first_query = [], 0, 0
        for anchors in self.anchors:
            end_row, end_query = first_row + anchors[-1], first_query + len(anchors) * self.block_size
            documents.append(Document(slice(first_row, end_row), slice(first_query, end_query)))
            first_row, first_query = end_row, end_query
        return documents

    @cached_property
    def context(self) -> Places:
        return join_places([context_places(number, each[-1]) for number, each in enumerate(self.anchors)])

    @cached_property
    def blocks(self) -> Places:
        starts = [document.blocks.start // self.block_size for document in self.documents]
        return join_places(
            [
                block_places(number, first, torch.tensor(each), self.block_size)
                for number, (first, each) in enumerate(zip(starts, self.anchors, strict=True))
            ]
        )

    @cached_property
    def mask(self) -> torch.Tensor:
        return visibility(self.kind, self.window, self.context, self.blocks)

    def layout(self) -> Layout:
        layout = lay_out(self.kind, self.window, self.blocks, self.documents, self.block_size)
        return layout.map(lambda part: part.to(DEVICE))

    def tiling(self):
        return cut_tiles(
            self.kind, self.window, self.context, self.blocks, self.documents, self.block_size
        ).to(DEVICE)


Tensors = tuple[torch.Tensor, ...]
Way = Callable[[torch.Tensor, Tensors, Tensors], torch.Tensor]
NAMES = ("output", "query", "context key", "context value", "block key", "block value")


def draw(case: Case, seed: int = 0) -> Tensors:
    """Query, keys and values of context and blocks, and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    queries, context = len(case.blocks.position), len(case.context.position)
    heads = case.group * case.kv_heads, *[case.kv_heads] * 4, case.group * case.kv_heads
    rows = queries, context, context, queries, queries, queries
    return tuple(
        torch.randn(row, head, case.head_dim, generator=generator).to(DEVICE, case.dtype)
        for row, head in zip(rows, heads, strict=True)
    )


def run(way: Way, inputs: Tensors) -> Tensors:
    """The output and its five gradients."""
    *leaves, d_output = (each.detach() for each in inputs)
    leaves = [each.requires_grad_() for each in leaves]
    output = way(leaves[0], tuple(leaves[1:3]), tuple(leaves[3:5]))
    return output.detach(), *torch.autograd.grad(output, leaves, d_output)


def seeing(view: View) -> Way:
    return lambda query, context, blocks: attend(query, context, blocks, view)


def densely(mask_QN: torch.Tensor) -> Way:
    mask_QN = mask_QN.to(DEVICE)
    return lambda query, context, blocks: attend_densely(query, context, blocks, mask_QN)


def errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    return {
        name: float((mine.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1))
        for name, mine, other in zip(NAMES, found, expected, strict=True)
        if len(other)
    }


def exactly(case: Case, inputs: Tensors) -> Tensors:
    """By the definition, in fp32 from the same inputs."""
    return run(densely(case.mask), tuple(each.float() for each in inputs))


ALONE = Case(SLIDING, 1, 5, 1, 64)
CLOSE_BY = Case(SLIDING, 3, 5, 2, 32)
FAR = Case(SLIDING, 64, 5, 2, 32, LONG)
WHOLE = Case(FULL, 7, 5, 4, 64, LONG, kv_heads=1)
CASES = [
    ALONE,
    CLOSE_BY,
    FAR,
    WHOLE,
    Case(FULL, 1, 2, 2, 32),
    Case(FULL, 64, 16, 1, 32, LONG, kv_heads=1),
    Case(SLIDING, 1, 2, 4, 32),
    Case(SLIDING, 3, 16, 1, 64, kv_heads=1),
    Case(SLIDING, 7, 2, 1, 64, LONG),
    Case(SLIDING, 7, 16, 4, 32, kv_heads=1),
    Case(SLIDING, 64, 16, 2, 64, LONG, kv_heads=1),
    Case(SLIDING, 64, 5, 2, 128, LONG, kv_heads=1),
    Case(SLIDING, 7, 32, 3, 48, ([3], [11]), kv_heads=1),
    Case(FULL, 1, 3, 2, 16, ([0], [0])),
]
NARROW = [
    Case(FULL, 1, 5, 2, 32, dtype=BF16, kv_heads=1),
    Case(SLIDING, 7, 16, 1, 32, dtype=BF16, kv_heads=1),
    Case(SLIDING, 40, 5, 2, 64, LONG, BF16, kv_heads=1),
]


@pytest.mark.parametrize("case", [*CASES, *NARROW], ids=str)
def test_kernels_tiles_and_the_definition_agree_forward_and_backward(case):
    inputs = draw(case)
    expected = exactly(case, inputs)
    for view in (case.layout(), case.tiling()):
        found = run(seeing(view), inputs)
        assert [each.dtype for each in found] == [case.dtype] * 6
        assert max(errors(found, expected).values()) < CLOSE[case.dtype], errors(found, expected)


def test_fp16_is_taken_too():
    case = replace(NARROW[0], dtype=torch.float16)
    inputs = draw(case)
    assert max(errors(run(seeing(case.layout()), inputs), exactly(case, inputs)).values()) < CLOSE[BF16]


@pytest.mark.parametrize("case", [CLOSE_BY, WHOLE], ids=str)
def test_results_repeat_bit_for_bit(case):
    inputs, layout = draw(case), case.layout()
    first, second = run(seeing(layout), inputs), run(seeing(layout), inputs)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_inputs_need_not_be_contiguous():
    case = CLOSE_BY
    inputs = draw(case)
    strided = tuple(each.repeat_interleave(2, dim=-1)[..., ::2] for each in inputs)
    found, expected = (run(seeing(case.layout()), each) for each in (strided, inputs))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


# Nothing flows from what is not seen


@pytest.mark.parametrize(
    ("case", "block"),
    [(CLOSE_BY, 0), (CLOSE_BY, 3), (CLOSE_BY, 7), (FAR, 2), (WHOLE, 1), (WHOLE, 3)],
    ids=str,
)
def test_a_blocks_gradient_is_exactly_zero_wherever_it_sees_nothing(case, block):
    inputs = draw(case)
    rows = slice(block * case.block_size, (block + 1) * case.block_size)
    d_output = torch.zeros_like(inputs[-1])
    d_output[rows] = inputs[-1][rows]
    _, d_query, *d_keys_and_values = run(seeing(case.layout()), (*inputs[:-1], d_output))
    seen_N = case.mask[rows].any(0).to(DEVICE)
    is_other = torch.ones(len(d_query), dtype=torch.bool)
    is_other[rows] = False
    assert not d_query[is_other].any()
    num_context = len(case.context.position)
    for number, gradient in enumerate(d_keys_and_values):
        seen = seen_N[:num_context] if number < 2 else seen_N[num_context:]
        assert not gradient[~seen].any()
        is_key = number in (0, 2)  # a key that is alone has no gradient
        assert is_key or gradient[seen].flatten(1).any(1).all()


def changed(layout: Layout, **changes: object) -> Layout:
    return replace(layout, **changes)


def later_anchors(layout: Layout) -> Layout:
    return changed(layout, end_A=(layout.end_A + 1).clamp(max=layout.num_context))


def earlier_anchors(layout: Layout) -> Layout:
    return changed(layout, end_A=(layout.end_A - 1).maximum(layout.first_A))


@pytest.mark.parametrize("case", [CLOSE_BY, FAR], ids=str)
@pytest.mark.parametrize(
    "spoil",
    [
        later_anchors,
        earlier_anchors,
        lambda layout: changed(layout, window=layout.window + 1),
        lambda layout: changed(layout, window=layout.window - 1),
        lambda layout: changed(layout, kind=FULL),
    ],
    ids=["anchor + 1", "anchor - 1", "window + 1", "window - 1", "no window"],
)
def test_an_argument_off_by_one_is_seen(case, spoil):
    inputs = draw(case)
    assert max(errors(run(seeing(spoil(case.layout())), inputs), exactly(case, inputs)).values()) > COARSE


# The layout


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_is_the_rule(case):
    """Stretches, and the blocks that see any or all of a tile of context, against the dense mask."""
    layout = case.layout().map(torch.Tensor.cpu)
    num_context, block_size = len(case.context.position), case.block_size
    seen_QS = case.mask[:, :num_context]
    row, slot = torch.arange(len(seen_QS)) // block_size, torch.arange(len(seen_QS)) % block_size
    low, high = layout.first_A[row].clone(), layout.end_A[row]
    if layout.slides:
        low = low.maximum(high + slot + 1 - case.window)
    numbers_S = torch.arange(num_context)
    assert torch.equal((numbers_S >= low[:, None]) & (numbers_S < high[:, None]), seen_QS)
    seen_AKS = seen_QS.unflatten(0, (-1, block_size))
    sees_nothing = set((~seen_AKS.any(2).any(1)).nonzero().flatten().tolist())
    table = layout.blocks_C4.tolist()
    for boundary, (first, *_, whole_end) in enumerate(table[:-1]):
        tile_AKG = seen_AKS[..., boundary * GRAIN : (boundary + 1) * GRAIN]
        _, end, whole_first, _ = table[boundary + 1]
        some = tile_AKG.any(2).any(1).nonzero().flatten().tolist()
        assert set(some) <= set(range(first, end)) <= set(some) | sees_nothing
        assert tile_AKG.all(2).all(1).nonzero().flatten().tolist() == list(range(whole_first, whole_end))


def test_a_layout_grows_with_blocks_and_context_never_with_their_product():
    case = Case(SLIDING, 2048, 16, 4, 128, (list(range(3000, 3512)), list(range(7, 4000, 8))))
    layout = case.layout()
    numbers = layout.first_A.numel() + layout.end_A.numel() + layout.blocks_C4.numel()
    assert numbers == 2 * (512 + 500) + 4 * (-(-layout.num_context // GRAIN) + 1)


# On a GPU


ANCHORS = torch.randperm(4095, generator=torch.Generator().manual_seed(0))[:512].sort().values.tolist()
FLAGSHIP = [Case(kind, 2048, 16, 4, 128, (ANCHORS,), BF16, kv_heads=8) for kind in (SLIDING, FULL)]
LARGE = [
    *FLAGSHIP,
    replace(FLAGSHIP[0], anchors=(list(range(3000, 3300)), [0, 5, 900], list(range(0, 2000, 7)))),
    replace(FLAGSHIP[1], block_size=5, group=2, head_dim=64, window=300),
    replace(FLAGSHIP[0], block_size=10, group=8, head_dim=256, kv_heads=2, window=511),
    replace(FLAGSHIP[0], block_size=32, group=3, head_dim=96, kv_heads=2),
]


@pytest.mark.skipif(not IS_CUDA, reason="real sizes need a GPU")
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_at_real_sizes_kernels_err_no_more_than_tiles(case):
    inputs = draw(case)
    expected = run(seeing(case.tiling()), tuple(each.float() for each in inputs))
    by_kernels = errors(run(seeing(case.layout()), inputs), expected)
    by_tiles = errors(run(seeing(case.tiling()), inputs), expected)
    assert all(by_kernels[name] < max(1.5 * by_tiles[name], CLOSE[BF16]) for name in NAMES), by_kernels


@pytest.mark.skipif(not IS_CUDA, reason="the allocator of a GPU tells")
def test_kernels_store_nothing_beside_what_they_return():
    case = FLAGSHIP[0]
    query, *pairs, d_output = draw(case)
    context, blocks, layout = tuple(pairs[:2]), tuple(pairs[2:]), case.layout()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outcome = attend_forward(query, context, blocks, layout, 0.1)
    attend_backward(d_output, query, context, blocks, outcome, layout, 0.1)
    results = 2 * query.nbytes + sum(each.nbytes for each in pairs) + 2 * outcome[1].nbytes
    assert torch.cuda.max_memory_allocated() - before < 1.01 * results


COMPILE = """
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from train import attention_kernels as kernels
from train.attention_launch import Shape

TYPES = dict.fromkeys(("first", "end", "blocks"), "*i32") | dict.fromkeys(("lse", "delta"), "*fp32")
TYPES |= dict.fromkeys(("num_rows", "num_keys", "window"), "i32") | {"scale": "fp32"}

def shared_bytes(kernel, capability, shape, tile, **sizes):
    sizes = shape.constants(tile) | sizes
    types = {name: TYPES.get(name, "*bf16") for name in kernel.arg_names} | dict.fromkeys(sizes, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    pointers = [place for place, name in enumerate(signature) if signature[name].startswith("*")]
    attributes = {(place,): [["tt.divisibility", 16]] for place in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": tile.warps}).metadata.shared

for capability, is_roomy in ((86, False), (80, True), (90, True)):
    tiles = (shape := Shape(4, 128, 16, True, torch.bfloat16, is_roomy)).tiles
    print(shared_bytes(kernels.forward_kernel, capability, shape, tiles.forward))
    print(shared_bytes(kernels.queries_kernel, capability, shape, tiles.queries))
    print(shared_bytes(kernels.keys_kernel, capability, shape, tiles.keys, OF_CONTEXT=True))
"""


def test_the_kernels_compile_for_every_gpu_and_fit_into_its_shared_memory(tmp_path):
    shared = [number for (number,) in run_apart(COMPILE, tmp_path)]
    assert len(shared) == 9
    assert max(shared[:3]) <= SHARED_BYTES
    assert max(shared[3:]) <= ROOMY_BYTES
