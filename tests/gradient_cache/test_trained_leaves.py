"""What a call trains: parameters, and tensors that towers keep, return or get from elsewhere."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mp import GradientCache

BATCH, WIDTH = 6, 4


class Prompted(nn.Module):
    """Adds a prompt of another module, and returns its own scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.stem = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.notes: list[Tensor] = []  # never used

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x + self.prompt).tanh(), self.scale

    def loss(self, call: Any, x: Tensor) -> Tensor:
        self.prompt = self.stem(x.new_ones(WIDTH)).tanh()
        features, scale = call(self, x)
        # The loss uses the prompt and the scale, too.
        return (scale * features @ features.T).logsumexp(1).sum() + self.prompt.exp().sum() + scale


@pytest.mark.parametrize("rows", [2, 4])
def test_prompt_of_another_module_and_a_returned_parameter_have_exact_gradients(rows: int) -> None:
    tower, x = Prompted().double(), torch.randn(BATCH, WIDTH, dtype=torch.float64)
    parameters = list(tower.parameters())
    expected = torch.autograd.grad(tower.loss(lambda tower, x: tower(x), x), parameters)
    cache = GradientCache(micro_batch_size=rows, roles={"[1]": "whole"})
    found = torch.autograd.grad(tower.loss(cache.call, x), parameters)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.used(x), self.unused(x), x * 2


def test_parameters_of_an_unused_output_get_no_gradient_and_constants_need_none() -> None:
    tower, seen = TwoHeads(), []
    tower.unused.bias.register_hook(lambda gradient: seen.append(gradient.norm()))
    out = GradientCache(micro_batch_size=2).call(tower, torch.randn(BATCH, WIDTH))
    assert [each.requires_grad for each in out] == [True, True, False]
    (out[0] * out[2]).sum().backward()
    assert tower.used.weight.grad is not None
    assert tower.unused.weight.grad is None, "weight decay would act on zeros"
    assert not any(seen)


def test_loss_of_a_tensor_that_a_hook_keeps_raises() -> None:
    tower, kept = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), []
    tower[0].register_forward_hook(lambda _module, _args, output: kept.append(output))
    features = GradientCache(micro_batch_size=2).call(tower, torch.randn(BATCH, WIDTH))
    with pytest.raises(RuntimeError, match="tower `Sequential` computed but did not return"):
        (features.sum() + kept[-1].sum()).backward()


def test_checkpoint_in_a_function_without_modules_has_exact_gradients() -> None:
    def tower(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(lambda x, weight: (x @ weight).tanh(), x, weight, use_reentrant=True)

    x, weight = torch.randn(BATCH, WIDTH), torch.randn(WIDTH, 3, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ weight).tanh().square().sum(), weight)
    GradientCache(micro_batch_size=2).call(tower, x, weight).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected)
