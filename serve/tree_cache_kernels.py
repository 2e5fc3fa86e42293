"""What an accepted path moves once it is known, in Triton: keys and values in paged caches, and tap states.

`compact_layers_` and `tidy_stacked_` launch once for all layers, `tidy_states_` once for each tensor.  Grids
depend on shapes alone and sizes are read on the device, so a CUDA graph can hold the launches and later steps
replay them with other paths.  Nothing asks for more than sm_80.
"""
# ruff: noqa: PLR0913, PLR0917  (a kernel takes pointers and strides one by one)

# Y=layers  G=KV cache groups  B=requests  L=slots of a path  T=rows of the step  D=elements of a row
# N=blocks of a cache  H=key/value heads  P=slots of a block

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_PLACES, _ELEMENTS = 16, 256  # of a path and of a row, that a program holds at a time
_ALIGNMENT = 16  # bytes: the widest access


@dataclass(frozen=True)
class StackedCaches:
    """The same cache of many layers, as one kernel finds them all: by addresses, which must not move.

    A launch takes the host 20-50 us, too long for one a layer.
    """

    caches: tuple[torch.Tensor, ...]
    """Kept alive here.  All have one shape, strides, dtype and device; their memory may overlap."""
    pointers_Y: torch.Tensor
    """int64, on their device."""
    alignment: int
    """Bytes that divide every address, up to 16."""

    @property
    def like(self) -> torch.Tensor:
        """Any of them: its shape, strides and dtype are those of all."""
        return self.caches[0]


def stack_caches(caches: Sequence[torch.Tensor]) -> StackedCaches:
    """A table of views of any strides; built once, since it copies addresses to the device.

    ValueError: there is no cache, or one differs from the first.
    """
    if not caches:
        raise ValueError("no caches to stack, expected one a layer")
    expected = _describe(caches[0])
    for layer, cache in enumerate(caches):
        if _describe(cache) != expected:
            raise ValueError(f"the cache of layer {layer} is {_describe(cache)}; layer 0's is {expected}")
    pointers = [cache.data_ptr() for cache in caches]
    alignment = _ALIGNMENT
    while any(pointer % alignment for pointer in pointers):
        alignment //= 2
    return StackedCaches(
        tuple(caches), torch.tensor(pointers, dtype=torch.int64, device=caches[0].device), alignment
    )


def _describe(cache: torch.Tensor) -> str:
    return f"{cache.dtype} {tuple(cache.shape)} with strides {cache.stride()} on {cache.device}"


def compact_layers_(
    slots_GT: torch.Tensor,
    first_row_B: torch.Tensor,
    path_BL: torch.Tensor,
    num_accepted_B: torch.Tensor,
    group_of_layer_Y: torch.Tensor,
    caches: StackedCaches,
) -> None:
    """Moves keys and values of accepted paths to the slots that a chain's would have, in every layer.

    caches: [N, H, P, D], where slot block * P + offset has keys and values of all heads.  slots_GT: where
    this step's rows were written, by group (vLLM's slot_mappings); negative for rows that have none.
    first_row_B: the committed token's row.  path_BL, num_accepted_B: as `serve.tree_batch.WalkBatch`;
    0 accepted for padding, of which nothing else is read.  Indices are integers of any width.
    """
    num_layers = len(caches.caches)
    assert group_of_layer_Y.shape == (num_layers,), f"groups {group_of_layer_Y.shape}, {num_layers} layers"
    assert slots_GT.stride(1) == 1, f"slots of rows lie {slots_GT.stride(1)} apart, expected 1"
    _launch(caches.like, caches, first_row_B, path_BL, num_accepted_B, slots_GT, group_of_layer_Y)


def tidy_states_(
    states: Sequence[torch.Tensor],
    first_row_B: torch.Tensor,
    path_BL: torch.Tensor,
    num_accepted_B: torch.Tensor,
) -> None:
    """`serve.tree_slots.tidy_rows` for tensors [T, D], one launch each; arguments as `compact_layers_`."""
    for states_TD in states:
        _launch(_as_cache(states_TD), None, first_row_B, path_BL, num_accepted_B)


def tidy_stacked_(
    states: StackedCaches,
    first_row_B: torch.Tensor,
    path_BL: torch.Tensor,
    num_accepted_B: torch.Tensor,
) -> None:
    """`tidy_states_` in one launch, for tensors that stay where they are from step to step."""
    _launch(_as_cache(states.like), states, first_row_B, path_BL, num_accepted_B)


