"""What would make a phase fit: changes of the recipe, each tried, so that what is proposed does fit.

A change counts if the phase fits with it and no phase that fitted before has stopped to.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from recipes.job import Job, Phase, count_engine_gpus
from recipes.needs import count_misfits, plan_phases
from recipes.schema import Recipe, Train

Changes = Mapping[str, Any]
"""Dotted path -> value."""
MOST_PROPOSALS = 4
MOST_UTILIZATION = 0.95
"""Of a GPU's memory: what is proposed at most."""


@dataclass(frozen=True)
class Limit:
    """A number to lower: the largest of `values` that fits is proposed."""

    path: str
    values: Sequence[float]
    """Ascending."""


def propose(job: Job, phase: Phase) -> list[str]:
    """Changes that make `phase` fit, as one would write them; what hardware would do comes last."""
    before = _lacking(job)
    misfits = len(list(count_misfits(job.recipe)))

    def fits(changes: Changes) -> bool:
        changed = _change(job, changes)
        if changed is None or len(list(count_misfits(changed.recipe))) > misfits:
            return False
        return _lacking(changed) <= before - {phase.name}

    proposals = list(_try_all(job, phase, fits))[:MOST_PROPOSALS]
    if phase.field.startswith("hardware."):
        proposals.append(f"{phase.field} >= {_ceil(phase.need_gib / phase.share, 0.1)}")
    return proposals


def _lacking(job: Job) -> set[str]:
    """Names of phases.  A change may decide which phases there are, too."""
    return {each.name for each in plan_phases(job) if not each.fits}


def _try_all(job: Job, phase: Phase, fits: Callable[[Changes], bool]) -> Iterator[str]:
    """A switch, a number, or all switches and a number where none of these does alone."""
    switches, limits = _switches(job, phase.name), _limits(job, phase.name)
    switch = next(filter(fits, switches), None)
    numbers = [*_try_limits(limits, fits), *_try_raising(phase, fits)]
    if switch:
        yield _written(switch)
    yield from numbers
    if not switch and not numbers and switches:
        most = switches[-1]
        for number in _try_limits(limits, lambda changes: fits({**most, **changes})):
            yield f"{_written(most)} {number}"


def _try_limits(limits: Sequence[Limit], fits: Callable[[Changes], bool]) -> Iterator[str]:
    for limit in limits:
        value = _largest(limit, fits)
        if value is not None:
            yield f"{limit.path} <= {value}"


def _try_raising(phase: Phase, fits: Callable[[Changes], bool]) -> Iterator[str]:
    """The recipe's own bound, where it is one that is too low."""
    path, value = phase.field, _ceil(phase.need_gib, 0.25)
    if path.startswith("hardware."):
        path, value = "serve.gpu_memory_utilization", _ceil(phase.need_gib / (phase.there_is_gib or 1), 0.01)
        if phase.share == 1.0 or value > MOST_UTILIZATION:
            return
    if fits({path: value}):
        yield f"{path} >= {value}"


def _switches(job: Job, name: str) -> list[Changes]:
    """From the least to the most that is given up; without what the recipe has already."""
    changes = [
        {path: value for path, value in switch.items() if _value(job.recipe, path) != value}
        for switch in _all_switches(job).get(name, [])
    ]
    return [switch for switch in changes if switch]


def _all_switches(job: Job) -> dict[str, list[Changes]]:
    """By the phase's name."""
    rolling, onto_host, onto_gpus = _rolling(job), _onto_host(job.recipe.train), _onto_gpus()
    stop: Changes = {"rounds.handover": "stop"} if job.engines_sleep else {}
    unchecked: Changes = {"data.check_sequences": 0}
    in_turns: Changes = {"rounds.ahead": False, "rounds.engine_gpus": None}
    ended = {**in_turns, "rounds.handover": "stop"}
    return {
        "disk": rolling,
        "shards at any time": rolling,
        "regenerate: host memory": [unchecked],
        "serve: memory of each GPU": [{"serve.tensor_parallel_size": count_engine_gpus(job.recipe)}],
        "train: memory of each GPU": [stop, *onto_host, {**onto_host[-1], **stop}],
        "train: host memory": [stop, *onto_gpus, *({**switch, **stop} for switch in onto_gpus)],
        "regenerate and train: host memory": [
            unchecked,
            *onto_gpus,
            in_turns,
            ended,
            {**unchecked, **onto_gpus[-1]},
        ],
    }


