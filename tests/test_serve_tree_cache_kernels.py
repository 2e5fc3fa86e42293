"""serve/tree_cache_kernels.py against plain torch: interpreted on a CPU, compiled on a GPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from serve.tree_batch import WalkBatch
from serve.tree_cache_kernels import (
    StackedCaches,
    compact_layers_,
    stack_caches,
    tidy_stacked_,
    tidy_states_,
)
from serve.tree_slots import path_rows, tidy_rows

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"  # on a CPU the kernels are interpreted
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
PLACES = 21  # of a path: more than a program takes at a time
NODES = 40
PATHS = [
    [0, 2, 3, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 25, 26, 38, 39],  # full
    [],
    list(range(5)),  # where it belongs already
    list(range(1, 1 + PLACES)),  # every source but the last is a target too
    [0, 1, 5, 6, 19],
    [],  # padding
]
"""Accepted nodes of each request."""


@dataclass(frozen=True)
class Layout:
    """Of a cache [N, H, P, D]: the order of its dimensions in memory, from the outermost."""

    heads: int
    block_size: int
    row_size: int
    order: tuple[int, ...] = (0, 1, 2, 3)

    def __str__(self) -> str:
        return f"H{self.heads}-P{self.block_size}-D{self.row_size}-{''.join(map(str, self.order))}"


LAYOUTS = [
    Layout(1, 1, 2),
    Layout(3, 5, 24),
    Layout(2, 16, 32, (0, 2, 1, 3)),
    Layout(2, 4, 320, (1, 0, 3, 2)),
]
SOME = LAYOUTS[2]


@dataclass(frozen=True)
class Step:
    """Rows of requests in scrambled order, with rows of nobody between."""

    first_row_B: torch.Tensor
    walk: WalkBatch
    slots_GT: torch.Tensor
    num_slots: int

    @property
    def where(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.first_row_B, self.walk.path_BL, self.walk.num_accepted_B


def draw_step(paths: Sequence[Sequence[int]], num_groups: int, block_size: int, seed: int = 0) -> Step:
    """A slot a row, another one in each group; padding, the last request, has none."""
    generator = torch.Generator().manual_seed(seed)
    batch, rows = len(paths), NODES + 3
    first_row_B = 2 + torch.randperm(batch, generator=generator) * rows
    num_rows = 2 + batch * rows
    num_slots = (num_rows // block_size + 2) * block_size
    slots_GT = torch.stack(
        [torch.randperm(num_slots, generator=generator)[:num_rows] for _ in range(num_groups)]
    )
    slots_GT[:, first_row_B[-1] : first_row_B[-1] + rows] = -1
    path_BL = torch.full((batch, PLACES), -1)
    for request, path in enumerate(paths):
        path_BL[request, : len(path)] = torch.tensor(path, dtype=torch.int64)
    num_accepted_B = torch.tensor([len(path) for path in paths])
    walk = WalkBatch(*(each.to(DEVICE) for each in (path_BL, num_accepted_B, torch.zeros(batch))))
    return Step(first_row_B.int().to(DEVICE), walk, slots_GT.to(DEVICE), num_slots)


def draw_caches(step: Step, layout: Layout, layers: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Any bit patterns, NaN among them."""
    generator = torch.Generator().manual_seed(1)
    shape = step.num_slots // layout.block_size, layout.heads, layout.block_size, layout.row_size
    in_memory = [shape[dimension] for dimension in layout.order]
    back = [layout.order.index(dimension) for dimension in range(4)]
    return [bits_as(generator, dtype, *in_memory).permute(back) for _ in range(layers)]


