"""What the data phase left behind, as a table for people."""

from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from data.filling import Tally
from data.shard_plan import ShardPlan
from data.shards import supervised_share
from data.skips import describe_skips
from recipes.manifest import ShardManifest


def show_outcome(plan: ShardPlan, tally: Tally) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _rows(plan, tally).items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"shards {plan.folder}")


def show_skips(plan: ShardPlan) -> None:
    """What the sources of prompts left out; nothing where there is nothing to tell."""
    if told := describe_skips(plan.skips):
        Console(soft_wrap=True, highlight=False, markup=False).print(told)


def _rows(plan: ShardPlan, tally: Tally) -> dict[str, str]:
    manifest, asked = plan.writer.manifest, plan.recipe.data.num_prompts
    rows = {"prompts": f"{plan.num_prompts}"}
    if plan.num_prompts < asked:
        rows["prompts"] += f" (the recipe asks for {asked}; {plan.recipe.data.named_prompts} has no more)"
    rows |= {
        "sequences": f"{sum(entry.sequences for entry in manifest.shards)} in {len(manifest.shards)} shards",
        "tokens": f"{sum(entry.tokens for entry in manifest.shards)}",
        "supervised": f"{supervised_share(manifest):.1%}",
        "dropped": describe_counts(manifest.dropped),
    }
    if cut := count_cut(manifest):
        rows["ended early"] = describe_counts(cut)
    if not plan.missing:
        return rows | {"this run": "nothing to do, every shard is there"}
    if tally.read_tokens:
        rows["read, this run"] = f"{tally.read_tokens} tokens of given texts"
    if tally.emitted_tokens:
        rows["ends, this run"] = describe_counts(tally.finish_reasons)
        engines = min(plan.recipe.data.engines, len(plan.missing))
        rows["tokens/s, this run"] = f"{tally.emitted_tokens / tally.engine_seconds * engines:.0f}"
    occupancy = tally.occupancy(at_once := plan.recipe.serve.max_num_seqs)
    if occupancy is not None:
        rows["batch, this run"] = f"{occupancy:.0%} of serve.max_num_seqs {at_once}"
    if tally.least_cosines:
        rows["least cosine by tap"] = "  ".join(
            f"{layer}: {cosine:.5f}" for layer, cosine in tally.least_cosines.items()
        )
    return rows


def count_cut(manifest: ShardManifest) -> Counter[str]:
    """Reason -> conversations that end before their last turn."""
    return sum((Counter(entry.cut) for entry in manifest.shards), Counter[str]())


def describe_counts(counts: Mapping[str, int]) -> str:
    """In one line, without what did not happen."""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"
