"""Makes the missing shards of a plan: engines answer its groups; the manifest names a shard once it is whole.

The engines are processes of their own (`data.engines`); here their shards are collected, counted and shown,
and a round's are reported.
"""

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from data.answer_bar import answer_bar
from data.engines import Advanced, Engine, Work, running_engines, share_out
from data.rounds import read_round, share_shards, write_round
from data.shard_maker import Made
from data.shard_plan import ShardPlan, count_without
from data.shards import shard_name
from recipes.errors import UserError
from recipes.manifest import Captured, RoundManifest


@dataclass
class Tally:
    """What one run of the data phase did."""

    emitted_tokens: int = 0
    request_steps: int = 0
    """Over the answers: steps in which one grew."""
    engine_steps: int = 0
    read_tokens: int = 0
    """Of given texts."""
    engine_seconds: float = 0.0
    """Of generating, all engines together; their start and the checks left out."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    least_cosines: dict[int, float] = field(default_factory=dict)
    """By tapped layer, over the engines, each of which was checked."""

    def occupancy(self, most_at_once: int) -> float | None:
        """Answers that grew in a step / the most that can, over all steps; None where there was none."""
        return self.request_steps / (self.engine_steps * most_at_once) if self.engine_steps else None

    def add(self, made: Made) -> None:
        self.emitted_tokens += made.emitted_tokens
        self.request_steps += made.request_steps
        self.engine_steps += made.engine_steps
        self.read_tokens += made.read_tokens
        self.engine_seconds += made.seconds
        self.finish_reasons.update(made.finish_reasons)
        for layer, cosine in made.least_cosines.items():
            self.least_cosines[layer] = min(cosine, self.least_cosines.get(layer, 1.0))


def fill_shards(plan: ShardPlan) -> Tally:
    """All of them.  Raises MachineError if an engine's taps are not transformers', and writes none then.

    UserError for a recipe that wants no more than a round's shards on the disk.
    Reports the round where it is the only one; of several, data/host.py says when each is done.
    """
    if plan.recipe.data.policy == "rolling" and plan.recipe.rounds.count > 1:
        raise UserError("data.policy rolling keeps one round's shards at a time: run train/distill.py")
    tally, missing = Tally(), plan.find_missing()
    if missing:
        try:
            with running_engines(plan.recipe, plan.folder, plan.spool, most=len(missing)) as engines:
                make_shards(plan, engines, missing, tally)
        finally:
            shutil.rmtree(plan.spool, ignore_errors=True)  # on a full disk it is in the way
    output_dir = plan.recipe.output_dir
    if plan.recipe.rounds.count == 1 and (missing or read_round(output_dir, 0) is None):
        write_round(output_dir, report_round(plan, 0, tally, num_made=len(missing)))
    plan.finish()  # at last: from then on nobody asks for the report
    return tally


def make_shards(
    plan: ShardPlan, engines: Sequence[Engine], numbers: Sequence[int], tally: Tally, of_round: int = 0
) -> None:
    """Has the engines make these shards, as those of a round; shows how far they are."""
    work = [Work(number, plan.groups[number]) for number in numbers]
    with answer_bar(sum(prompt.num_turns for each in work for prompt in each.prompts)) as bar:
        for event in share_out(engines, work):
            if isinstance(event, Made):
                entry = event.entry.model_copy(update={"round": of_round})
                plan.writer.add(entry)
                tally.add(event)
                bar.tell(f"{entry.file}: {entry.sequences} sequences, {entry.tokens} tokens")
            elif isinstance(event, Advanced):
                bar.advance(event.new_tokens, event.finished_answers)


def report_round(plan: ShardPlan, number: int, tally: Tally, num_made: int) -> RoundManifest:
    """Of a round whose shards are there, `num_made` of them by this run; says nothing of a drafter."""
    return RoundManifest(
        round=number,
        checkpoint=None,
        pulses=[],
        emitted_tokens=tally.emitted_tokens,
        request_steps=tally.request_steps,
        occupancy=tally.occupancy(plan.recipe.serve.max_num_seqs),
        engine_seconds=tally.engine_seconds,
        num_engines=min(plan.recipe.data.engines, num_made),
        captured=count_captured(plan, number, tally),
    )


def count_captured(plan: ShardPlan, number: int, tally: Tally) -> Captured:
    """What a round's shards hold."""
    share = share_shards(len(plan.groups), plan.recipe.rounds)[number]
    names = {shard_name(shard) for shard in share}
    entries = [entry for entry in plan.writer.manifest.shards if entry.file in names]
    paths = [plan.folder / entry.file for entry in entries if not entry.is_consumed]
    planned = sum(len(plan.groups[shard]) for shard in share)
    too_long = plan.num_prompts - sum(map(len, plan.groups)) - sum(plan.left_out.values())
    return Captured(
        sequences=sum(entry.sequences for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        shard_bytes=sum(path.stat().st_size for path in paths),
        dropped={
            "prompt_too_long": too_long if number == 0 else 0,
            **count_without(planned, entries),
            **(plan.left_out if number == 0 else {}),
        },
        least_cosine=min(tally.least_cosines.values(), default=None),
    )
