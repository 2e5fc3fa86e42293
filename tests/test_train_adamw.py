"""The optimizer: its kernel and its twin beside torch's, its states in torch's hands, both in DeepSpeed."""

# N=elements of a tensor

from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from kernel_compile import run_apart
from test_train_step import assert_same, start, take_steps, train_settings

from recipes.schema import Train
from train import adamw, zero
from train.adamw import AdamW
from train.step import Learner
from train.zero import engine_config, load_state, save_state

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = adamw._BLOCK
SIZES = (1, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 17)
STEPS = 4
SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-8}
WAYS = {"kernel": {DEVICE.type}, "plain": set()}

Weights = list[torch.Tensor]


def draw_weights(sizes=SIZES) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(DEVICE).requires_grad_() for size in sizes]


def give_gradients(weights: Weights, step: int) -> None:
    """Of all magnitudes, with zeros among them."""
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        normal_N, power_N = (torch.randn(len(weight), generator=generator) for _ in range(2))
        weight.grad = ((normal_N * (normal_N > -1)) * 10**power_N).to(DEVICE)


def take(optimizer: torch.optim.Optimizer, weights: Weights, steps=range(STEPS)) -> None:
    for step in steps:
        give_gradients(weights, step)
        optimizer.step()


def moments_of(state: dict[torch.Tensor, dict], weights: Weights) -> Weights:
    return [state[weight][name] for weight in weights for name in ("exp_avg", "exp_avg_sq")]


def assert_close(found: Weights, expected: Weights, tolerance: float = 1e-6) -> None:
    """Relative; of what is near 0, as a difference may be, to the mean."""
    for mine, other in zip(found, expected, strict=True):
        mean = float(other.detach().abs().mean())
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * mean)


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    monkeypatch.setattr(adamw, "KERNEL_ON", WAYS[request.param])
    return request.param


# Beside torch's


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_weights_and_moments_are_torchs_at_any_size(weight_decay, way):
    mine, theirs = draw_weights(), draw_weights()
    ours = AdamW(mine, **SETTINGS, weight_decay=weight_decay)
    stock = torch.optim.AdamW(theirs, **SETTINGS, weight_decay=weight_decay)
    take(ours, mine)
    take(stock, theirs)
    assert_close(mine, theirs)
    assert_close(moments_of(ours.state, mine), moments_of(stock.state, theirs))


def test_defaults_are_torchs():
    stock = torch.optim.AdamW(draw_weights()).defaults
    ours = AdamW(draw_weights()).defaults
    assert ours == {name: stock[name] for name in ours}


def test_scaled_gradients_are_those_of_a_smaller_loss_and_stay_as_they_are(way):
    factor = torch.tensor(0.3, device=DEVICE)
    mine, theirs = draw_weights(), draw_weights()
    ours, stock = AdamW(mine, **SETTINGS, scale=lambda: factor), torch.optim.AdamW(theirs, **SETTINGS)
    for step in range(STEPS):
        take(ours, mine, [step])
        give_gradients(theirs, step)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))
        for weight in theirs:
            weight.grad *= factor
        stock.step()
    assert_close(mine, theirs)
    assert_close(moments_of(ours.state, mine), moments_of(stock.state, theirs))


def test_each_step_asks_for_its_scale():
    factors = iter([torch.tensor(0.5, device=DEVICE), torch.tensor(2.0, device=DEVICE)])
    weights = draw_weights([5])
    optimizer = AdamW(weights, lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, scale=lambda: next(factors))
    for expected in (0.5, 2.0):
        weights[0].grad = torch.ones_like(weights[0])
        optimizer.step()
        assert_close([optimizer.state[weights[0]]["exp_avg"]], [torch.full((5,), expected, device=DEVICE)])


def test_a_parameter_without_a_gradient_is_left_alone(way):
    kept, changed = draw_weights([5, 5])
    before = kept.detach().clone()
    changed.grad = torch.ones_like(changed)
    optimizer = AdamW([kept, changed])
    optimizer.step()
    assert torch.equal(kept, before)
    assert kept not in optimizer.state


