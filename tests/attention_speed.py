"""The trainer's attention at the flagship's sizes on a GPU: kernels, tiles and FlexAttention, timed.

    python tests/attention_speed.py [--sweep]

TFLOP/s count what is seen: 4 x head dim x query heads operations for each pair of a query row and a key, and
two and a half times as many for the backward pass.  FlexAttention (torch.nn.attention.flex_attention,
compiled) gets its block mask beforehand and is measured only.  --sweep times other tiles of each kernel
instead, in a layer that slides.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
import triton
from test_train_attention import FLAGSHIP, Case, Tensors, Way, draw, run, seeing
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from train import attention_launch
from train.attention_launch import Tile, Tiles
from train.blocks import Places, join_places, visible

ROWS, KEYS, WARPS, STAGES = (32, 64, 128), (64, 128), (4, 8), (1, 2, 3)
FIELDS = "forward", "queries", "keys"


def count_flops(case: Case) -> int:
    """Of the forward pass."""
    return 4 * case.head_dim * case.group * case.kv_heads * int(case.mask.sum())


def by_flex(case: Case) -> Way:
    blocks, keys = (
        Places(*(part.cuda() for part in vars(places).values()))
        for places in (case.blocks, join_places([case.context, case.blocks]))
    )

    def see(_batch, _head, query, key):
        return visible(case.kind, case.window, blocks[query], keys[key])

    mask = create_block_mask(see, None, None, len(blocks.position), len(keys.position), device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(query_QHd: torch.Tensor, context: Tensors, of_blocks: Tensors) -> torch.Tensor:
        pairs = zip(context, of_blocks, strict=True)
        parts = (query_QHd, *(torch.cat(pair) for pair in pairs))
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        return compiled(query, key, value, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


def time_forward(way: Way, inputs: Tensors) -> float:
    """ms"""
    query, *pairs, _ = inputs
    with torch.no_grad():
        return triton.testing.do_bench(lambda: way(query, tuple(pairs[:2]), tuple(pairs[2:])))


def time_both(way: Way, inputs: Tensors) -> float:
    return triton.testing.do_bench(lambda: run(way, inputs))


def compare(case: Case) -> None:
    inputs, flops = draw(case), count_flops(case)
    ways: dict[str, Callable[[], Way]] = {
        "kernels": lambda: seeing(case.layout()),
        "tiles": lambda: seeing(case.tiling()),
        "FlexAttention": lambda: by_flex(case),
    }
    for name, make in ways.items():
        way = make()
        forward, both = time_forward(way, inputs), time_both(way, inputs)
        rates = flops / forward / 1e9, 3.5 * flops / both / 1e9
        print(
            f"{case.kind:17}  {name:13}  {forward:8.3f}  {rates[0]:7.1f}  {both:8.3f}  {rates[1]:7.1f}",
            flush=True,
        )


def other_tiles() -> Iterator[Tile]:
    for rows in ROWS:
        for keys in KEYS:
            for warps in WARPS:
                yield from (Tile(rows, keys, warps, stages) for stages in STAGES)


@contextmanager
def tiled(field: str, tile: Tile) -> Iterator[None]:
    """With one kernel's tile, the others' as they are."""
    choose = attention_launch.choose_tiles

    def choose_other(*given: Any, **named: Any) -> Tiles:
        return replace(choose(*given, **named), **{field: tile})

    with patch.object(attention_launch, "choose_tiles", choose_other):
        yield


def compile_tile(field: str, tile: Tile) -> bool:
    """In a process of its own, into Triton's cache.  Whether it fits the GPU."""
    case = FLAGSHIP[0]
    with tiled(field, tile):
        try:
            run(seeing(case.layout()), draw(case))
        except triton.runtime.errors.OutOfResources:
            return False
    return True


def sweep(field: str) -> None:
    case, tiles = FLAGSHIP[0], list(other_tiles())
    inputs, way = draw(case), seeing(case.layout())
    time = time_forward if field == "forward" else time_both
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        fits = list(pool.map(compile_tile, [field] * len(tiles), tiles))
    found = []
    for tile in compress(tiles, fits):
        with tiled(field, tile):
            found.append((time(way, inputs), tile))
    for milliseconds, tile in sorted(found, key=lambda each: each[0])[:8]:
        print(f"{field:8}  {milliseconds:8.3f} ms  {tile}", flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: an interpreter says nothing about speed")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    if "--sweep" in sys.argv[1:]:
        for field in FIELDS:
            sweep(field)
        return
    print("layer              way            forward  TFLOP/s      both  TFLOP/s     (ms)")
    for case in FLAGSHIP:
        compare(case)


if __name__ == "__main__":
    main()