def bits_as(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    bits = integers_of(dtype)
    ends = torch.iinfo(bits)
    drawn = torch.randint(ends.min, ends.max, shape, generator=generator, dtype=bits)
    return drawn.view(dtype).to(DEVICE)


def integers_of(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Bit for bit."""
    for mine, other in zip(found, expected, strict=True):
        bits = integers_of(mine.dtype)
        assert torch.equal(mine.contiguous().view(bits), other.contiguous().view(bits))


def compact_by_definition_(step: Step, groups: Sequence[int], caches: Sequence[torch.Tensor]) -> None:
    """What `serve.seam.runtime.TreeRuntime.tidy_caches` does; a copy of a slot onto itself is none."""
    rows = path_rows(step.walk, step.first_row_B.long())
    is_moved = rows.source_BL != rows.target_BL
    for group, cache in zip(groups, caches, strict=True):
        source, target = (step.slots_GT[group][each[is_moved]] for each in (rows.source_BL, rows.target_BL))
        size = cache.shape[2]
        cache[target // size, :, target % size] = cache[source // size, :, source % size]


def compact_(step: Step, groups: Sequence[int], caches: StackedCaches) -> None:
    compact_layers_(step.slots_GT, *step.where, torch.tensor(groups, device=DEVICE), caches)


def copies(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [cache.clone(memory_format=torch.preserve_format) for cache in caches]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layer_is_compacted_as_by_definition(layout, dtype):
    groups = [1, 0, 2]
    step = draw_step(PATHS, 3, layout.block_size)
    caches = draw_caches(step, layout, len(groups), dtype)
    expected = copies(caches)
    compact_by_definition_(step, groups, expected)
    compact_(step, groups, stack_caches(caches))
    assert_same(caches, expected)


def test_a_path_is_read_at_its_place_before_anything_else_is_there():
    """Slots in order and values that name their slot: what the step makes of them can be said in words."""
    step = draw_step(PATHS, 1, 4)
    step.slots_GT.copy_(torch.arange(step.slots_GT.shape[1]))
    cache = torch.arange(step.num_slots, dtype=torch.float32, device=DEVICE).view(-1, 1, 4, 1).clone()
    compact_(step, [0], stack_caches([cache]))
    found = cache.flatten().tolist()
    for first, path in zip(step.first_row_B.tolist(), PATHS, strict=True):
        assert found[first] == first
        assert found[first + 1 : first + 1 + len(path)] == [first + 1 + node for node in path]
        rest = range(first + 1 + len(path), first + 1 + NODES)
        assert found[rest.start : rest.stop] == list(rest)


def test_layers_of_two_groups_may_share_memory():
    """As long as they have no slot in common: vLLM gives a layer of each group the same blocks' pool."""
    step = draw_step(PATHS, 1, SOME.block_size)
    step = replace(
        step,
        slots_GT=torch.cat([step.slots_GT, step.slots_GT + step.num_slots]),
        num_slots=2 * step.num_slots,
    )
    step.slots_GT[1, step.slots_GT[0] < 0] = -1
    (cache,) = draw_caches(step, SOME, 1, torch.bfloat16)
    expected = copies([cache])
    compact_by_definition_(step, [0, 1], expected * 2)
    compact_(step, [0, 1], stack_caches([cache, cache]))
    assert_same([cache], expected)


def test_nothing_is_moved_where_nothing_is_accepted_or_has_a_slot():
    """Memory before the caches, where a negative slot would be, stays as it is too."""
    step = draw_step([[], [3, 4], [0, 1, 5], []], 1, SOME.block_size)
    _, second, third, _ = step.first_row_B.tolist()
    step.slots_GT[0, [second + 1, second + 2, third + 1 + 5]] = -1  # two targets and a source
    with_more = replace(step, num_slots=step.num_slots + SOME.block_size)
    caches = draw_caches(with_more, SOME, 2, torch.bfloat16)
    expected = copies(caches)
    compact_(step, [0, 0], stack_caches([cache[1:] for cache in caches]))
    assert_same(caches, expected)


@pytest.mark.parametrize("wrong", ["group", "path"])
def test_a_wrong_group_or_path_is_noticed(wrong):
    step = draw_step(PATHS, 2, SOME.block_size)
    caches = draw_caches(step, SOME, 1, torch.float32)
    expected = copies(caches)
    compact_by_definition_(step, [0], expected)
    if wrong == "path":
        step.walk.num_accepted_B[0] -= 1
    compact_(step, [int(wrong == "group")], stack_caches(caches))
    with pytest.raises(AssertionError):
        assert_same(caches, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 300])
def test_tap_states_are_tidied_as_rows_are(size, dtype):
    """Also when a state is some columns of a wider one."""
    step = draw_step(PATHS, 1, 1)
    generator = torch.Generator().manual_seed(1)
    wide = [bits_as(generator, dtype, step.slots_GT.shape[1], size + 3) for _ in range(3)]
    expected, stacked = copies(wide), copies(wide)
    for states in expected:
        tidy_rows(states[:, 2 : 2 + size], path_rows(step.walk, step.first_row_B.long()))
    tidy_states_([states[:, 2 : 2 + size] for states in wide], *step.where)
    assert_same(wide, expected)
    tidy_stacked_(stack_caches([states[:, 2 : 2 + size] for states in stacked]), *step.where)
    assert_same(stacked, expected)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 3, 8),
        torch.zeros(4, 2, 3).transpose(1, 2),
        torch.zeros(4, 3, 2, dtype=torch.bfloat16),
        torch.zeros(4, 3, 2, device="meta"),
    ],
    ids=["shape", "strides", "dtype", "device"],
)
def test_a_layer_that_differs_is_refused_by_name(other):
    caches = [torch.zeros(4, 3, 2), torch.zeros(4, 3, 2)]
    assert stack_caches(caches).pointers_Y.tolist() == [cache.data_ptr() for cache in caches]
    with pytest.raises(ValueError, match="the cache of layer 2 is"):
        stack_caches([*caches, other])


