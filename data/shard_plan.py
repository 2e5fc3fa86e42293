"""What a data phase has to do: its shards, which are there already, and whether those belong to it."""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.groups import Begun, Rendered, begin, group_by_shard
from data.mixture import load_conversations
from data.render import ChatTemplate, load_chat_template
from data.rounds import share_shards
from data.shards import MANIFEST_NAME, SPOOL_NAME, ShardWriter, check_file, shard_name
from data.skips import Skips, count_skips, describe_skips
from recipes.errors import UserError
from recipes.footprint import SEQUENCE_BYTES
from recipes.job import captured_bytes
from recipes.manifest import ShardEntry, ShardManifest, identify_target, provenance, read_manifest
from recipes.schema import Data, Recipe, Rounds, Source, Target
from recipes.target_config import find_config, read_target_config

_WITHOUT_EFFECT = (
    "check_sequences",
    "check_again",
    "check_cosine",
    "engines",
    "disk_gib",
    "policy",
)  # data.* that change no shard


@dataclass(frozen=True)
class ShardPlan:
    """A recipe's shards, each a group of prompts."""

    recipe: Recipe
    folder: Path
    num_prompts: int
    """Found, of the data.num_prompts asked for."""
    groups: list[list[Rendered]]
    missing: list[int]
    """When it was made."""
    writer: ShardWriter
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Reason -> conversations in which there is no turn to answer."""
    skips: Sequence[Skips] = ()
    """What the sources of its prompts left out, these conversations among them."""

    @property
    def spool(self) -> Path:
        """Where captured states pass through, a folder for each engine."""
        return self.folder / SPOOL_NAME

    def find_missing(self) -> list[int]:
        """Numbers of the shards that are still to be made."""
        return _find_missing(self.groups, self.writer)

    def finish(self) -> None:
        """Says that every shard is there."""
        if not self.writer.manifest.complete:
            self.writer.finish(self.count_dropped())

    def count_dropped(self) -> dict[str, int]:
        """Once every shard is there: reason -> prompts without a sequence, and rows that are no prompts."""
        planned = sum(map(len, self.groups))
        return {
            "prompt_too_long": self.num_prompts - planned - sum(self.left_out.values()),
            **count_without(planned, self.writer.manifest.shards),
            **count_skips(self.skips),
        }


def count_without(planned: int, shards: Sequence[ShardEntry]) -> dict[str, int]:
    """Reason -> conversations without a sequence, of those that these shards were made of."""
    with_one = sum(entry.sequences - entry.further for entry in shards)
    incomplete = sum(entry.incomplete for entry in shards)
    dropped: Counter[str] = Counter()
    for entry in shards:
        dropped.update(entry.dropped)
    empty = planned - with_one - incomplete - dropped.total()
    return {"empty_answer": empty, "incomplete": incomplete, **dropped}


def make_plan(recipe: Recipe) -> ShardPlan:
    """Reads the prompts and the folder.  Raises UserError if the folder's shards are of another making."""
    folder = recipe.output_dir / "shards"
    writer = ShardWriter(folder, _read_or_begin(recipe, folder))
    template = load_chat_template(recipe.target)
    _check_thinking(recipe, template)
    loaded = load_conversations(recipe.data)
    begun = begin(loaded.conversations, template, recipe.data, find_end_ids(recipe.target))
    tell_refused(begun, loaded.skips)
    groups = group_by_shard(_find_short(begun, recipe.data, describe_skips(loaded.skips)), recipe.data)
    check_room(recipe, groups, writer.manifest.hidden_size)
    missing = _find_missing(groups, writer)
    found = len(loaded.conversations)
    plan = ShardPlan(recipe, folder, found, groups, missing, writer, begun.left_out, loaded.skips)
    shutil.rmtree(plan.spool, ignore_errors=True)  # of an interrupted run
    return plan


def _check_thinking(recipe: Recipe, template: ChatTemplate) -> None:
    given = [] if isinstance(recipe.data.prompts, str) else recipe.data.prompts
    of_sources = {f"data.prompts[{number}].thinking": each.thinking for number, each in enumerate(given)}
    for name, modes in {"data.thinking": recipe.data.thinking, **of_sources}.items():
        asked = [mode for mode in modes or () if mode != "template"]
        if asked and not template.source().has_thinking_switch:
            raise UserError(
                f"{name} {' and '.join(asked)}: the chat template of {recipe.target.model} has no"
                " enable_thinking; write template"
            )


def find_end_ids(target: Target) -> frozenset[int]:
    """The tokens that end a turn."""
    return read_target_config(find_config(target.model, target.revision)).end_ids


def tell_refused(begun: Begun, skips: Sequence[Skips]) -> None:
    """To the skips of their sources."""
    of_sources = {each.source: each for each in skips}
    for conversation, why in begun.refused:
        of_sources[conversation.source].add(conversation.place, why)


