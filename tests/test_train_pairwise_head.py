"""A head trained on a frozen drafter: its loss and its worth by hand, what it leaves, and going on."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pairwise_bench import NUM_SEQUENCES, Workbench, contents, head_bytes, recipe_for, run
from small_drafters import write_drafter
from small_training import DRAFTER, HIDDEN, VOCAB, write_target
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from recipes.manifest import read_manifest
from recipes.schema import Recipe
from serve.drafter_config import PAIRWISE_NAME
from serve.pairwise import PairwiseTables, read_pairwise
from serve.tree import broadcast_marginals
from train import pairwise, pairwise_held_out, pairwise_state
from train.batches import pack
from train.blocks import draw_anchors
from train.feed import visit_generator
from train.pairwise import DraftedBlocks, ProjectedTable, fill_tables
from train.pairwise_held_out import draft_held_out
from train.pairwise_inputs import decoding_anchors, split_sequences
from train.pairwise_learner import FrozenDrafter, HeadLearner, backward, begin_head, join, tables_to_serve
from train.pairwise_manifest import HeadManifest, Simulated, head_manifest_path
from train.pairwise_training import HeadTraining
from train.target_parts import load_target_parts
from train.tree_acceptance import NO_LABEL, accepted_by_chains, accepted_by_trees_one_by_one


@pytest.fixture
def bench(target, ckpt) -> Workbench:
    return Workbench(recipe_for(target, ckpt))


# The loss


def draft_alone(frozen: FrozenDrafter, sequence, anchor: int) -> torch.Tensor:
    """States of slots 1.. of a block that no other is packed with. [L, D]"""
    batch = pack([sequence], [torch.tensor([anchor])], frozen.drafter.shape)
    embeddings_KD = F.embedding(batch.input_ids_Q, frozen.parts.embedding_VD)
    states_KD = frozen.drafter(
        *(
            batch.taps_SE.float(),
            batch.context_positions_S,
            embeddings_KD,
            batch.block_positions_Q,
            batch.views,
        )
    )
    return states_KD[1:].detach()


def distribution_by_hand(tables: PairwiseTables, q_V: torch.Tensor, state_D, parent: int, count: int):
    """Over the best `count` tokens and, last, the rest.  Probabilities, and those tokens."""
    tokens_C = q_V.argsort(descending=True, stable=True)[:count]
    mixed_r = tables.parents_Vr[parent] * (1 + tables.gate_rD @ state_D)
    candidates_C = q_V[tokens_C] * (tables.children_Vr[tokens_C] @ mixed_r).exp()
    rest = (1 - q_V[tokens_C].sum()) * (tables.rest_r @ mixed_r).exp()
    mass = torch.cat([candidates_C, rest[None]])
    return mass / mass.sum(), tokens_C.tolist()


def losses_by_hand(bench: Workbench, tables: PairwiseTables, step: int):
    """(weight, nats) of every slot of a step that the target's own text reaches."""
    settings, drafter = bench.recipe.pairwise, bench.frozen.drafter.shape
    head_VD = bench.parts.head_VD.float()
    for micro in bench.feed.read_step(step):
        for visit in micro.visits:
            sequence = bench.shards[visit.index]
            tokens, mask = sequence.token_ids.tolist(), sequence.loss_mask
            generator = visit_generator(settings.seed, visit)
            for anchor in draw_anchors(mask, settings.num_anchors, generator).tolist():
                states_LD = draft_alone(bench.frozen, sequence, anchor)
                for slot in range(1, min(drafter.block_size, len(tokens) - anchor)):
                    state_D = states_LD[slot - 1]
                    q_V = (head_VD @ state_D).softmax(-1)
                    before, label = tokens[anchor + slot - 1], tokens[anchor + slot]
                    probs, best = distribution_by_hand(tables, q_V, state_D, before, settings.candidates)
                    place = best.index(label) if label in best else -1
                    yield math.exp(-(slot - 1) / settings.objective.decay), -probs[place].log()


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_loss_of_a_step_and_its_gradient_are_their_definition(bench, is_trained):
    head = bench.scatter_head() if is_trained else bench.head
    terms = list(losses_by_hand(bench, head.make_tables(), 1))
    expected = sum(weight * nats for weight, nats in terms) / sum(weight for weight, _ in terms)
    parameters = dict(head.named_parameters())
    slopes = torch.autograd.grad(expected, list(parameters.values()), allow_unused=True)
    found = backward(head, bench.draft_step(1), bench.recipe.pairwise.objective)
    torch.testing.assert_close(found.float(), expected.detach(), rtol=1e-4, atol=0)
    for parameter, slope in zip(parameters.values(), slopes, strict=True):
        expected_slope = torch.zeros_like(parameter) if slope is None else slope
        torch.testing.assert_close(parameter.grad, expected_slope, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["cross_entropy", "d_pace"])
