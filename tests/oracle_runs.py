"""Small engines with a GPU's runtime, in which an oracle's trees are planted; what tests ask of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tree_probe import run_engines
from tree_rounds import Round, Spec, Told
from tree_targets import Case, greedy_texts, write_dense_case, write_hybrid_case

KINDS = {"dense": write_dense_case, "hybrid": write_hybrid_case}
"""Of targets."""
BUDGET = 7
NUM_REQUESTS = 3
# a prompt is computed in chunks, beside the trees of the requests before it
SERVE = {"max_num_batched_tokens": 64, "max_num_seqs": NUM_REQUESTS}


@dataclass(frozen=True)
class Ran:
    texts: list[list[int]]
    """Prompts with the target's own continuation, longer than the answers."""
    answers: list[list[int]]
    """The target's own, as long as was asked for."""
    told: Told


def run_oracle(kind: str, folder: Path, length: int, *, serve: dict[str, Any], adapts: bool = False) -> Ran:
    """serve: settings beside `SERVE`; adapts: as `Spec`."""
    full = KINDS[kind](folder)
    case = Case(full.target, full.ckpt, full.prompts[:NUM_REQUESTS])
    texts = greedy_texts(case, length + 20)
    rounds = {"oracle": Round(case.prompts, length, texts=texts, drafts="oracle", keeps_states="of the end")}
    models = case.target, case.ckpt, BUDGET
    spec = Spec(*models, rounds, SERVE | serve, adapts=adapts, has_gpu_runtime=True)
    told = run_engines({"gpu": spec}, folder)["gpu"]["oracle"]
    answers = [
        text[len(prompt) : len(prompt) + length] for prompt, text in zip(case.prompts, texts, strict=True)
    ]
    return Ran(texts, answers, told)