def _onto_host(train: Train) -> list[Changes]:
    """What takes less of a GPU's memory."""
    checkpointing, offload = {"train.activation_checkpointing": True}, {"train.offload_optimizer": True}
    split = {"train.zero_stage": 2} if train.zero_stage < 2 else {}
    everything = {"train.zero_stage": 3, **offload, **checkpointing}
    return [split, checkpointing, {**split, **offload}, {**split, **offload, **checkpointing}, everything]


def _onto_gpus() -> list[Changes]:
    on_device: Changes = {"train.offload_optimizer": False}
    return [on_device, {**on_device, "train.activation_checkpointing": True}]


def _rolling(job: Job) -> list[Changes]:
    """More rounds have engines sleep between them, which may take too much; then they are ended."""
    rolling: list[Changes] = [
        {"data.policy": "rolling", "rounds.count": count} for count in (2, 4, 8, 16, 32, 64, 128)
    ]
    may_sleep = job.on_gpus and not job.recipe.rounds.ahead
    return [*rolling, *({**switch, "rounds.handover": "stop"} for switch in rolling if may_sleep)]


def _limits(job: Job, name: str) -> list[Limit]:
    data, train, serve = job.recipe.data, job.recipe.train, job.recipe.serve
    share = job.train_ranks * train.micro_batch_sequences
    prompts = [Limit("data.num_prompts", range(1, data.num_prompts))]
    shards = [*prompts, Limit("data.shard_tokens", range(1000, data.shard_tokens, 1000))]
    checkpoints = [Limit("train.keep_checkpoints", range(1, train.keep_checkpoints))]
    requests = [Limit("serve.max_num_seqs", range(1, serve.max_num_seqs))]
    steps = [Limit("serve.max_num_batched_tokens", range(256, serve.max_num_batched_tokens, 256))]
    lengths = [Limit("serve.max_model_len", range(job.longest, serve.max_model_len, 256))]
    caches = [Limit("serve.kv_cache_gib", _quarters(serve.kv_cache_gib))] if serve.kv_cache_gib else []
    engines = [Limit("data.engines", range(1, data.engines))]
    batches: list[Limit] = [
        Limit("train.micro_batch_sequences", _divisors(train.micro_batch_sequences)),
        Limit("train.num_anchors", range(8, train.num_anchors, 8)),
    ]
    sequences = [Limit("train.sequences_per_step", range(share, train.sequences_per_step, share))]
    by_name: dict[str, list[Limit]] = {
        "disk": [*shards, *checkpoints],
        "shards at any time": shards,
        "serve: cache of an engine": lengths,
        "regenerate: host memory": [*engines, *requests, *steps, *caches],
        "measure: host memory": [*requests, *steps, *caches],
        "serve: memory of each GPU": [*engines, *caches, *requests, *steps, *lengths],
        "train: memory of each GPU": batches,
        "train: host memory": [*sequences, *batches],
        "regenerate and train: host memory": [*engines, *requests, *steps, *caches, *sequences, *batches],
    }
    return by_name.get(name, [])


def _quarters(most: float) -> list[float]:
    return [quarter / 4 for quarter in range(1, math.ceil(4 * most))]


def _divisors(number: int) -> list[int]:
    return [least for least in range(1, number) if number % least == 0]


def _ceil(value: float, step: float) -> float:
    return round(math.ceil(value / step) * step, 2)


def _largest(limit: Limit, fits: Callable[[Changes], bool]) -> float | None:
    """By halving: what fits at a value fits below it."""
    if not limit.values or not fits({limit.path: limit.values[0]}):
        return None
    misses = bisect_left(limit.values, True, key=lambda value: not fits({limit.path: value}))
    return limit.values[misses - 1]


def _value(recipe: Recipe, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(recipe, section), name)


def _change(job: Job, changes: Changes) -> Job | None:
    """None for a recipe that the schema refuses."""
    tree = job.recipe.model_dump()
    for path, value in changes.items():
        section, name = path.split(".")
        tree[section][name] = value
    try:
        return replace(job, recipe=Recipe.model_validate(tree))
    except ValidationError:
        return None


def _written(changes: Changes) -> str:
    return " ".join(
        f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in changes.items()
    )