def test_a_learning_rate_counts_from_the_next_step_on(way):
    weights = draw_weights([9])
    before = weights[0].detach().clone()
    optimizer = AdamW(weights, **SETTINGS, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 0.0
    take(optimizer, weights)
    assert torch.equal(weights[0], before)


# States


def stock_adamw(weights: Weights) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, **SETTINGS)


def fused_adamw(weights: Weights) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, **SETTINGS, fused=True)


def own_adamw(weights: Weights) -> torch.optim.Optimizer:
    return AdamW(weights, **SETTINGS)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(own_adamw, own_adamw), (own_adamw, stock_adamw), (stock_adamw, own_adamw), (fused_adamw, own_adamw)],
)
def test_a_state_of_one_goes_on_in_the_other(writer, reader, way):
    expected = draw_weights()
    take(stock_adamw(expected), expected, range(2 * STEPS))
    weights = draw_weights()
    first = writer(weights)
    take(first, weights)
    second = reader(weights)
    second.load_state_dict(deepcopy(first.state_dict()))
    take(second, weights, range(STEPS, 2 * STEPS))
    assert_close(weights, expected)


@pytest.mark.parametrize("writer", [own_adamw, stock_adamw, fused_adamw])
def test_steps_are_counted_on_the_host_under_torchs_names(writer):
    weights = draw_weights([3])
    first, optimizer = writer(weights), own_adamw(weights)
    take(first, weights)
    optimizer.load_state_dict(first.state_dict())
    (state,) = optimizer.state.values()
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
    assert torch.equal(state["step"], torch.tensor(float(STEPS)))  # on a CPU, fp32


# On a GPU


COMPILE = """
import triton
from kernel_compile import stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from train import adamw

TENSORS = ("weights", "gradients", "means", "squares")

def build(capability, size, is_scaled):
    kernel = adamw._update_kernel
    types = dict.fromkeys(kernel.arg_names, "fp32") | dict.fromkeys(TENSORS, "*fp32")
    types |= {"size": size, "scale": "*fp32" if is_scaled else "constexpr", "BLOCK": "constexpr"}
    signature = {name: types[name] for name in kernel.arg_names}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in TENSORS}
    constants = {"BLOCK": adamw._BLOCK} | ({} if is_scaled else {"scale": None})
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": adamw._WARPS}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

for capability in (86, 90):
    for size in ("i32", "i64"):
        for is_scaled in (False, True):
            built = build(capability, size, is_scaled)
            wide = [built.asm["ptx"].count(f"{each}.global.v4.b32") for each in ("ld", "st")]
            print(stack_bytes(built.asm["cubin"]), *wide)
"""


def test_the_kernel_compiles_for_sm_86_and_sm_90_without_spills_and_moves_16_bytes_at_a_time(tmp_path):
    numbers = run_apart(COMPILE, tmp_path)
    assert (
        numbers == [(0, 2 * 4, 2 * 3)] * 8
    )  # by each thread, of 4 tensors to 3; what spills goes to the stack


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_nothing_is_read_back_to_the_host():
    weights = draw_weights()
    factor = torch.tensor(0.5, device=DEVICE)
    optimizer = AdamW(weights, scale=lambda: (1 / (factor + 1e-6)).clamp(max=1))
    take(optimizer, weights)
    with forbidden_waits():
        optimizer.step()