def test_a_table_knows_what_divides_all_addresses():
    memory = torch.zeros(64, dtype=torch.bfloat16)
    assert memory.data_ptr() % 16 == 0
    for offset, alignment in ((8, 16), (16, 16), (4, 8), (6, 4), (1, 2)):
        assert stack_caches([memory[:8], memory[offset : offset + 8]]).alignment == alignment
    with pytest.raises(ValueError, match="no caches"):
        stack_caches([])


# On a GPU alone


@pytest.mark.skipif(not IS_CUDA, reason="needs a GPU")
@pytest.mark.parametrize("heads", [2, 8])
def test_a_graph_replays_large_moves_with_other_paths(heads):
    """36 layers of two groups in the layout [N, P, H, D], and five taps."""
    layout, groups = Layout(heads, 16, 512, (0, 2, 1, 3)), [layer % 2 for layer in range(36)]
    step, other = draw_step(PATHS[::-1], 2, 16, seed=1), draw_step(PATHS, 2, 16, seed=2)
    caches = draw_caches(step, layout, len(groups), torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    taps = [bits_as(generator, torch.bfloat16, step.slots_GT.shape[1], 5120) for _ in range(5)]
    stacked, stacked_taps = stack_caches(caches), stack_caches(taps)
    group_of_layer_Y = torch.tensor(groups, device=DEVICE)

    def move() -> None:
        compact_layers_(step.slots_GT, *step.where, group_of_layer_Y, stacked)
        tidy_stacked_(stacked_taps, *step.where)

    move()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        move()
    for mine, new in zip((step.slots_GT, *step.where), (other.slots_GT, *other.where), strict=True):
        mine.copy_(new)
    expected, expected_taps = copies(caches), copies(taps)
    compact_by_definition_(other, groups, expected)
    for states in expected_taps:
        tidy_rows(states, path_rows(other.walk, other.first_row_B.long()))
    graph.replay()
    assert_same(caches, expected)
    assert_same(taps, expected_taps)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from serve.tree_cache_kernels import _move_kernel as kernel

def assembly(capability, element, **sizes):
    sizes |= {"cache_element_stride": 1, "ROW_SIZE": 512, "TILE_PLACES": 16, "TILE_ROW": 256}
    types = {name: "i32" if name.endswith(("stride", "size")) else "*i64" for name in kernel.arg_names}
    types |= {"like": element} | {name: "constexpr" for name in sizes}
    signature = {name: types[name] for name in kernel.arg_names}
    variables = [place for place, name in enumerate(kernel.arg_names) if name not in sizes]
    divisible = {(place,): [["tt.divisibility", 16]] for place in variables}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]

def says_wide(ptx):
    return "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx

for capability in (86, 90):
    for element in ("*bf16", "*fp32"):
        alone = dict(pointers=None, slots=None, groups=None, block_size=1, ALIGNMENT=1)
        print(
            says_wide(assembly(capability, element, ALIGNMENT=16)),
            says_wide(assembly(capability, element, ALIGNMENT=2)),
            says_wide(assembly(capability, element, **alone)),
        )
"""


def test_the_kernel_compiles_for_sm_86_and_sm_90_and_moves_16_bytes_at_a_time_where_it_may(tmp_path):
    """Triton brings its assembler along, so no GPU is needed, but a process that does not interpret."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert compiled.returncode == 0, compiled.stderr
    assert compiled.stdout.splitlines() == ["True False True"] * 4
