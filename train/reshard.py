"""Takes over a state that another number of ranks wrote; where it is the same, `train.zero` loads it.

From stage 1 on DeepSpeed cuts the masters and the optimizer's moments into a piece for each rank, and loads a
piece only where it was cut.  Here each rank reads the pieces of all, puts its own together from them, and
hands that to DeepSpeed's own loader: bits move, none is computed, and nothing is written.  (DeepSpeed's
universal checkpoints write all of it twice, and leave out frozen weights.)
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants as keys

from recipes.errors import MachineError
from train.ranks import Ranks
from train.zero import load_state

Cut = list[dict[str, range]]
"""Of a rank, for each of its flat tensors: where in it the rank's part of each parameter lies."""
Flats = Sequence[torch.Tensor]
"""Of a rank: all that it has of one quantity, the parts of many parameters behind one another."""


def take_over_state(engine: deepspeed.DeepSpeedEngine, folder: Path, num_writers: int, ranks: Ranks) -> None:
    """`load_state`, of a state that `num_writers` ranks wrote under `folder`; all ranks call it.

    Raises MachineError where the files of some of them are missing.
    """
    stage = engine.zero_optimization_stage()
    if stage == 0:
        load_state(engine, folder)
    elif stage == 3:
        _take_over_stage_3(engine, folder, num_writers, ranks)
    else:
        _take_over_stages_1_and_2(engine, folder, num_writers, ranks)


def _take_over_stages_1_and_2(
    engine: deepspeed.DeepSpeedEngine, folder: Path, num_writers: int, ranks: Ranks
) -> None:
    pieces = _read_pieces(engine, folder, num_writers)
    # the weights are whole, in a file of the main rank's
    engine.load_checkpoint(
        str(folder.parent), tag=folder.name, load_optimizer_states=False, load_lr_scheduler_states=False
    )
    own = engine.optimizer.state_dict()
    names = _Names(keys.SINGLE_PARTITION_OF_FP32_GROUPS, keys.BASE_OPTIMIZER_STATE)
    was = [_ranges(piece[keys.PARAM_SLICE_MAPPINGS]) for piece in pieces]
    now = ranks.gather(_ranges(own[keys.PARAM_SLICE_MAPPINGS]))
    sizes = [flat.numel() for group in engine.optimizer.param_groups for flat in group["params"]]
    _load_recut(engine, own, pieces, names, Recutting(was, now, ranks.rank, sizes))


def _take_over_stage_3(
    engine: deepspeed.DeepSpeedEngine, folder: Path, num_writers: int, ranks: Ranks
) -> None:
    pieces = _read_pieces(engine, folder, num_writers)
    model_files = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(num_writers)]
    models = _read_files(folder, model_files)
    engine.optimizer.checkpoint_event_prologue()  # around loading, as DeepSpeed does
    _load_frozen(engine, [model[keys.FROZEN_PARAM_FRAGMENTS] for model in models])
    own = engine.optimizer.state_dict()
    names = _Names(keys.FP32_FLAT_GROUPS, keys.OPTIMIZER_STATE_DICT)
    was = cut_evenly(models[0][keys.PARAM_SHAPES], num_writers)
    now = cut_evenly(engine._get_zero_param_shapes(), ranks.world_size)
    sizes = [flat.numel() for flat in own[names.masters]]
    _load_recut(engine, own, pieces, names, Recutting(was, now, ranks.rank, sizes))
    engine.optimizer.checkpoint_event_epilogue()
    engine.global_steps, engine.skipped_steps = (
        models[0][name] for name in ("global_steps", "skipped_steps")
    )


def _load_frozen(engine: deepspeed.DeepSpeedEngine, fragments: Sequence[dict[str, torch.Tensor]]) -> None:
    """Weights that no optimizer has, of which each writer's file holds an equal part, the last one padded."""
    for name in fragments[0]:
        parameter = engine.module.get_parameter(name)
        whole = torch.cat([each[name].flatten() for each in fragments])[: parameter.ds_numel]
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole.view(parameter.ds_shape))


# What DeepSpeed wrote


@dataclass(frozen=True)
class _Names:
    """What a stage's files call them."""

    masters: str
    optimizer: str


