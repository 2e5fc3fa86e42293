"""serve/tree_slots.py against loops over requests, on ragged steps: whole trees, cut ones, none at all."""

# T=rows of the step  N=nodes (padded)  L=slots  B=requests

from dataclasses import dataclass

import pytest
import torch

from serve.tree import ROOT
from serve.tree_batch import Topology, WalkBatch, follow_trees
from serve.tree_slots import StepTrees, TreeSlots, begin_step, commit_tokens, path_rows, tidy_rows

SEEDS = range(40)
SLOTS = 9


@dataclass(frozen=True)
class Request:
    """One request's part of a step."""

    parents: list[int]
    """Of the planted tree's nodes, whether they were scheduled or not."""
    num_drafts: int
    first_row: int
    """Of the committed token."""

    @property
    def num_nodes(self) -> int:
        return min(len(self.parents), self.num_drafts)

    def depth(self, node: int) -> int:
        return 1 + (self.depth(self.parents[node]) if self.parents[node] != ROOT else 0)


@dataclass(frozen=True)
class Step:
    requests: list[Request]
    topology: Topology
    """As read from the slots."""
    first_row_B: torch.Tensor
    num_rows: int
    num_slots: int

    @property
    def trees(self) -> StepTrees:
        return begin_step(self.topology, self.first_row_B, self.num_slots)


