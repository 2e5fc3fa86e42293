"""Engines whose trees have rows reserved for the greedy chain; tells a test what they drafted.

Reads `cases` in a folder, by round.  Saves what each engine answered and drafted.
"""

import pickle
from pathlib import Path

from pairwise_probe import BUDGET, RESERVED, Told, answer, run_apart, run_gpu_runtime, start
from tree_targets import NUM_SLOTS, Case

RESERVED_IN = {"with a head": RESERVED, "without": NUM_SLOTS + 2, "GPU's trees": RESERVED}
"""By round; in the second more than the chain has."""


def run_trees(name: str, case: Case) -> dict[str, Told]:
    return {name: answer(start(case, BUDGET, RESERVED_IN[name]), case.prompts)}


def main(folder: Path) -> None:
    cases = pickle.loads((folder / "cases").read_bytes())
    runs = {
        "with a head": lambda: run_trees("with a head", cases["with a head"]),
        "without": lambda: run_trees("without", cases["without"]),
        "GPU's trees": lambda: run_gpu_runtime(cases["GPU's trees"], reserved=RESERVED_IN["GPU's trees"]),
    }
    run_apart(folder, runs)
