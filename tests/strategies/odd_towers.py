"""Unusual towers: nested outputs, in-place operations, generators, adapters, caches."""

import dataclasses
from collections import UserDict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.strategies.models import WIDTH, WIDTH_IN, TinyCLIP, make_tower


@dataclasses.dataclass(frozen=True)
class Features:
    features: Tensor
    name: str


class ADict(dict):
    """A dict subclass that pytrees do not know."""


class Mean(UserDict):
    """A `UserDict`, like `BatchFeature` and `BatchEncoding`."""


class OddCLIP(TinyCLIP):
    """`TinyCLIP` without dropout, whose image tower is called by `encode`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dropout=0.0, **kwargs)

    def encode(self, image: Tensor) -> Tensor:
        return self.visual(image)

    def features(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        image, text = batch
        return (
            F.normalize(self.head(self.encode(image)), dim=-1),
            F.normalize(self.text(text), dim=-1),
        )


class Returns(nn.Module):
    """Returns its features in a nested structure."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.tower, self.pack = make_tower(0.0), pack

    def forward(self, batch: Tensor) -> Any:
        return self.pack(self.tower(batch))


class ReturnsStructure(OddCLIP):
    def __init__(self, pack: Any, unpack: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.visual, self.unpack = Returns(pack), unpack

    def encode(self, image: Tensor) -> Tensor:
        return self.unpack(self.visual(image))


def _in_a_dataclass() -> OddCLIP:
    return ReturnsStructure(lambda x: Features(x, "image"), lambda out: out.features)


def _in_a_user_dict() -> OddCLIP:
    return ReturnsStructure(lambda x: Mean({"x": x}), lambda out: out["x"])


def _in_a_dict_subclass() -> OddCLIP:
    return ReturnsStructure(lambda x: ADict(x=[x]), lambda out: out["x"][0])


class Takes(nn.Module):
    """Takes further arguments besides the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = make_tower(0.0)
        self.embed = nn.Embedding(5, WIDTH_IN)

    def forward(self, prompt: Any, batch: Any, names: list[str], parts: list[Tensor]) -> Tensor:
        ids = torch.tensor([len(name) % 5 for name in names])
        x = batch["pixels"] + sum(parts) + prompt.mean(0) + self.embed(ids)
        return self.tower(x)


class TakesStructure(OddCLIP):
    """A prompt before the batch, a `UserDict`, a list of strings, a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.visual, self.stem = Takes(), nn.Linear(WIDTH_IN, WIDTH_IN)

    def encode(self, image: Tensor) -> Tensor:
        prompt = self.stem(torch.ones(4, WIDTH_IN))
        names = ["x" * row for row in range(len(image))]
        return self.visual(prompt, Mean(pixels=image), names, [image, image * 2])


class InPlace(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, batch: Tensor) -> Tensor:
        return self.tower(batch.mul_(1.5).sub_(0.1))


class WritesToItsInput(OddCLIP):
    def __init__(self) -> None:
        super().__init__()
        self.visual = InPlace(self.visual)

    def encode(self, image: Tensor) -> Tensor:
        # In-place changes of the batch are visible afterwards, as without the cache.
        return self.visual(image) + 0.1 * image.mean()


class WritesToActivations(OddCLIP):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.stem = InPlace(self.visual), nn.Linear(WIDTH_IN, WIDTH_IN)

    def encode(self, image: Tensor) -> Tensor:
        return self.visual(self.stem(image))


class OwnNoise(nn.Module):
    """Draws one number per row, so that micro-batches draw the same numbers as the whole batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tower = make_tower(0.0)
        self.torch = torch.Generator().manual_seed(5) if kind == "torch" else None
        self.numpy = np.random.default_rng(5) if kind == "numpy" else None

    def forward(self, batch: Tensor) -> Tensor:
        if self.numpy is not None:
            noise = torch.tensor(self.numpy.random((len(batch), 1)), dtype=batch.dtype)
        else:
            noise = torch.rand(len(batch), 1, generator=self.torch)
        return self.tower(batch * noise)


class OwnGenerator(OddCLIP):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.visual = OwnNoise(kind)


class FrozenWithAdapter(OddCLIP):
    """A frozen tower with an adapter in a hook and a prompt in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.visual.requires_grad_(False)
        self.adapter = nn.Linear(32, 32)
        self.prompt = nn.Parameter(torch.zeros(WIDTH_IN))
        self.made = nn.Parameter(torch.ones(WIDTH_IN))
        self.visual[0].register_forward_hook(lambda module, args, out: out + self.adapter(out))
        self.visual[0].register_forward_pre_hook(
            lambda module, args: (args[0] + self.prompt + self.shift,)
        )

    def encode(self, image: Tensor) -> Tensor:
        self.shift = self.made.sigmoid() ** 2  # a graph that all micro-batches share
        return self.visual(image)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.tower = nn.Linear(WIDTH_IN, WIDTH_IN), make_tower(0.0)
        self.reentrant = reentrant

    def forward(self, batch: Tensor) -> Tensor:
        return checkpoint(self.tower, self.first(batch), use_reentrant=self.reentrant)


class WithCheckpoints(OddCLIP):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.visual = Checkpointed(reentrant)


class StartsAtALeaf(Checkpointed):
    """Makes the output of a frozen layer a leaf, as `enable_input_require_grads` does."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.first.requires_grad_(False)
        self.first.register_forward_hook(lambda module, args, out: out.requires_grad_())


class WithLeaves(OddCLIP):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.visual, self.text = StartsAtALeaf(True), StartsAtALeaf(False)


class Rotary(nn.Module):
    """Buffers that grow, are expanded, count calls, or never change."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = make_tower(0.0)
        self.register_buffer("cache", torch.ones(1), persistent=False)
        self.register_buffer("ids", torch.ones(WIDTH_IN).expand(1, -1))
        self.register_buffer("scale", torch.full((WIDTH_IN,), 0.5))
        self.cached = 1

    def forward(self, batch: Tensor) -> Tensor:
        if self.cached < batch.shape[1]:
            self.cached = batch.shape[1]
            self.cache = torch.linspace(0.5, 1.5, self.cached)
        assert len(self.cache) == self.cached
        return self.tower(batch * self.cache * self.ids[0])


class WithBuffers(OddCLIP):
    """Uses buffers of a tower before and between its calls, where autograd saves them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.visual, self.stem = Rotary(), nn.Linear(WIDTH_IN, WIDTH_IN)

    def encode(self, image: Tensor) -> Tensor:
        first = self.visual(self.stem(image) * self.visual.scale)
        return first + self.visual(self.stem(image) * self.visual.scale)


class Hooked(OddCLIP):
    """Counts hooks that change gradients and post-accumulate hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"hooks": 0, "post": 0}
        for p in self.parameters():
            p.register_hook(self._clamp)
            p.register_post_accumulate_grad_hook(self._count)

    def _clamp(self, grad: Tensor) -> Tensor:
        self.calls["hooks"] += 1
        return grad.clamp(-0.01, 0.01)

    def _count(self, parameter: Tensor) -> None:
        self.calls["post"] += 1


