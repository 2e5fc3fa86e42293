"""What trains a pairwise head best: ways of training one on equally many blocks, judged on text it never saw.

    python tests/compare_head_training.py RECIPE --text 0=RUN --text 0.7=RUN ... --held-out 0=RUN ...
        --way cross_entropy@0 --way kl@0.7,target_temperature=0.7 ... [--seeds 2] [section.field=value ...]

RECIPE's `pairwise` names the drafter, which stays as it is, and how a head learns; a RUN is the output_dir of
data/regenerate.py with data.final_states=true, on prompts to learn from (stdlib:train) or others
(stdlib:heldout), at the temperature before it.  A way is LOSS@TEXT[,field=value ...], and `none` is no head:
of several texts (0+0.7+1) each prompt is of one; fields are those of `pairwise`, and tau scales scores as
trees grow.  A step takes pairwise.sequences_per_step x num_anchors blocks.  Gains are over the first way,
with standard errors over prompts.  No engine; a minute or two of a core for each way and seed, once the
drafter has read everything (minutes a text; --cache FOLDER keeps that).
"""

# A=blocks  L=drafted slots  K=slots of a block  C=candidates of a slot  N=nodes  D=hidden  V=vocabulary

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from head_losses import LOSSES, Lesson
from objective_scores import Estimate, estimate, estimate_gain
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from typer import Option

from eval.acceptance import Counts
from recipes.errors import UserError, run_command
from recipes.load import load_recipe
from recipes.schema import Pairwise, Recipe
from recipes.yaml_text import parse_yaml
from serve.pairwise import PairwiseTables
from train.objective import Objective, final_states
from train.pairwise import (
    DraftedBlocks,
    add_target,
    fill_marginals,
    fill_tables,
)
from train.pairwise_held_out import draft_held_out
from train.pairwise_inputs import Split, decoding_anchors, find_shards, read_source
from train.pairwise_learner import begin_head, cut, join, tables_to_serve
from train.pairwise_training import load_frozen
from train.schedule import learning_rate_at
from train.target_parts import TargetParts, load_target_parts
from train.tree_acceptance import NO_LABEL, accepted_by_chains, accepted_by_trees, committed_by_step

NONE = "none"
MOST_CANDIDATES = 32  # that are kept
# How


@dataclass(frozen=True)
class Way:
    """Of training a head."""

    name: str
    loss: str
    texts: Sequence[str]
    settings: Pairwise
    tau: float

    @classmethod
    def parse(cls, name: str, pairwise: Pairwise) -> "Way":
        """UserError for what is no way."""
        if name == NONE:
            return cls(name, NONE, [], pairwise, 1.0)
        head, *fields = name.split(",")
        loss, at, texts = head.partition("@")
        if loss not in LOSSES or not at:
            raise UserError(f"--way {name}: write LOSS@TEXT, LOSS one of {', '.join(LOSSES)}; or {NONE}")
        given: dict[str, Any] = {
            key: parse_yaml(value)[0] for key, _, value in (f.partition("=") for f in fields)
        }
        tau = float(given.pop("tau", 1.0))
        kind = {"d_pace": "d_pace", "kl": "kl", "kl_wrong_draws": "kl"}.get(loss, "cross_entropy")
        objective = pairwise.objective.model_copy(update={"kind": kind})
        settings = pairwise.model_dump() | {"objective": objective.model_dump()} | given
        return cls(name, loss, texts.split("+"), Pairwise.model_validate(settings), tau)

    def seeded(self, seed: int) -> "Way":
        return replace(self, settings=self.settings.model_copy(update={"seed": seed}))


@dataclass(frozen=True)
class Text:
    """As the drafter read it: each sequence at every token at which decoding might draft."""

    drafted: DraftedBlocks
    blocks_by_sequence: list[int]
    final_ALD: torch.Tensor
    """What the target's head reads there."""

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks_by_sequence)

    def begin(self, most_blocks: int) -> "Text":
        """Its first sequences."""
        ends = zip(self.blocks_by_sequence, accumulate(self.blocks_by_sequence), strict=True)
        sizes = [size for size, end in ends if end <= most_blocks]
        blocks = slice(0, sum(sizes))
        return Text(self.drafted[blocks], sizes, self.final_ALD[blocks])

    def take(self, part: int, parts: int) -> "Text":
        """Every `parts`-th sequence."""
        chosen_S = torch.arange(len(self.blocks_by_sequence)) % parts == part
        sizes_S = torch.tensor(self.blocks_by_sequence)
        blocks_A = chosen_S.repeat_interleave(sizes_S)
        return Text(self.drafted[blocks_A], sizes_S[chosen_S].tolist(), self.final_ALD[blocks_A])


