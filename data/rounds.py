"""Which shards belong to which round of the loop, and where a round says that it is done."""

from pathlib import Path

from recipes.errors import UserError
from recipes.job import share_out_rounds
from recipes.manifest import RoundManifest, ShardManifest, read_manifest, write_json
from recipes.schema import Policy, Rounds


def share_shards(num_shards: int, rounds: Rounds) -> list[range]:
    """The numbers of each round's shards, in order; a round may have none where there are too few."""
    ends = [round(num_shards * end) for end in share_out_rounds(rounds)]
    ends[-1] = num_shards
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def check_shares(num_shards: int, rounds: Rounds) -> None:
    """Raises UserError if a round has no data of its own."""
    shares = share_shards(num_shards, rounds)
    empty = [number for number, share in enumerate(shares, start=1) if not share]
    if empty:
        raise UserError(
            f"rounds.count is {rounds.count}, but the prompts make {num_shards} shards, shared out as"
            f" {', '.join(str(len(share)) for share in shares)}: round {empty[0]} would have none; lower"
            " data.shard_tokens, or ask for more prompts or fewer rounds"
        )


def round_path(output_dir: Path, number: int) -> Path:
    return output_dir / "rounds" / f"round-{number}.json"


def read_round(output_dir: Path, number: int) -> RoundManifest | None:
    """None until its shards are all there."""
    path = round_path(output_dir, number)
    return read_manifest(path, RoundManifest) if path.is_file() else None


def write_round(output_dir: Path, report: RoundManifest) -> None:
    """Says that a round's shards are all there; removes what was left when one was killed at it."""
    path = round_path(output_dir, report.round)
    path.parent.mkdir(exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink()
    write_json(path, report)


def of_round(manifest: ShardManifest, number: int, policy: Policy) -> ShardManifest:
    """The same with what a round trains on alone: its own shards and, unless they are gone, earlier ones."""
    first = number if policy == "rolling" else 0
    kept = [entry for entry in manifest.shards if first <= entry.round <= number]
    return manifest.model_copy(update={"shards": kept})