@contextmanager
def forbidden_waits():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def has_gpu_memory(gib: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > gib << 30


@pytest.mark.skipif(not has_gpu_memory(40), reason="needs a GPU of 40 GiB")
def test_elements_past_2_31_are_reached():
    weight = torch.ones((1 << 31) + 5, device=DEVICE, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    AdamW([weight], lr=0.25, weight_decay=0.0).step()
    ends = torch.cat([weight.detach()[:9], weight.detach()[-9:]])
    torch.testing.assert_close(ends, torch.full_like(ends, 0.75))


# In DeepSpeed


@pytest.fixture(scope="module")
def ranks(only_rank):
    return only_rank


@pytest.fixture(autouse=True)
def own_here(monkeypatch):
    """As on a GPU; called with False, as on a CPU."""

    def choose(is_own: bool) -> None:
        monkeypatch.setattr(zero, "OWN_ADAMW_ON", {DEVICE.type} if is_own else set())

    choose(True)
    return choose


def bf16_settings(stage: int, **optimizer: object) -> Train:
    return train_settings(precision="bfloat16", zero_stage=stage, optimizer=optimizer)


def tensors_of(learner: Learner) -> Weights:
    """Masters and moments: no rounding to bf16 hides a difference.

    To compare after one step: from then on a weight that is rounded to bf16 the other way changes gradients.
    """
    state = learner.engine.basic_optimizer.state
    return [each.detach().clone() for master in state for each in (master, *moments_of(state, [master]))]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_drafter_learns_as_with_torchs(stage, ranks, own_here, way):
    outcomes, tensors = [], []
    for is_own in (True, False):
        own_here(is_own)
        learner, feed = start(ranks, bf16_settings(stage, weight_decay=0.1))
        assert type(learner.engine.basic_optimizer) is (AdamW if is_own else torch.optim.AdamW)
        first = take_steps(learner, feed, ranks, range(1))
        tensors.append(tensors_of(learner))
        outcomes.append((first, take_steps(learner, feed, ranks, range(1, 3))))
    for found, expected in zip(*outcomes, strict=True):
        assert_same(found, expected, 1e-5)
    assert_close(*tensors)


@pytest.mark.parametrize(("limit", "clips"), [(0.02, True), (50.0, False)])
@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_gradients_as_they_are_read_is_deepspeeds(stage, limit, clips, ranks, monkeypatch):
    outcomes, tensors = [], []
    for limit_of_deepspeed in (0.0, limit):
        monkeypatch.setattr(zero, "_clips_itself", lambda *_, itself=limit_of_deepspeed == 0: itself)
        learner, feed = start(ranks, bf16_settings(stage, gradient_clipping=limit))
        assert learner.engine.optimizer.clip_grad == limit_of_deepspeed
        first = take_steps(learner, feed, ranks, range(1))
        tensors.append(tensors_of(learner))
        outcomes.append((first, take_steps(learner, feed, ranks, range(1, 3))))
    assert all((norm > limit) == clips for each in outcomes[0] for norm in each.gradient_norms)
    for found, expected in zip(*outcomes, strict=True):
        assert_same(found, expected, 1e-5)
    assert_close(*tensors)


@pytest.mark.parametrize("writes_own", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_state_is_clipped_once_whoever_wrote_it(stage, writes_own, ranks, own_here, tmp_path):
    """A state from a GPU, where DeepSpeed does not clip, goes on where it does, and the other way round."""
    train = bf16_settings(stage, gradient_clipping=0.02)
    own_here(writes_own)
    learner, feed = start(ranks, train)
    take_steps(learner, feed, ranks)
    save_state(learner.engine, tmp_path / "state")
    own_here(not writes_own)
    fresh, feed = start(ranks, train)
    load_state(fresh.engine, tmp_path / "state")
    outcomes = [take_steps(each, feed, ranks, range(3, 4)) for each in (fresh, learner)]
    assert_same(*outcomes, 1e-5)
    assert_close(tensors_of(fresh), tensors_of(learner))
    outcomes = [take_steps(each, feed, ranks, range(4, 6)) for each in (fresh, learner)]
    assert_same(*outcomes, 1e-5)


def test_only_bf16_without_offload_has_it():
    assert "optimizer" not in engine_config(bf16_settings(1), DEVICE.type)
    for changes in ({"precision": "float32"}, {"precision": "bfloat16", "offload_optimizer": True}):
        config = engine_config(train_settings(**changes), DEVICE.type)
        assert config["optimizer"]["type"] == "AdamW"
        assert config["gradient_clipping"] > 0