def draw_int(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def draw_parents(generator: torch.Generator, num_nodes: int, num_slots: int) -> list[int]:
    parents: list[int] = []
    depths: list[int] = []
    for _ in range(num_nodes):
        open_nodes = [ROOT, *(node for node, depth in enumerate(depths) if depth < num_slots)]
        parents.append(open_nodes[draw_int(generator, 0, len(open_nodes) - 1)])
        depths.append(1 + (depths[parents[-1]] if parents[-1] != ROOT else 0))
    return parents


def as_topology(trees: list[list[int]], budget: int) -> Topology:
    """Padded as serve.tree_batch pads."""
    requests = [Request(parents, len(parents), 0) for parents in trees]
    padding = [budget - len(parents) for parents in trees]
    return Topology(
        torch.tensor([each.parents + [ROOT] * pad for each, pad in zip(requests, padding, strict=True)]),
        torch.tensor(
            [
                [each.depth(node) for node in range(len(each.parents))] + [0] * pad
                for each, pad in zip(requests, padding, strict=True)
            ]
        ),
        torch.tensor([len(parents) for parents in trees]),
    )


def draw_step(seed: int) -> Step:
    """Requests in random slots: some with all their drafts, some with a few, some with none in a prefill."""
    generator = torch.Generator().manual_seed(seed)
    batch, budget = draw_int(generator, 1, 6), draw_int(generator, 1, 17)
    num_slots = draw_int(generator, 1, 7)
    slots_B = torch.randperm(SLOTS, generator=generator)[:batch]
    requests, row = [], 0
    for _ in range(batch):
        parents = draw_parents(generator, draw_int(generator, 1, budget), num_slots)
        num_drafts = draw_int(generator, 0, budget)
        first_row = row + (draw_int(generator, 0, 5) if num_drafts == 0 else 0)
        requests.append(Request(parents, num_drafts, first_row))
        row = first_row + 1 + num_drafts
    planted = TreeSlots(SLOTS, budget, torch.device("cpu"))
    planted.plant(slots_B, as_topology([each.parents for each in requests], budget))
    read = planted.read(slots_B, torch.tensor([each.num_drafts for each in requests]))
    first_row_B = torch.tensor([each.first_row for each in requests])
    return Step(requests, read, first_row_B, row, num_slots)


def draw_walk(step: Step, seed: int) -> tuple[WalkBatch, torch.Tensor]:
    """How far a target goes that has one of two tokens at every row; and the tokens of the nodes."""
    generator = torch.Generator().manual_seed(1000 + seed)
    batch, budget = step.topology.parents_BN.shape
    tokens_BN = torch.randint(10, 12, (batch, budget), generator=generator)
    target_BR = torch.randint(10, 12, (batch, budget + 1), generator=generator)
    return follow_trees(step.topology, tokens_BN, target_BR, step.num_slots), tokens_BN


def paths_of(walk: WalkBatch) -> list[list[int]]:
    counts = walk.num_accepted_B.tolist()
    return [path[:count] for path, count in zip(walk.path_BL.tolist(), counts, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("axes", [(), (3,)], ids=["linear", "mrope"])
def test_a_node_stands_at_its_depth_after_the_committed_token(seed, axes):
    step = draw_step(seed)
    positions = torch.randint(1000, (*axes, step.num_rows), generator=torch.Generator().manual_seed(seed))
    given, expected = positions.clone(), positions.clone()
    for request in step.requests:
        for node in range(request.num_nodes):
            row = request.first_row + 1 + node
            expected[..., row] = positions[..., request.first_row] + request.depth(node)
    assert torch.equal(step.trees.move_positions(positions), expected)
    assert torch.equal(positions, given)  # the runner still needs the linear ones


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rows_of_a_request_are_its_committed_token_and_its_nodes(seed):
    step = draw_step(seed)
    asked = range(seed % 2, len(step.requests), 2)  # every other request
    rows, is_row = step.trees.rows_of(torch.tensor(asked, dtype=torch.int64))
    for found, is_found, request in zip(rows, is_row, [step.requests[i] for i in asked], strict=True):
        count = 1 + request.num_nodes
        assert found[:count].tolist() == list(range(request.first_row, request.first_row + count))
        assert is_found.tolist() == [number < count for number in range(len(found))]
        assert (found[count:] == request.first_row).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_an_accepted_path_moves_to_the_rows_after_the_committed_token(seed, shape):
    step = draw_step(seed)
    walk, _ = draw_walk(step, seed)
    rows = torch.randn(step.num_rows, *shape, generator=torch.Generator().manual_seed(seed))
    before, expected = rows.clone(), rows.clone()
    for request, path in zip(step.requests, paths_of(walk), strict=True):
        for place, node in enumerate(path):
            expected[request.first_row + 1 + place] = before[request.first_row + 1 + node]
    tidy_rows(rows, path_rows(walk, step.first_row_B))
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_past_the_end_of_a_path_a_row_is_the_committed_tokens_own(seed):
    step = draw_step(seed)
    walk, _ = draw_walk(step, seed)
    paths = path_rows(walk, step.first_row_B)
    for row, (request, path) in enumerate(zip(step.requests, paths_of(walk), strict=True)):
        rest = [request.first_row] * (step.num_slots - len(path))
        assert paths.source_BL[row].tolist() == [*(request.first_row + 1 + node for node in path), *rest]
        places = range(1, 1 + len(path))
        assert paths.target_BL[row].tolist() == [*(request.first_row + place for place in places), *rest]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_emits_the_paths_tokens_and_then_the_targets_own(seed):
    step = draw_step(seed)
    walk, tokens_BN = draw_walk(step, seed)
    num_tokens = 1 + tokens_BN.shape[1]  # fewer than a block's slots and one, or more
    emitted, counts_B = commit_tokens(walk, tokens_BN, num_tokens)
    assert emitted.is_contiguous()
    for row, path in enumerate(paths_of(walk)):
        text = [*(int(tokens_BN[row, node]) for node in path), int(walk.bonus_B[row])]
        assert emitted[row].tolist() == text + [0] * (num_tokens - len(text))
        assert int(counts_B[row]) == len(text)


def test_the_drawn_steps_have_paths_off_the_spine_cut_trees_and_rows_without_drafts():
    steps = {seed: draw_step(seed) for seed in SEEDS}
    requests = [request for step in steps.values() for request in step.requests]
    paths = [path for seed, step in steps.items() for path in paths_of(draw_walk(step, seed)[0])]
    assert sum(path != list(range(len(path))) for path in paths) > 20
    assert sum(0 < request.num_drafts < len(request.parents) for request in requests) > 10
    assert sum(request.num_drafts > len(request.parents) for request in requests) > 10
    assert sum(request.num_drafts == 0 for request in requests) > 5


@pytest.mark.parametrize("num_drafts", range(7))
def test_a_tree_is_cut_to_the_drafts_that_were_scheduled(num_drafts):
    parents, tokens = [ROOT, 0, ROOT, 1, 2], torch.tensor([[1, 2, 3, 4, 5, 0]])
    slots = TreeSlots(4, 6, torch.device("cpu"))
    slots.plant(torch.tensor([2]), as_topology([parents], 6))
    read = slots.read(torch.tensor([2]), torch.tensor([num_drafts]))
    assert read.num_nodes_B.tolist() == [min(num_drafts, len(parents))]
    # the target wants nodes 0, 1 and 3: each is taken if it was scheduled
    walk = follow_trees(read, tokens, torch.tensor([[1, 2, 4, 9, 9, 9, 9]]), num_slots=3)
    assert paths_of(walk) == [[node for node in (0, 1, 3) if node < num_drafts]]


def test_the_last_planted_tree_is_read_and_other_slots_are_left_alone():
    slots = TreeSlots(4, 3, torch.device("cpu"))
    slots.plant(torch.tensor([3, 1]), as_topology([[ROOT, 0, 0], [ROOT, ROOT]], 3))
    slots.plant(torch.tensor([1]), as_topology([[ROOT]], 3))
    read = slots.read(torch.tensor([1, 3]), torch.tensor([3, 3]))
    assert read.parents_BN.tolist() == [[ROOT, ROOT, ROOT], [ROOT, 0, 0]]
    assert read.depths_BN.tolist() == [[1, 0, 0], [1, 2, 2]]
    assert read.num_nodes_B.tolist() == [1, 3]


def test_where_nothing_was_planted_drafts_form_a_chain_that_is_refused():
    slots = TreeSlots(4, 5, torch.device("cpu"))
    read = slots.read(torch.tensor([3]), torch.tensor([5]))
    trees = begin_step(read, torch.tensor([0]), num_slots=5)
    assert torch.equal(trees.sees_BRR[0], torch.ones(6, 6, dtype=torch.bool).tril())
    linear = torch.arange(30, 36)
    assert torch.equal(trees.move_positions(linear), linear)
    walk = follow_trees(read, torch.tensor([[7, 7, 7, 7, 7]]), torch.full((1, 6), 7), num_slots=5)
    assert paths_of(walk) == [[]]
    assert walk.bonus_B.tolist() == [7]