def _read_pieces(engine: deepspeed.DeepSpeedEngine, folder: Path, num_writers: int) -> list[dict[str, Any]]:
    prefix = "bf16_" if engine.bfloat16_enabled() else ""
    names = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(num_writers)]
    return [file[keys.OPTIMIZER_STATE_DICT] for file in _read_files(folder, names)]


def _read_files(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Mapped: a tensor's bytes are read where they are used."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise MachineError(
            f"{folder} holds no {missing[0]}: {len(names)} ranks wrote this state, and with more or fewer now"
            " each machine needs the files of all: copy them there, or start as many ranks again"
        )
    return [torch.load(folder / name, map_location="cpu", mmap=True, weights_only=False) for name in names]


def _ranges(mappings: Sequence[dict[str, Any]]) -> Cut:
    return [
        {name: range(part.start, part.start + part.numel) for name, part in mapping.items()}
        for mapping in mappings
    ]


def cut_evenly(shapes: Sequence[dict[str, torch.Size]], num_ranks: int) -> list[Cut]:
    """Stage 3's: every parameter into equal parts, one for each rank, the last of them padded."""
    return [[_even_parts(group, rank, num_ranks) for group in shapes] for rank in range(num_ranks)]


def _even_parts(shapes: dict[str, torch.Size], rank: int, num_ranks: int) -> dict[str, range]:
    parts, start = {}, 0
    for name, shape in shapes.items():
        padded = math.ceil(shape.numel() / num_ranks)
        held = min(max(shape.numel() - rank * padded, 0), padded)
        parts[name] = range(start, start + held)
        start += padded
    return parts


# From their pieces to ours


@dataclass(frozen=True)
class Recutting:
    """How a rank comes by its own flat tensors; parameters may lie in others of them than before."""

    was: Sequence[Cut]
    """Of the ranks that wrote."""
    now: Sequence[Cut]
    """Of the ranks that there are."""
    rank: int
    sizes: Sequence[int]
    """Of the rank's flat tensors, padded."""

    def __call__(self, written: Sequence[Flats]) -> list[torch.Tensor]:
        """The rank's own flat tensors, of those of the ranks that wrote."""
        parts = [_parts(cut, flats) for cut, flats in zip(self.was, written, strict=True)]
        own = []
        for places, size in zip(self.now[self.rank], self.sizes, strict=True):
            flat = written[0][0].new_zeros(size)
            for name, place in places.items():
                whole = torch.cat([each[name] for each in parts if name in each])
                begin = self._before(name, self.rank)
                assert len(whole) == self._before(name, len(self.now)), f"{name} has another size"
                flat[place.start : place.stop] = whole[begin : begin + len(place)]
            own.append(flat)
        return own

    def _before(self, name: str, rank: int) -> int:
        """How much of a parameter the ranks before this one have."""
        return sum(len(places.get(name, ())) for cut in self.now[:rank] for places in cut)


def _parts(cut: Cut, flats: Flats) -> dict[str, torch.Tensor]:
    return {
        name: flat[place.start : place.stop]
        for places, flat in zip(cut, flats, strict=True)
        for name, place in places.items()
    }


def _load_recut(
    engine: deepspeed.DeepSpeedEngine,
    own: dict[str, Any],
    pieces: Sequence[dict[str, Any]],
    names: _Names,
    recut: Recutting,
) -> None:
    """Makes of `own`, an untouched engine's, what it would have saved; and has DeepSpeed load that."""
    own[names.masters] = recut([piece[names.masters] for piece in pieces])
    states = [piece[names.optimizer]["state"] for piece in pieces]
    own[names.optimizer]["state"] = _recut_moments(states, recut)
    engine.optimizer.load_state_dict([own] * len(recut.now), load_from_fp32_weights=True)


def _recut_moments(
    states: Sequence[dict[int, dict[str, Any]]], recut: Recutting
) -> dict[int, dict[str, Any]]:
    """torch's optimizer state, flat tensor -> name -> what; a step counts for all of a rank alike."""
    own: dict[int, dict[str, Any]] = {number: {} for number in range(len(recut.sizes))}
    for name, value in states[0][0].items():
        if torch.is_tensor(value) and value.dim():
            values = recut([[state[number][name] for number in sorted(state)] for state in states])
        else:
            values = [deepcopy(value) for _ in own]
        for number, each in enumerate(values):
            own[number][name] = each
    return own
