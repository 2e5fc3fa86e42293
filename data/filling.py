"""Makes the missing shards of a plan: engines answer its groups; the manifest names a shard once it is whole.

The engines are processes of their own (`data.engines`); here their shards are collected, counted and shown.
"""

import shutil
from collections import Counter
from dataclasses import dataclass, field

from data.answer_bar import answer_bar
from data.engines import Work, running_engines, share_out
from data.shard_maker import Made
from data.shard_plan import ShardPlan


@dataclass
class Tally:
    """What one run of the data phase did."""

    emitted_tokens: int = 0
    engine_seconds: float = 0.0
    """Of generating, all engines together; their start and the checks left out."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    least_cosines: dict[int, float] = field(default_factory=dict)
    """By tapped layer, over the engines, each of which was checked."""

    def add(self, made: Made) -> None:
        self.emitted_tokens += made.emitted_tokens
        self.engine_seconds += made.seconds
        self.finish_reasons.update(made.finish_reasons)
        for layer, cosine in made.least_cosines.items():
            self.least_cosines[layer] = min(cosine, self.least_cosines.get(layer, 1.0))


def fill_shards(plan: ShardPlan) -> Tally:
    """Raises MachineError if an engine's taps are not the transformers model's; it writes no shard then."""
    tally = Tally()
    if plan.missing:
        _generate(plan, tally)
    if not plan.writer.manifest.complete:
        plan.writer.finish(plan.count_dropped())
    return tally


def _generate(plan: ShardPlan, tally: Tally) -> None:
    work = [Work(number, plan.groups[number]) for number in plan.missing]
    with (
        answer_bar(sum(len(each.prompts) for each in work)) as bar,
        running_engines(plan.recipe, plan.folder, plan.spool, most=len(work)) as engines,
    ):
        for event in share_out(engines, work):
            if isinstance(event, Made):
                plan.writer.add(event.entry)
                tally.add(event)
                entry = event.entry
                bar.tell(f"{entry.file}: {entry.sequences} sequences, {entry.tokens} tokens")
            else:
                bar.advance(event.new_tokens, event.finished_answers)
    shutil.rmtree(plan.spool)