def test_no_split_of_a_step_changes_its_loss_or_gradient(bench, kind):
    head, objective = bench.scatter_head(), bench.recipe.pairwise.objective.model_copy(update={"kind": kind})
    drafted = bench.draft_step(0)
    in_two = [drafted[0][:3], join([drafted[0][3:], *drafted[1:]])]
    splits = [(blocks, most) for blocks in (drafted, in_two) for most in (512, 3, 1)]
    found = [gradient_of(head, blocks, objective, most) for blocks, most in splits]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-7)


def gradient_of(head, drafted, objective, blocks_at_once) -> list[torch.Tensor]:
    head.zero_grad()
    loss = backward(head, drafted, objective, blocks_at_once)
    return [loss, *(parameter.grad.clone() for parameter in head.parameters())]


def test_anchors_are_drawn_afresh_and_held_out_sequences_never_seen(bench):
    visits, anchors = [], {}
    for step in range(16):
        for micro in bench.feed.read_step(step):
            visits += micro.visits
            places = micro.batch.block_positions_Q[:: DRAFTER.block_size].split(
                [len(d) for d in blocks_of(micro)]
            )
            anchors |= {visit: part.tolist() for visit, part in zip(micro.visits, places, strict=True)}
    assert not {visit.index for visit in visits} & set(bench.split.held_out.tolist())
    assert {visit.index for visit in visits} | set(bench.split.held_out.tolist()) == set(range(NUM_SEQUENCES))
    assert len({visit.epoch for visit in visits}) > 2
    again = [[a for v, a in anchors.items() if v.index == index] for index in bench.split.learnt]
    assert any(first != second for first, second, *_ in again)