def draw_steps(sizes: Sequence[int], settings: Pairwise) -> Iterator[torch.Tensor]:
    """Numbers of each step's blocks: sequences in an order of each epoch, some blocks of each by lot."""
    firsts, waiting, epoch = np.cumsum([0, *sizes]), np.empty(0, dtype=np.int64), 0
    a_step = settings.sequences_per_step * settings.num_anchors
    while True:
        generator = np.random.default_rng([settings.seed, epoch])
        for number in generator.permutation(len(sizes)):
            drawn = generator.permutation(sizes[number])[: settings.num_anchors]
            waiting = np.concatenate([waiting, firsts[number] + drawn])
            while len(waiting) >= a_step:
                yield torch.from_numpy(waiting[:a_step])
                waiting = waiting[a_step:]
        epoch += 1


def train(way: Way, texts: Mapping[str, Text], parts: TargetParts) -> PairwiseTables:
    """Tables as a server reads them."""
    settings = way.settings
    taken = [texts[name].take(place, len(way.texts)) for place, name in enumerate(way.texts)]
    learner, blocks = begin_head(parts, settings), join_texts(taken, settings, parts)
    steps = draw_steps([size for text in taken for size in text.blocks_by_sequence], settings)
    for step in range(settings.steps):
        chosen = blocks[next(steps)]
        learner.optimizer.zero_grad()
        loss = LOSSES[way.loss](Lesson(learner.head, chosen, settings, parts.head_VD.float()))
        (loss / Objective(settings.objective).normaliser(chosen.known_by_slot).float()).backward()
        learner.clip()
        learner.take_step(learning_rate_at(step, settings.steps, settings.optimizer))
    return tables_to_serve(learner.head)


def join_texts(taken: Sequence[Text], settings: Pairwise, parts: TargetParts) -> DraftedBlocks:
    """With what the target finds likely, if that is learnt."""
    temperature, found = settings.learnt_temperature, []
    for text in taken:
        blocks = text.drafted.keep(settings.candidates)
        if temperature is not None:
            blocks = add_target(blocks, text.final_ALD, parts.head_VD, temperature)
        found.append(blocks)
    return join(found)


# How good that is


def simulate(text: Text, tables: PairwiseTables | None, way: Way) -> dict[str, Counts]:
    """Decoding, by way of drafting."""
    budgets, accepted = way.settings.budgets, []
    for blocks in cut(text.drafted.keep(way.settings.candidates)):
        scores_ALCC = fill_marginals(blocks) if tables is None else fill_tables(tables, blocks)
        labels_AL = blocks.labels_AL.where(blocks.known_AL, NO_LABEL)
        drafts = scale(scores_ALCC, way.tau), blocks.tokens_ALC, labels_AL
        accepted.append(
            [accepted_by_chains(*drafts), *(accepted_by_trees(*drafts, each) for each in budgets)]
        )
    names = ["chain", *(f"tree of {budget}" for budget in budgets)]
    pooled = [torch.cat(of_all).split(text.blocks_by_sequence) for of_all in zip(*accepted, strict=True)]
    return {name: count(by_sequence) for name, by_sequence in zip(names, pooled, strict=True)}


def scale(scores_ALCC: torch.Tensor, tau: float) -> torch.Tensor:
    """Log-probabilities over tau, which with the rest sum to one again."""
    if tau == 1:
        return scores_ALCC
    rest = (1 - scores_ALCC.exp().sum(-1, keepdim=True)).clamp_min(1e-6).log()
    return (torch.cat([scores_ALCC, rest], dim=-1) / tau).log_softmax(-1)[..., :-1]


def count(accepted_by_sequence: Sequence[torch.Tensor]) -> Counts:
    steps = [committed_by_step(accepted_A.tolist()) for accepted_A in accepted_by_sequence]
    return Counts(np.array([len(sizes) for sizes in steps]), np.array([sum(sizes) for sizes in steps]))


def make_table(found: Mapping[str, list[dict[str, Counts]]]) -> Table:
    """Lengths of the first way, then what the others gain."""
    (base, of_base), *others = found.items()
    ways = list(of_base[0])
    table = Table("tokens a step", *ways, box=MARKDOWN)
    runs = {way: [seed[way] for seed in of_base] for way in ways}
    table.add_row(base, *(show(estimate(runs[way])) for way in ways))
    for name, of_name in others:
        gains = [estimate_gain([seed[way] for seed in of_name], runs[way]) for way in ways]
        table.add_row(name, *(show(gain, "+") for gain in gains))
    return table


def show(found: Estimate, sign: str = "") -> str:
    return f"{found.value:{sign}.3f} ± {found.standard_error:.3f}"


# Reading


