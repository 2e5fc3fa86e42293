"""What the data phase left behind, as a table for people."""

from rich.console import Console
from rich.table import Table

from data.filling import Tally
from data.shard_plan import ShardPlan
from data.shards import supervised_share


def show_outcome(plan: ShardPlan, tally: Tally) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _rows(plan, tally).items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"shards {plan.folder}")


def _rows(plan: ShardPlan, tally: Tally) -> dict[str, str]:
    manifest, asked = plan.writer.manifest, plan.recipe.data.num_prompts
    rows = {"prompts": f"{plan.num_prompts}"}
    if plan.num_prompts < asked:
        rows["prompts"] += f" (the recipe asks for {asked}; {plan.recipe.data.prompts} has no more)"
    rows |= {
        "sequences": f"{sum(entry.sequences for entry in manifest.shards)} in {len(manifest.shards)} shards",
        "tokens": f"{sum(entry.tokens for entry in manifest.shards)}",
        "supervised": f"{supervised_share(manifest):.1%}",
        "dropped": _counts(manifest.dropped),
    }
    if not plan.missing:
        return rows | {"this run": "nothing to do, every shard is there"}
    rows["ends, this run"] = _counts(tally.finish_reasons)
    engines = min(plan.recipe.data.engines, len(plan.missing))
    rows["tokens/s, this run"] = f"{tally.emitted_tokens / tally.engine_seconds * engines:.0f}"
    if tally.least_cosines:
        rows["least cosine by tap"] = "  ".join(
            f"{layer}: {cosine:.5f}" for layer, cosine in tally.least_cosines.items()
        )
    return rows


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"
