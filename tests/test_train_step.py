"""An optimizer step in a real DeepSpeed engine: what must not change it, and what must stop it."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from small_training import DRAFTER, HIDDEN, VOCAB, make_sequence, small_recipe

from recipes.errors import MachineError, UserError
from recipes.schema import Train
from serve.checkpoint import published_config
from train.batches import worst_case_batch
from train.drafter import DFlashDrafter
from train.feed import Feed
from train.resume import Progress, RunFolders
from train.saving import Saver
from train.step import Learner
from train.target_parts import TargetParts
from train.zero import TORCH_DTYPES, engine_config, gather_weights, load_state, save_state, start_engine

SEQUENCES = [make_sequence(index) for index in range(8)]


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


def train_settings(**changes) -> Train:
    settings = {
        "steps": 9,
        "sequences_per_step": 4,
        "micro_batch_sequences": 2,
        "num_anchors": 4,
        "precision": "float32",
        "zero_stage": 1,
    }
    return Train.model_validate(settings | changes)


def start(ranks, train: Train) -> tuple[Learner, Feed]:
    generator = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    parts = TargetParts(embedding, 0.2 * head).to(ranks.device, TORCH_DTYPES[train.precision])
    torch.manual_seed(0)
    engine = start_engine(DFlashDrafter(DRAFTER, HIDDEN), train, ranks)
    return Learner(engine, parts, train, ranks), Feed(SEQUENCES, train, DRAFTER, 0, 1)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    gradient_norms: list[float | None]  # Adam hides a gradient's scale, its norm does not
    weights: dict[str, torch.Tensor]  # as published, bf16


def take_steps(learner: Learner, feed: Feed, ranks, steps=range(3)) -> Outcome:
    totals = [learner.learn(feed.read_step(step), 5e-3) for step in steps]
    return Outcome(
        [each.loss for each in totals],
        [each.gradient_norm for each in totals],
        gather_weights(learner.engine, ranks),
    )


def assert_same(found: Outcome, expected: Outcome, tolerance: float) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    if found.gradient_norms[0] is not None:
        assert found.gradient_norms == pytest.approx(expected.gradient_norms, rel=10 * tolerance)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, atol=1e-2, rtol=1e-2)


@pytest.fixture(scope="module")
def reference(ranks):
    return take_steps(*start(ranks, train_settings()), ranks)


def test_the_loss_falls(reference):
    assert reference.losses[2] < reference.losses[0]


@pytest.mark.parametrize("size", [1, 4])
def test_how_a_step_is_split_into_micro_batches_changes_nothing(size, ranks, reference):
    train = train_settings(micro_batch_sequences=size)
    assert_same(take_steps(*start(ranks, train), ranks), reference, 1e-5)


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
)
def test_zero_stages_learn_the_same(stage, offload, ranks, reference):
    train = train_settings(zero_stage=stage, offload_optimizer=offload)
    assert_same(take_steps(*start(ranks, train), ranks), reference, 1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_follows_fp32_at_every_stage(stage, ranks, reference):
    train = train_settings(zero_stage=stage, precision="bfloat16")
    outcome = take_steps(*start(ranks, train), ranks)
    assert outcome.losses == pytest.approx(reference.losses, rel=5e-2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_rehearsing_the_worst_case_changes_nothing(stage, ranks, reference):
    learner, feed = start(ranks, train_settings(zero_stage=stage))
    learner.rehearse(worst_case_batch(2, 40, 4, DRAFTER, HIDDEN))
    assert_same(take_steps(learner, feed, ranks), reference, 1e-5)


@pytest.mark.parametrize(("stage", "precision"), [(1, "float32"), (2, "bfloat16"), (3, "float32")])
def test_a_state_saved_and_loaded_learns_on_as_if_nothing_had_happened(stage, precision, ranks, tmp_path):
    train = train_settings(zero_stage=stage, precision=precision)
    learner, feed = start(ranks, train)
    take_steps(learner, feed, ranks)
    save_state(learner.engine, tmp_path / "state")
    straight = take_steps(learner, feed, ranks, range(3, 6))
    fresh, feed = start(ranks, train)
    load_state(fresh.engine, tmp_path / "state")
    assert_same(take_steps(fresh, feed, ranks, range(3, 6)), straight, 1e-7)


def test_the_loss_of_a_step_is_the_weighted_mean_over_its_supervised_slots(ranks):
    learner, feed = start(ranks, train_settings())
    micro_batches = feed.read_step(0)
    loss_sum = weight_sum = 0.0
    for micro in micro_batches:
        batch = micro.batch.to(ranks.device, torch.float32)
        with torch.no_grad():
            hidden_QD = learner.engine.module(
                batch.taps_SE,
                batch.context_positions_S,
                learner.parts.embedding_VD[batch.input_ids_Q],
                batch.block_positions_Q,
                batch.views,
            )
        log_probs = (hidden_QD @ learner.parts.head_VD.T).log_softmax(-1).view(*batch.labels_AK.shape, -1)
        for block, slot in batch.supervised_AK.nonzero().tolist():
            weight = math.exp(-(slot - 1) / 7.0)
            loss_sum -= weight * float(log_probs[block, slot, batch.labels_AK[block, slot]])
            weight_sum += weight
    totals = learner.learn(micro_batches, 1e-3)
    assert totals.weight_sum == pytest.approx(weight_sum, rel=1e-6)
    assert totals.loss == pytest.approx(loss_sum / weight_sum, rel=1e-5)
    assert totals.num_tokens == sum(
        len(SEQUENCES[visit.index].token_ids) for micro in micro_batches for visit in micro.visits
    )


def test_sums_of_zero_1_in_bf16_are_fp32_and_no_gradient_stays(ranks):
    learner, feed = start(ranks, train_settings(precision="bfloat16", micro_batch_sequences=1))
    parameters = dict(learner.engine.module.named_parameters())
    seen = {name: [] for name in parameters}
    for name, parameter in parameters.items():
        parameter.register_hook(lambda gradient, of=seen[name]: of.append(gradient.float().view(-1)))
    for micro in feed.read_step(0):
        learner._backward(learner.sender.send(micro.batch).receive(), 1e-2)
    (sums,) = learner.engine.optimizer.fp32_groups_gradients
    assert sums[0].dtype == torch.float32
    for of_parameter, total in zip(seen.values(), sums, strict=True):
        assert len(of_parameter) == 4
        assert torch.equal(total, sum(of_parameter[1:], of_parameter[0]))
    assert all(parameter.grad is None for parameter in parameters.values())


def test_sums_of_zero_1_are_not_rounded_on_their_way_between_ranks():
    config = engine_config(train_settings(precision="bfloat16"), "cuda")
    assert config["communication_data_type"] == "fp32"


def weights_of(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.engine.module.parameters()]


def test_a_sequence_with_a_feature_that_is_not_finite_is_named_before_any_weight_changes(ranks):
    learner, feed = start(ranks, train_settings())
    micro_batches = feed.read_step(0)
    sick = micro_batches[1]
    sick.batch.taps_SE[sick.batch.documents[0].context.start + 2, 5] = torch.nan
    before = weights_of(learner)
    with pytest.raises(MachineError, match=rf"tap states of sequence {sick.visits[0].index} of the shards"):
        learner.learn(micro_batches, 1e-2)
    assert all(torch.equal(*pair) for pair in zip(before, weights_of(learner), strict=True))


def test_a_loss_that_diverges_on_sound_features_is_told_apart(ranks):
    learner, feed = start(ranks, train_settings())
    learner.parts.head_VD[0, 0] = torch.inf
    with pytest.raises(UserError, match=r"sequences .* whose tap states are: the training diverged"):
        learner.learn(feed.read_step(0), 1e-2)


def test_gradients_are_clipped_as_the_recipe_says():
    train = train_settings(optimizer={"gradient_clipping": 0.25, "betas": [0.8, 0.9]})
    config = engine_config(train, "cpu")
    assert config["gradient_clipping"] == 0.25
    assert config["optimizer"]["params"]["betas"] == [0.8, 0.9]


@pytest.mark.parametrize(
    ("device", "offload", "torch_adam"), [("cpu", True, True), ("cuda", False, True), ("cuda", True, False)]
)
def test_nothing_is_compiled_unless_host_states_feed_a_gpu(device, offload, torch_adam):
    config = engine_config(train_settings(offload_optimizer=offload), device)
    assert config["optimizer"]["params"]["torch_adam"] is torch_adam


def test_a_full_disk_is_told_before_anything_is_written(ranks, tmp_path, monkeypatch):
    learner, _ = start(ranks, train_settings())
    recipe = small_recipe(tmp_path, tmp_path)
    config = published_config(DRAFTER, {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 4})
    saver = Saver(recipe, RunFolders(tmp_path), config, None, ranks, None)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(
        MachineError, match=r"a checkpoint and its state take .* GiB, the disk has .* GiB left"
    ):
        saver.save(learner.engine, Progress(sequences_seen=4))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