def read_text(recipe: Recipe, run: Path, kept: Path | None) -> Text:
    """From the file of an earlier call, if `kept` names one that is there."""
    if kept is not None and kept.exists():
        content = torch.load(kept, weights_only=True, mmap=True)
        return Text(DraftedBlocks(**content["drafted"]), content["sizes"], content["final"])
    objective = recipe.pairwise.objective.model_copy(update={"kind": "kl"})  # which needs final states
    changes = {"shards": run / "shards", "candidates": MOST_CANDIDATES, "objective": objective}
    text = draft_text(recipe.model_copy(update={"pairwise": recipe.pairwise.model_copy(update=changes)}))
    if kept is not None:
        drafted = {name: part for name, part in vars(text.drafted).items() if part is not None}
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"drafted": drafted, "sizes": text.blocks_by_sequence, "final": text.final_ALD}, kept)
    return text


def draft_text(recipe: Recipe) -> Text:
    source = read_source(recipe)
    shards, frozen = (
        find_shards(recipe, source),
        load_frozen(recipe, source, load_target_parts(recipe.target)),
    )
    anchors = [decoding_anchors(loss_mask_L) for loss_mask_L in shards.read_loss_masks()]
    sizes = np.array([len(anchors_A) for anchors_A in anchors])
    numbers = sizes.nonzero()[0]
    held_out = draft_held_out(frozen, shards, Split(numbers[:0], numbers, sizes[numbers]))
    block_size, final = source.shape.block_size, []
    for number in numbers.tolist():
        final_QD = final_states(shards[number].final, anchors[number], block_size)
        final.append(final_QD.unflatten(0, (-1, block_size))[:, 1:])
    return Text(held_out.drafted, held_out.blocks_by_sequence, torch.cat(final))


def parse_runs(given: Sequence[str]) -> dict[str, Path]:
    """Temperature, as it is written -> output_dir."""
    pairs = [each.partition("=") for each in given]
    if not all(equals for _, equals, _ in pairs):
        raise UserError(f"{' '.join(given)}: write TEMPERATURE=RUN, RUN the output_dir of data/regenerate.py")
    return {temperature: Path(run).expanduser().resolve() for temperature, _, run in pairs}


def main(
    recipe: Annotated[Path, typer.Argument(help="Whose drafter, target and pairwise settings.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.field=value")] = None,
    text: Annotated[list[str] | None, Option(help="TEMPERATURE=RUN, to learn from.")] = None,
    held_out: Annotated[list[str] | None, Option(help="TEMPERATURE=RUN, to judge on.")] = None,
    way: Annotated[list[str] | None, Option(help="LOSS@TEXT[,field=value ...], or none.")] = None,
    seeds: Annotated[int, Option(min=1, help="Trainings of each way.")] = 2,
    cache: Annotated[Path | None, Option(help="A folder for what the drafter made of each text.")] = None,
) -> None:
    """Compare ways of training a pairwise head."""
    base = load_recipe(recipe, overrides or [])
    ways = [Way.parse(name, base.pairwise) for name in way or [NONE, "cross_entropy@0"]]
    sides = {"learnt": parse_runs(text or []), "held-out": parse_runs(held_out or [])}
    missing = {name for each in ways for name in each.texts} - sides["learnt"].keys()
    if missing or not sides["held-out"]:
        raise UserError(f"--text {' '.join(sorted(missing))} or --held-out is missing: write TEMPERATURE=RUN")
    read: dict[str, dict[str, Text]] = {side: {} for side in sides}
    for side, name, run in [(side, *pair) for side, runs in sides.items() for pair in runs.items()]:
        read[side][name] = read_text(base, run, None if cache is None else cache / f"{side}-{name}.pt")
    least = min((each.num_blocks for each in read["learnt"].values()), default=0)
    parts, texts = (
        load_target_parts(base.target),
        {name: each.begin(least) for name, each in read["learnt"].items()},
    )
    found: dict[str, list[dict[str, Counts]]] = {}
    for each in ways:
        found[each.name] = [judge(each.seeded(seed), texts, read["held-out"], parts) for seed in range(seeds)]
        typer.echo(f"{each.name}: {' '.join(f'{runs.length:.3f}' for runs in found[each.name][0].values())}")
    Console(width=40 + 96 * len(read["held-out"])).print(make_table(found))


def judge(
    way: Way, texts: Mapping[str, Text], held_out: Mapping[str, Text], parts: TargetParts
) -> dict[str, Counts]:
    tables = None if way.loss == NONE else train(way, texts, parts)
    return {
        f"{drafts}, T = {temperature}": counts
        for temperature, text in held_out.items()
        for drafts, counts in simulate(text, tables, way).items()
    }


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
