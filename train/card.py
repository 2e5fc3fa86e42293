"""The model card of a published checkpoint: README.md with the header that the Hugging Face Hub reads.

Everything on it comes from the checkpoint's own manifest and config.json and, once it has been measured, from
the report of that measurement.  `train/checkpoint.py` writes it first, `train/distill.py` again at the end,
and `train/pairwise_head.py` adds a section to any card, where the drafter gets such a head.
"""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from recipes.manifest import CheckpointManifest, Origin, read_manifest
from recipes.schema import Recipe, Train
from recipes.target_config import find_folder
from recipes.yaml_text import format_yaml
from serve.drafter_config import CONFIG_NAME
from serve.headers import read_json
from serve.plan import MANIFEST_NAME
from serve.tensor_file import sync_path
from train.pairwise_manifest import HeadManifest, read_head_manifest

CARD_NAME = "README.md"
LIBRARY = "vllm"
_TAGS = ["dflash", "speculative-decoding", "draft-model", "draftsmith"]
_DEVIATIONS = 1.96
"""Standard errors on each side of a mean that hold 95 % of a normal distribution."""

_CARD = """\
---
{header}---

# A DFlash drafter for {target}

Distilled by draftsmith, in {step:,} optimizer steps on the target's own text.

It drafts {drafts} tokens at a time from the target's layers
{layers}; the embedding and the head are the target's, so it works with that target alone.

Serve it: `python serve/run.py --ckpt THIS_FOLDER`, or in stock vLLM with
`--speculative-config '{{"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": {drafts}}}'`.

## How it was made

{facts}

`{manifest}` holds the whole recipe, the versions and the command.

## How much the target accepts

Tokens a step, the target's own included; 1 is no drafting at all.

{acceptance}"""


_HEAD_TITLE = "## Pairwise head"
_HEAD = """\
{title}

`pairwise/head.safetensors` scores a token given the one before it, which makes branches of draft trees worth
more.  Draftsmith's server uses it; other engines pass it over.  Rank {rank}, trained in {step:,} steps on the
target's own text; {drafter}.
"""
_SIMULATED = """\

Tokens a step, simulated on {sequences:,} sequences that the head did not see:

| drafts | without it | with it |
| --- | ---: | ---: |
{rows}
"""