class StepsInBackward(OddCLIP):
    """Steps each parameter as soon as its gradient is accumulated."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self._step)

    @staticmethod
    @torch.no_grad()
    def _step(parameter: Tensor) -> None:
        parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None


class TakesGradients(OddCLIP):
    """Computes gradients of a tower, and adds their norm to the batch."""

    def encode(self, image: Tensor) -> Tensor:
        pixels = image.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.visual(pixels).square().sum(), pixels)
        return self.visual(image + grad)


class Experts(nn.Module):
    """An expert that only some rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.expert = make_tower(0.0), nn.Linear(WIDTH_IN, WIDTH)

    def forward(self, batch: Tensor, ids: Tensor) -> Tensor:
        out = self.tower(batch)
        if bool((ids > 5).any()):
            out = out + (ids > 5)[:, None] * self.expert(batch)
        return out


class WithExperts(OddCLIP):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.visual = Experts()

    def encode(self, image: Tensor) -> Tensor:
        return self.visual(image, torch.arange(len(image)))


ODD: dict[str, Any] = {
    "dataclass": _in_a_dataclass,
    "UserDict": _in_a_user_dict,
    "dict subclass": _in_a_dict_subclass,
    "structures in": TakesStructure,
    "in place": WritesToItsInput,
    "in place on activations": WritesToActivations,
    "torch.Generator": lambda: OwnGenerator("torch"),
    "default_rng": lambda: OwnGenerator("numpy"),
    "frozen with an adapter": FrozenWithAdapter,
    "reentrant checkpoint": lambda: WithCheckpoints(True),
    "checkpoint": lambda: WithCheckpoints(False),
    "activations as leaves": WithLeaves,
    "buffers": WithBuffers,
    "hooks": Hooked,
    "optimizer in backward": StepsInBackward,
    "gradients of a tower": TakesGradients,
    "experts": WithExperts,
}
