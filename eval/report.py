"""report.json, schema version 1: what a measurement found, with all it takes to repeat it.

A field with a default came later than the first reports, which are read all the same.  Written whole or not
at all.  `eval/measure.py` makes it; `eval/table.py` and `eval/points.py` show it.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from recipes.manifest import write_json
from recipes.schema import Thinking

Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]


class Part(BaseModel):
    """Strict and immutable: an unknown or missing field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class TargetPart(Part):
    model: str
    fingerprint: str | None
    """As in the checkpoint's manifest; None where only a URL was given."""


class DrafterPart(Part):
    checkpoint: str | None
    """Its folder, links resolved; None where only a URL was given."""
    step: Natural | None
    """Optimizer steps behind it, where its manifest or the command says so."""


class EnginePart(Part):
    vllm: str
    runner: Literal["V1", "V2"] | None
    """As the engine's log names it; None where only a URL was given."""
    device: str | None
    precision: str | None


class Settings(Part):
    suite: str
    n_prompts: Natural
    temperature: float
    max_tokens: Natural
    concurrency: Natural
    seed: int
    block_size: Natural
    """The anchor and the drafts of a step."""
    budget: Natural | None
    """Most nodes of a draft tree; None where no trees were measured."""
    thinking: Thinking = "template"
    """What the chat template was told."""


class Spread(Part):
    """Of many times, in milliseconds."""

    p50: float
    p99: float


class Latency(Part):
    """How long clients waited, at the stated concurrency; the terms are those of `eval/latency.py`."""

    first_token: Spread
    between_chunks: Spread
    per_token: Spread
    step_ms: float
    """Of a request's verification step, on average."""


class Decoding(Part):
    """One way of decoding at one temperature; the terms are those of `eval/acceptance.py`."""

    acceptance_length: float
    standard_error: float | None
    """Of the acceptance length, over requests."""
    interval: tuple[float, float] | None = None
    """That holds the acceptance length with 95 %, by a bootstrap over requests; None where it is unknown."""
    mean_of_request_means: float | None
    tokens_per_second: float
    """Generated tokens of all requests / wall-clock seconds, at the stated concurrency."""
    steps: Natural
    committed_tokens: Natural
    accepted_by_depth: list[Share]
    """[k-1]: share of the steps that accepted at least k drafts; empty for plain decoding."""
    repeated_8gram_share: Share
    coalesced: bool
    """The server merged chunks: steps and depths are the engine's counters, which know no cut at the end."""
    undrafted_steps: Natural
    latency: Latency | None = None
    """None where no answer was longer than a chunk."""


class TreeDecoding(Decoding):
    """Draft trees; `accepted_by_depth` has an entry for each draft of the block, not for each node."""

    nodes_per_step: float
    """Drafts that the engine verified / steps: less than the budget where a tree was cut."""


class DivergencePart(Part):
    prompt_id: str
    position: Natural
    """Of the first differing token in the response."""
    gap: float | Literal["outside the top k", "ended early"]
    """In nats, between the plain run's token and the drafted run's, by the plain run."""
    is_near_tie: bool


class GreedyPart(Part):
    """Greedy drafted text against greedy plain decoding's."""

    n_diverging: Natural
    n_near_ties: Natural
    divergences: list[DivergencePart]

    @property
    def has_only_near_ties(self) -> bool:
        """Every divergence is a near-tie."""
        return self.n_near_ties == self.n_diverging


class LosslessPart(GreedyPart):
    """The chain's divergences, and the tree's apart from them."""

    lossless: bool
    """Every divergence is a near-tie, of the chain and of the tree."""
    n_prompts: Natural
    near_tie_nats: float
    tree: GreedyPart | None = None


class BranchingPart(Part):
    """What trees hold where the greedy chain fails; the terms are those of `eval/branching.py`."""

    shared_steps: Natural
    failed: Natural
    """Of them, those in which the target took another token than the chain had."""
    held: Natural
    short: Natural
    depth_after: float | None
    """Drafts from that token on that the target took of a tree that held it, on average."""


class AtTemperature(Part):
    temperature: float
    plain: Decoding | None
    chain: Decoding
    tree: TreeDecoding | None = None
    baselines: dict[str, Decoding] = {}
    """vLLM's own ways of drafting, by name."""


class Report(Part):
    schema_version: Literal[1] = 1
    target: TargetPart
    drafter: DrafterPart
    engine: EnginePart
    settings: Settings
    plain: Decoding | None
    """None where only a URL was given."""
    chain: Decoding
    tree: TreeDecoding | None = None
    baselines: dict[str, Decoding] = {}
    lossless: LosslessPart | None
    """None unless both plain and chain ran at temperature 0."""
    branching: BranchingPart | None = None
    """None unless both chain and trees ran at temperature 0, and no chunks were merged."""
    seconds: dict[str, Seconds]
    """By phase."""
    gpu_gib: dict[str, float] = {}
    """Memory that each engine took of the GPUs; empty on a CPU, and where it could not be read."""
    other_temperatures: list[AtTemperature]
    recipe: dict[str, Any] | None
    provenance: dict[str, Any]

    def by_temperature(self) -> list[AtTemperature]:
        """All that was measured, the report's own temperature first."""
        own = AtTemperature(
            temperature=self.settings.temperature,
            plain=self.plain,
            chain=self.chain,
            tree=self.tree,
            baselines=self.baselines,
        )
        return [own, *self.other_temperatures]


def write_report(path: Path, report: Report) -> None:
    """Atomically: a reader sees the former file or this one."""
    write_json(path, report.model_dump(mode="json"))