def _find_short(begun: Begun, data: Data, described: str) -> list[Rendered]:
    """Raises UserError where there is none; `described` are those that were left out."""
    if not begun.prompts:
        raise UserError(f"data.prompts {data.named_prompts}: no conversation can be answered\n{described}")
    short = [prompt for prompt in begun.prompts if prompt.fits(data)]
    if not short:
        raise UserError(
            f"data.max_prompt_tokens {data.max_prompt_tokens}: every one of the {len(begun.prompts)} prompts"
            f" of {data.named_prompts} is longer; write a larger one"
        )
    return short


def check_room(recipe: Recipe, groups: Sequence[Sequence[Rendered]], hidden_size: int) -> None:
    """Raises UserError where the shards might outgrow data.disk_gib at some time; before one is written."""
    data = recipe.data
    if data.disk_gib is None:
        return
    of_token = captured_bytes(recipe, hidden_size) + SEQUENCE_BYTES
    of_groups = [_count_tokens(group, data) * of_token for group in groups]
    needed = sum(of_groups)
    if data.policy == "rolling":
        shares = share_shards(len(groups), recipe.rounds)
        of_rounds = [sum(of_groups[number] for number in share) for share in shares]
        at_once = 2 if recipe.rounds.ahead else 1  # one is made while the one before it is trained on
        needed = max(sum(of_rounds[first : first + at_once]) for first in range(len(of_rounds)))
    room = data.disk_gib * 2**30
    if needed > room:
        fewer = int(sum(map(len, groups)) * room / needed)
        raise UserError(
            f"data.disk_gib {data.disk_gib:g}: the shards may take {needed / 2**30:.3g} GiB at a time; raise"
            f" it, lower data.num_prompts to {fewer}, or write data.policy=rolling and a larger rounds.count"
        )


def _count_tokens(group: Sequence[Rendered], data: Data) -> int:
    """At most."""
    return sum(prompt.most_tokens(data) for prompt in group)


def _find_missing(groups: list[list[Rendered]], writer: ShardWriter) -> list[int]:
    written = {entry.file for entry in writer.manifest.shards}
    return [number for number in range(len(groups)) if shard_name(number) not in written]


def _read_or_begin(recipe: Recipe, folder: Path) -> ShardManifest:
    begun = _begin(recipe)
    path = folder / MANIFEST_NAME
    if not path.exists():
        return begun
    found = read_manifest(path, ShardManifest)
    _refuse_other(path, found, begun)
    there = [entry for entry in found.shards if entry.is_consumed or (folder / entry.file).exists()]
    for entry in there:
        if not entry.is_consumed:
            check_file(folder, entry)
    is_whole = len(there) == len(found.shards)
    return found if is_whole else found.model_copy(update={"shards": there, "complete": False})


def _begin(recipe: Recipe) -> ShardManifest:
    target = identify_target(recipe.target)
    return ShardManifest(
        target=target,
        recipe=recipe.model_dump(mode="json"),
        provenance=provenance(),
        target_layer_ids=recipe.drafter.target_layer_ids,
        hidden_size=target.hidden_size,
        dtype=recipe.target.dtype,
        final_states=recipe.data.final_states,
        shards=[],
        dropped={},
        complete=False,
    )


def _refuse_other(path: Path, found: ShardManifest, wanted: ShardManifest) -> None:
    """Shards of another target, other taps or other prompts are never added to."""
    pairs = {
        "target": (_describe_target(found), _describe_target(wanted)),
        "drafter.target_layer_ids": (found.target_layer_ids, wanted.target_layer_ids),
    }
    for name in ("count", "first_share"):  # which shard is of which round
        earlier = found.recipe.get("rounds", Rounds().model_dump())
        pairs[f"rounds.{name}"] = (earlier[name], wanted.recipe["rounds"][name])
    defaults = Data(prompts="", num_prompts=1).model_dump(mode="json")  # of shards older than a setting
    earlier_data = found.recipe["data"] | {"prompts": _complete_sources(found.recipe["data"]["prompts"])}
    for name, value in wanted.recipe["data"].items():
        if name not in _WITHOUT_EFFECT:
            pairs[f"data.{name}"] = (earlier_data.get(name, defaults[name]), value)
    differences = [
        f"{name}: found {old}, the recipe says {new}" for name, (old, new) in pairs.items() if old != new
    ]
    if differences:
        remedy = f"remove {path.parent}, or name another output_dir"
        raise UserError("\n  ".join([f"{path}: these shards are of another making; {remedy}", *differences]))


def _complete_sources(prompts: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """With the defaults of settings that are newer than these."""
    defaults = Source(builtin="").model_dump(mode="json")
    return prompts if isinstance(prompts, str) else [defaults | source for source in prompts]


def _describe_target(manifest: ShardManifest) -> str:
    target = manifest.target
    return f"{target.fingerprint[:16]} in {target.dtype}"