def blocks_of(micro) -> list[range]:
    size = DRAFTER.block_size
    return [range(each.blocks.start // size, each.blocks.stop // size) for each in micro.batch.documents]


# The verdict


def decode_by_hand(bench: Workbench, tables: PairwiseTables | None, budget: int | None) -> float:
    """Tokens a step on the held-out sequences, each decoded token by token; None: the chain."""
    steps = committed = 0
    for index in bench.split.held_out.tolist():
        sequence = bench.shards[index]
        end, at = len(sequence.token_ids), int(sequence.loss_mask.nonzero()[0])
        while at < end - 1:
            accepted = accept_by_hand(bench, tables, sequence, at, budget)
            committed += min(accepted + 1, end - 1 - at)
            at, steps = at + accepted + 1, steps + 1
    return committed / steps


def accept_by_hand(bench, tables, sequence, anchor: int, budget: int | None) -> int:
    states_LD = draft_alone(bench.frozen, sequence, anchor)
    log_q_LV = (states_LD @ bench.parts.head_VD.float().T).log_softmax(-1)
    best = log_q_LV.topk(bench.recipe.pairwise.candidates)
    labels = sequence.token_ids[anchor + 1 : anchor + DRAFTER.block_size].long()
    labels_L = F.pad(labels, (0, DRAFTER.block_size - 1 - len(labels)), value=NO_LABEL)
    anchors_A = sequence.token_ids[anchor : anchor + 1].long()
    known_L = labels_L != NO_LABEL
    block = [states_LD[None], anchors_A, labels_L[None], known_L[None], best.indices[None], best.values[None]]
    if tables is None:
        scores = torch.tensor(broadcast_marginals(best.values.numpy()))[None]
    else:
        scores = fill_tables(tables, DraftedBlocks(*block))
    drafts = scores, best.indices[None], labels_L[None]
    accepted = (
        accepted_by_chains(*drafts) if budget is None else accepted_by_trees_one_by_one(*drafts, budget)
    )
    return int(accepted[0])


@pytest.fixture(scope="module")
def able(tmp_path_factory) -> Workbench:
    """Whose head has learnt what follows what, so that drafts are accepted."""
    folder = tmp_path_factory.mktemp("able")
    target, ckpt = write_target(folder / "target"), write_drafter(folder / "drafter")
    settings = {"candidates": VOCAB - 6, "rank": 24, "num_anchors": 12, "budgets": [9, 60]}
    bench = Workbench(recipe_for(target, ckpt, **settings))
    bench.train_head()
    return bench


@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize("blocks_at_once", [3, 512])
def test_the_simulation_is_decoding_one_step_after_the_other(able, monkeypatch, is_scored, blocks_at_once):
    passes, budgets = watch_passes(monkeypatch), able.recipe.pairwise.budgets
    monkeypatch.setattr(pairwise_held_out, "BLOCKS_AT_ONCE", blocks_at_once)
    tables = tables_to_serve(able.head) if is_scored else None
    held_out = draft_held_out(able.frozen, able.shards, able.split)
    found = held_out.simulate(tables, budgets)
    assert found.chain == decode_by_hand(able, tables, None)
    assert found.trees == [decode_by_hand(able, tables, budget) for budget in budgets]
    assert found.trees[1] > 1
    assert (found.chain > 1.3) == is_scored
    assert sum(passes) == held_out.num_blocks
    assert max(passes) <= blocks_at_once


def watch_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks of each pass of the drafter, once they come."""
    passes, draft = [], FrozenDrafter.draft

    def draft_and_tell(self, batch):
        passes.append(len(batch.labels_AK))
        return draft(self, batch)

    monkeypatch.setattr(FrozenDrafter, "draft", draft_and_tell)
    return passes


def test_a_tenth_of_the_sequences_is_held_out_or_as_many_as_have_the_blocks(target, ckpt):
    bench = Workbench(recipe_for(target, ckpt))
    few = split_sequences(bench.shards, bench.recipe.pairwise.model_copy(update={"held_out_blocks": 1}))
    assert (len(bench.split.held_out), len(few.held_out)) == (NUM_SEQUENCES // 10, 1)
    other = split_sequences(bench.shards, bench.recipe.pairwise.model_copy(update={"seed": 1}))
    assert other.held_out.tolist() != bench.split.held_out.tolist()


# What is left


def table_of(tables: PairwiseTables, blocks: DraftedBlocks) -> torch.Tensor:
    in_fp32 = PairwiseTables(*(each.float() for each in vars(tables).values()))
    return fill_tables(in_fp32, blocks)


def test_a_head_that_learnt_nothing_gives_the_marginals_once_it_is_loaded(target, ckpt):
    recipe = recipe_for(target, ckpt, optimizer={"learning_rate": 0.0})
    home, bench = run(recipe), Workbench(recipe)
    tables = read_pairwise(home, HIDDEN, VOCAB)
    for blocks in bench.draft_step(0):
        marginals = torch.stack([torch.tensor(broadcast_marginals(q.numpy())) for q in blocks.log_probs_ALC])
        torch.testing.assert_close(table_of(tables, blocks), marginals, rtol=0, atol=2e-6)
    manifest = read_manifest(head_manifest_path(home), HeadManifest)
    assert manifest.before == manifest.after


def test_what_is_loaded_scores_as_what_was_trained(target, ckpt):
    recipe = recipe_for(target, ckpt)
    home, bench = run(recipe), Workbench(recipe)
    state = torch.load(recipe.output_dir / "pairwise" / "state.pt")
    bench.head.load_state_dict(state["head"])
    trained, loaded = bench.head.make_tables(), read_pairwise(home, HIDDEN, VOCAB)
    for blocks in bench.draft_step(0):
        found, expected = table_of(loaded, blocks), table_of(trained, blocks).detach()
        assert not torch.equal(expected, blocks.log_probs_ALC[:, :, None].expand_as(expected))
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02)  # the file is in bf16


def test_the_optimizer_is_the_recipes(target, ckpt):
    optimizer = {"learning_rate": 0.25, "weight_decay": 0.5, "betas": [0.8, 0.7]}
    recipe = recipe_for(target, ckpt, optimizer=optimizer)
    (group,) = begin_head(load_target_parts(recipe.target), recipe.pairwise).optimizer.param_groups
    assert (group["lr"], group["weight_decay"], list(group["betas"])) == (0.25, 0.5, [0.8, 0.7])


def test_a_step_is_as_long_as_its_rate_says(bench):
    head = bench.scatter_head()
    learner = HeadLearner(head, torch.optim.AdamW(head.parameters(), lr=0.5), bench.recipe.pairwise)
    before = [parameter.clone() for parameter in head.parameters()]
    learner.learn(bench.draft_step(0), 0.0)
    assert all(map(torch.equal, before, head.parameters()))
    learner.learn(bench.draft_step(0), 1e-3)
    longest = max(
        float((now - was).detach().abs().max()) for was, now in zip(before, head.parameters(), strict=True)
    )
    assert longest == pytest.approx(1e-3, rel=0.1)  # Adam's second step on one gradient


def test_two_runs_make_the_same_file_and_another_seed_another(target, ckpt):
    first, second = (run(recipe_for(target, ckpt, f"run-{number}")) for number in range(2))
    other = run(recipe_for(target, ckpt, "other", seed=1))
    assert head_bytes(first) == head_bytes(second) != head_bytes(other)


@pytest.mark.parametrize("last_step", [1, 2, 3])
def test_a_run_that_went_on_ends_as_one_that_was_not_interrupted(target, ckpt, monkeypatch, last_step):
    straight = run(recipe_for(target, ckpt, "straight"))
    recipe = recipe_for(target, ckpt)
    with monkeypatch.context() as patched:
        die_after(patched, last_step)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    assert not (recipe.output_dir / "drafter" / PAIRWISE_NAME).exists()
    home = run(recipe)
    assert head_bytes(home) == head_bytes(straight)
    assert losses(recipe) == losses(recipe_for(target, ckpt, "straight"))
    assert not list(recipe.output_dir.rglob("*.tmp"))


def die_after(patched: pytest.MonkeyPatch, last_step: int) -> None:
    """In the step after it; a save that is due before is done."""
    learn = HeadTraining._learn

    def learn_or_die(self, step: int, *rest):
        if step == last_step:
            raise KeyboardInterrupt
        return learn(self, step, *rest)

    patched.setattr(HeadTraining, "_learn", learn_or_die)


def losses(recipe: Recipe) -> dict[int, float]:
    """By step; one that was taken again counts as it was then.

    File by file: TensorBoard sorts those of one second by name, where 10 comes before 9.
    """
    files = (recipe.output_dir / "tensorboard" / "pairwise").iterdir()
    events = [
        EventAccumulator(str(path)).Reload()
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)
    ]
    return {point.step: point.value for each in events for point in points(each, "pairwise/loss")}


def points(events: EventAccumulator, tag: str) -> list:
    return events.Scalars(tag) if tag in events.Tags()["scalars"] else []


def test_a_save_that_is_killed_leaves_the_state_before_it(target, ckpt, monkeypatch):
    straight = run(recipe_for(target, ckpt, "straight"))
    recipe, saved = recipe_for(target, ckpt), []

    def save_or_die(path: Path) -> None:
        if len(saved) == 2 and path.name.endswith(".tmp"):
            raise KeyboardInterrupt
        saved.append(path)

    with monkeypatch.context() as patched:
        patched.setattr(pairwise_state, "sync_path", save_or_die)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    assert json.loads(torch.load(recipe.output_dir / "pairwise" / "state.pt")["manifest"])["step"] == 2
    assert head_bytes(run(recipe)) == head_bytes(straight)


def test_run_again_it_says_the_same(target, ckpt, capsys):
    recipe = recipe_for(target, ckpt)
    before = contents(run(recipe))
    table = capsys.readouterr().out.splitlines()[-5:]
    after = contents(run(recipe))
    assert capsys.readouterr().out.splitlines()[-5:] == table
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed <= {"pairwise/draftsmith.json"}  # which says when


def test_a_head_with_more_steps_than_are_asked_for_says_how_many(target, ckpt):
    recipe = recipe_for(target, ckpt)
    longer = head_bytes(run(recipe))
    home = run(recipe, "pairwise.steps=2")
    assert head_bytes(home) == longer
    assert read_manifest(head_manifest_path(home), HeadManifest).step == 4


def test_a_curve_of_the_acceptance_with_and_without_stands_beside_the_loss(target, ckpt):
    recipe = recipe_for(target, ckpt)
    home = run(recipe)
    events = EventAccumulator(str(recipe.output_dir / "tensorboard" / "pairwise")).Reload()
    tags = {f"pairwise/{name}{end}" for name in ("chain", "tree_3", "tree_9") for end in ("", "_without")}
    assert tags <= set(events.Tags()["scalars"])
    last = {name: events.Scalars(f"pairwise/{name}")[-1] for name in ("chain", "chain_without")}
    said = read_manifest(head_manifest_path(home), HeadManifest)
    pairs: Sequence[tuple[str, Simulated]] = [("chain", said.after), ("chain_without", said.before)]
    for name, simulated in pairs:
        assert last[name].step == 4
        assert last[name].value == pytest.approx(simulated.chain)


# Tables from the target's rows


@pytest.mark.parametrize("numbers", [1, 3 * HIDDEN, 40 * HIDDEN, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_made_in_pieces_is_the_one_made_at_once(monkeypatch, numbers, dtype):
    monkeypatch.setattr(pairwise, "ROW_NUMBERS", numbers)
    rows_VD = torch.randn(VOCAB + 1, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, table = rows_VD.clone(), ProjectedTable(rows_VD, 5)
    torch.nn.init.normal_(table.weight)
    slope_Vr = torch.randn(VOCAB + 1, 5)
    (found,) = torch.autograd.grad(table(), table.weight, slope_Vr)
    unit_VD = rows_VD.float() / math.sqrt(float(rows_VD.float().square().sum() / (VOCAB + 1)))
    torch.testing.assert_close(table(), unit_VD @ table.weight)
    torch.testing.assert_close(found, unit_VD.T @ slope_Vr)
    assert torch.equal(rows_VD, before)
    assert table.rows_VD.data_ptr() == rows_VD.data_ptr()


def test_no_draft_begins_at_an_answers_last_token():
    loss_mask = torch.tensor([0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    assert decoding_anchors(loss_mask).tolist() == [1, 4, 5]