def _as_cache(states_TD: torch.Tensor) -> torch.Tensor:
    """A block a row, of one head and one slot."""
    assert states_TD.dim() == 2, f"states are {tuple(states_TD.shape)}, expected [T, D]"
    return states_TD[:, None, None]


def _launch(
    like_NHPD: torch.Tensor,
    caches: StackedCaches | None,
    first_row_B: torch.Tensor,
    path_BL: torch.Tensor,
    num_accepted_B: torch.Tensor,
    slots_GT: torch.Tensor | None = None,
    group_of_layer_Y: torch.Tensor | None = None,
) -> None:
    """Without `caches` moves within `like_NHPD` itself; without slots a row has its own number."""
    batch, num_places = path_BL.shape
    _, heads, block_size, row_size = like_NHPD.shape
    tile = min(_ELEMENTS, triton.next_power_of_2(row_size))
    num_layers = 1 if caches is None else len(caches.caches)
    _move_kernel[heads * triton.cdiv(row_size, tile), batch, num_layers](
        like_NHPD,
        None if caches is None else caches.pointers_Y,
        slots_GT,
        group_of_layer_Y,
        first_row_B,
        path_BL,
        num_accepted_B,
        block_size,
        0 if slots_GT is None else slots_GT.stride(0),
        *path_BL.stride(),
        *like_NHPD.stride(),
        ROW_SIZE=row_size,
        ALIGNMENT=1 if caches is None else caches.alignment,
        TILE_PLACES=min(_PLACES, triton.next_power_of_2(num_places)),
        TILE_ROW=tile,
    )


@triton.jit
def _move_kernel(
    like: tl.tensor,
    pointers: tl.tensor | None,
    slots: tl.tensor | None,
    groups: tl.tensor | None,
    first_rows: tl.tensor,
    path: tl.tensor,
    accepted_counts: tl.tensor,
    block_size: int,
    slots_group_stride: int,
    path_request_stride: int,
    path_place_stride: int,
    cache_block_stride: int,
    cache_head_stride: int,
    cache_slot_stride: int,
    cache_element_stride: int,
    ROW_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_PLACES: tl.constexpr,
    TILE_ROW: tl.constexpr,
) -> None:
    """One program a layer, request, head and TILE_ROW elements of every row.

    No other program touches its elements, for requests have no slot in common.  It takes TILE_PLACES places
    of the path at a time, ascending, and reads all of them before it writes one.  Nothing that is read later
    has been overwritten: parents come before children, so nodes ascend along a path and node >= place; hence
    a later source, row first + 1 + node, lies after every earlier target, row first + 1 + place.
    """
    request, layer = tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_accepted = tl.load(accepted_counts + request).to(tl.int32)
    if num_accepted <= 0:
        return
    PARTS: tl.constexpr = (ROW_SIZE + TILE_ROW - 1) // TILE_ROW
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    element = part * TILE_ROW + tl.arange(0, TILE_ROW)
    is_element = (element < ROW_SIZE)[None, :]
    cache = like
    if pointers is not None:
        cache = tl.multiple_of(tl.load(pointers + layer).to(like.dtype), ALIGNMENT)
    cache += head.to(tl.int64) * cache_head_stride + element[None, :] * cache_element_stride
    first = tl.load(first_rows + request).to(tl.int64) + 1
    path += request * path_request_stride
    if slots is not None:
        slots += tl.load(groups + layer).to(tl.int64) * slots_group_stride

    for start in tl.range(0, num_accepted, TILE_PLACES, num_stages=1):
        place = start + tl.arange(0, TILE_PLACES)
        on_path = place < num_accepted
        node = tl.load(path + place * path_place_stride, mask=on_path, other=-1).to(tl.int64)
        is_moved = on_path & (node != place)
        source, target = first + node, first + place
        if slots is not None:
            source = tl.load(slots + source, mask=is_moved, other=-1).to(tl.int64)
            target = tl.load(slots + target, mask=is_moved, other=-1).to(tl.int64)
            is_moved = is_moved & (source >= 0) & (target >= 0)
        source = source // block_size * cache_block_stride + source % block_size * cache_slot_stride
        target = target // block_size * cache_block_stride + target % block_size * cache_slot_stride
        inside = is_moved[:, None] & is_element
        taken = tl.load(cache + source[:, None], mask=inside)
        tl.debug_barrier()  # between the reads of all threads and their writes
        tl.store(cache + target[:, None], taken, mask=inside)
