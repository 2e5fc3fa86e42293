"""The delta rule in training is transformers' own, value and gradient."""

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from train.code_target import SIZES, architecture, token_loss
from train.delta_rule import causal_convolution, gated_delta_rule, invert_unit_lower, quick_delta_layers


def draw_states(tokens: int, heads: int = 3, width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = 2, tokens, heads
    queries, keys, values = (torch.randn(*shape, width, generator=generator) for _ in range(3))
    keys = keys + 1.5  # alike, so that a chunk's system is far from the identity
    log_decay = -torch.rand(shape, generator=generator) * 0.3
    strength = torch.rand(shape, generator=generator)
    return [each.requires_grad_() for each in (queries, keys, values, log_decay, strength)]


def gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad((output * weight).sum(), inputs))


@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 191])
def test_the_rule_is_transformers_own_value_and_gradient(tokens: int):
    inputs = draw_states(tokens)
    *states, log_decay, strength = inputs
    ours = gated_delta_rule(*inputs)
    other, _ = theirs.torch_recurrent_gated_delta_rule(
        *states,
        g=log_decay,
        beta=strength,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)
    for mine, its in zip(gradients(ours, inputs), gradients(other, inputs), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("tokens", [2, 4, 9])
def test_the_convolution_is_transformers_own(tokens: int):
    generator = torch.Generator().manual_seed(tokens)
    states = torch.randn(2, 6, tokens, generator=generator, requires_grad=True)
    weight = torch.randn(6, 4, generator=generator, requires_grad=True)
    ours = causal_convolution(states, weight)
    other = theirs.causal_conv1d_fn(states, weight, None, activation="silu")
    torch.testing.assert_close(ours, other)
    for mine, its in zip(gradients(ours, [states, weight]), gradients(other, [states, weight]), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_a_triangle_times_its_inverse_is_the_identity():
    given = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.3
    whole = torch.eye(64, dtype=torch.float64) + given.tril(-1)
    torch.testing.assert_close(invert_unit_lower(given) @ whole, torch.eye(64).expand_as(whole).double())


def test_a_model_has_the_same_loss_and_gradients_with_it():
    torch.manual_seed(0)
    model = theirs.Qwen3_5ForCausalLM(architecture(SIZES["tiny"]))
    rows = torch.randint(8, 512, (2, 81))

    def learn() -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss = token_loss(model, rows)
        loss.backward()
        return loss.item(), torch.cat([each.grad.flatten() for each in model.parameters()])

    plain_loss, plain = learn()
    with quick_delta_layers():
        assert theirs.causal_conv1d_fn is causal_convolution
        quick_loss, quick = learn()
    assert theirs.causal_conv1d_fn is not causal_convolution
    assert abs(plain_loss - quick_loss) < 2e-3
    assert torch.cosine_similarity(plain, quick, 0) > 0.999