class _Read(BaseModel):
    """What a card needs of a report.json, whose schema is `eval/report.py`'s; the rest is passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class MeasuredDecoding(_Read):
    acceptance_length: float
    standard_error: float | None
    committed_tokens: int


class MeasuredAt(_Read):
    temperature: float
    chain: MeasuredDecoding
    tree: MeasuredDecoding | None


class MeasuredSettings(_Read):
    suite: str
    n_prompts: int
    temperature: float
    max_tokens: int
    budget: int | None


class MeasuredEngine(_Read):
    vllm: str
    device: str | None
    precision: str | None


class Measured(_Read):
    """report.json, as `read_manifest` reads it."""

    schema_version: Literal[1] = 1
    engine: MeasuredEngine
    settings: MeasuredSettings
    chain: MeasuredDecoding
    tree: MeasuredDecoding | None
    other_temperatures: list[MeasuredAt]
    provenance: dict[str, Any]

    def by_temperature(self) -> list[MeasuredAt]:
        own = MeasuredAt(temperature=self.settings.temperature, chain=self.chain, tree=self.tree)
        return [own, *self.other_temperatures]

    @property
    def command(self) -> str:
        _, *words = self.provenance["argv"]  # the script's path says where it lay
        return f"python eval/measure.py {shlex.join(words)}"


def add_measurement(ckpt: Path, report: Path) -> None:
    """Rewrites the card of a published checkpoint, with what the report says of it.

    All or nothing: until it is whole it lies beside the report, so that the checkpoint holds nothing else.
    """
    manifest = read_manifest(ckpt / MANIFEST_NAME, CheckpointManifest)
    measured = read_manifest(report, Measured)
    text, head = model_card(read_json(ckpt / CONFIG_NAME), manifest, measured), read_head_manifest(ckpt)
    _replace_card(ckpt, text if head is None else with_head(text, head), report.parent)


def add_head(ckpt: Path, scratch: Path) -> None:
    """Tells of a checkpoint's head on its card, whoever wrote that; without a card, on a new one.

    All or nothing: until it is whole it lies in `scratch`, on the same disk.
    """
    head, card = read_head_manifest(ckpt), ckpt / CARD_NAME
    assert head is not None, f"{ckpt} has no pairwise head"
    text = (
        card.read_text(encoding="utf-8") if card.exists() else f"# A DFlash drafter for {head.target.model}\n"
    )
    _replace_card(ckpt, with_head(text, head), scratch)


def with_head(card: str, head: HeadManifest) -> str:
    """The card with a section on the head at its end, in place of an earlier one."""
    before, _, rest = card.partition(f"\n{_HEAD_TITLE}\n")
    _, next_title, after = rest.partition("\n## ")
    return f"{(before + next_title + after).rstrip()}\n\n{_head_section(head)}"


def _head_section(head: HeadManifest) -> str:
    settings = Recipe.model_validate(head.recipe).pairwise
    names = ["chain", *(f"trees of {budget}" for budget in settings.budgets)]
    pairs = zip([head.before.chain, *head.before.trees], [head.after.chain, *head.after.trees], strict=True)
    words = _HEAD.format(
        title=_HEAD_TITLE, rank=settings.rank, step=head.step, drafter="the drafter stayed as it was"
    )
    return words + _SIMULATED.format(
        sequences=head.held_out_sequences,
        rows="\n".join(
            f"| {name} | {was:.2f} | {now:.2f} |" for name, (was, now) in zip(names, pairs, strict=True)
        ),
    )


def _replace_card(ckpt: Path, text: str, scratch: Path) -> None:
    temporary = scratch / f".{CARD_NAME}.tmp"
    temporary.write_text(text, encoding="utf-8")
    sync_path(temporary)
    temporary.replace(ckpt / CARD_NAME)
    sync_path(ckpt)


def model_card(
    config: Mapping[str, Any], manifest: CheckpointManifest, measured: Measured | None = None
) -> str:
    card = _CARD.format(
        header=format_yaml(_header(manifest)),
        target=manifest.target.model,
        step=manifest.step,
        drafts=config["block_size"] - 1,
        layers=", ".join(str(layer) for layer in config["dflash_config"]["target_layer_ids"]),
        facts="\n".join(f"- {name}: {value}" for name, value in _facts(manifest).items()),
        manifest=MANIFEST_NAME,
        acceptance="\n".join(_acceptance(manifest, measured)) + "\n",
    )
    return card + _companion_section(manifest)


def _companion_section(manifest: CheckpointManifest) -> str:
    """Nothing where no head learnt beside the drafter."""
    settings = Recipe.model_validate(manifest.recipe).train.pairwise
    if settings is None:
        return ""
    beside = "together with the drafter, which is the same without it"
    return f"\n{_HEAD.format(title=_HEAD_TITLE, rank=settings.rank, step=manifest.step, drafter=beside)}"


def _header(manifest: CheckpointManifest) -> dict[str, Any]:
    """The Hub takes names on the Hub alone for a base model."""
    model = manifest.target.model
    base = {} if find_folder(model) else {"base_model": model}
    return base | {"library_name": LIBRARY, "tags": _TAGS}


def _facts(manifest: CheckpointManifest) -> dict[str, str]:
    recipe, target = Recipe.model_validate(manifest.recipe), manifest.target
    data = recipe.data
    return {
        "target": f"{target.model} in {target.dtype}, fingerprint `{target.fingerprint}`",
        "recipe": f"`{recipe.name}`",
        "data": f"its answers to {data.num_prompts:,} prompts of"
        f" `{_without_folder(data.named_prompts)}` at most; {manifest.sequences_seen:,} sequences"
        f" ({manifest.tokens_seen:,} tokens) were trained on, repeats counted",
        "objective": _settings(recipe.train.objective.model_dump(mode="json")),
        "begun": _describe_beginning(manifest.init_from),
        "trained": _describe_trained(recipe.train),
    }


def _describe_beginning(origin: Origin | None) -> str:
    if origin is None:
        return "at random"
    name = _without_folder(origin.checkpoint)
    return f"with `{name}` ({origin.format} format), fingerprint `{origin.fingerprint}`"


def _describe_trained(train: Train) -> str:
    lora = train.lora
    if lora is None:
        return "all weights"
    return (
        f"adapters (LoRA) of rank {lora.rank}, alpha {lora.alpha}, on {', '.join(lora.targets)};"
        " merged into the weights"
    )


def _without_folder(path: str) -> str:
    """Where a file lay says nothing to those who read the card; the manifest does."""
    return PurePath(path).name


def _settings(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)


def _acceptance(manifest: CheckpointManifest, measured: Measured | None) -> Iterator[str]:
    if manifest.simulated_acceptance is not None:
        yield f"Simulated, of the chain on training blocks: {manifest.simulated_acceptance:.2f}."
        yield ""
    if measured is None:
        yield "Not measured yet."
        return
    settings, engine = measured.settings, measured.engine
    where = ", ".join(filter(None, [f"vLLM {engine.vllm}", engine.device, engine.precision]))
    suite = _without_folder(settings.suite)
    yield f"Measured on {settings.n_prompts:,} held-out prompts of `{suite}`, answers of up to"
    yield f"{settings.max_tokens:,} tokens, in {where}:"
    yield ""
    yield "| drafts | temperature | tokens a step | 95 % interval | prompts | tokens |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for at in measured.by_temperature():
        yield _row("chain", at, at.chain, settings)
        if at.tree is not None:
            yield _row(f"trees of {settings.budget}", at, at.tree, settings)
    yield ""
    yield "Intervals are over prompts.  Measured by:"
    yield ""
    yield f"    {measured.command}"


def _row(name: str, at: MeasuredAt, decoding: MeasuredDecoding, settings: MeasuredSettings) -> str:
    mean, error = decoding.acceptance_length, decoding.standard_error
    interval = "unknown"
    if error is not None:
        interval = f"{mean - _DEVIATIONS * error:.2f} to {mean + _DEVIATIONS * error:.2f}"
    cells = [
        *(name, f"{at.temperature:g}", f"{mean:.2f}", interval),
        *(f"{settings.n_prompts:,}", f"{decoding.committed_tokens:,}"),
    ]
    return f"| {' | '.join(cells)} |"
