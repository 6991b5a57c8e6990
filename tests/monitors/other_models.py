"""Healthy runs of other kinds: images, two optimizers, rewards, pairs, adapters, odd losses."""

import math
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import ContrastiveLoss
from tests.monitors.running import Learner

BATCH, SIDE, CLASSES = 16, 16, 4


def images(generator: torch.Generator) -> list[Tensor]:
    """Return noise images with a brighter quadrant, and the index of that quadrant."""
    label = torch.randint(CLASSES, (BATCH,), generator=generator)
    image = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
    half = SIDE // 2
    for row, quadrant in enumerate(label.tolist()):
        top, left = half * (quadrant // 2), half * (quadrant % 2)
        image[row, :, top : top + half, left : left + half] += 0.6
    return [image, label]


class ViT(Learner):
    """Classifies the brighter quadrant."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 3e-3, decays=True)
        from transformers import ViTConfig, ViTForImageClassification

        self.network = ViTForImageClassification(
            ViTConfig(
                image_size=SIDE, patch_size=4, hidden_size=32, num_hidden_layers=2,
                num_attention_heads=2, intermediate_size=64, num_labels=CLASSES,
            )
        )  # fmt: skip
        self.network.train()

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        return images(generator)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.network(pixel_values=batch[0]).logits.float(), batch[1])


class ConvNet(Learner):
    """Classifies the brighter quadrant by convolutions with BatchNorm."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 1e-3)
        self.network = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Flatten(), nn.Linear(16 * 16, CLASSES),
        )  # fmt: skip

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        return images(generator)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.network(batch[0]).float(), batch[1])


class GAN(Learner):
    """A GAN that learns a ring of points, with two manually stepped optimizers."""

    optimizers_per_batch = 2

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 2e-3)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(
            nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2),
            nn.Linear(32, 1),
        )  # fmt: skip
        self.errors: list[float] = []

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        angle = 2 * math.pi * torch.rand(4 * BATCH, generator=generator)
        ring = 2 + torch.stack([angle.cos(), angle.sin()], dim=1)
        real = ring + 0.05 * torch.randn(4 * BATCH, 2, generator=generator)
        return [real, torch.randn(4 * BATCH, 4, generator=generator)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real, noise = batch
        fake = self.generator(noise)
        of_generator, of_critic = self.optimizers()
        judged = torch.cat([self.critic(real), self.critic(fake.detach())]).float().flatten()
        truth = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
        loss = F.binary_cross_entropy_with_logits(judged, truth)
        self._step(of_critic, loss)
        judged = self.critic(fake).float().flatten()
        self._step(of_generator, F.binary_cross_entropy_with_logits(judged, torch.ones(len(fake))))
        self.losses.append(float(loss.detach()))
        self.errors.append(float((fake.mean(dim=0) - 2).norm().detach()))

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            Adam(part.parameters(), lr=self.lr, betas=(0.5, 0.999))
            for part in (self.generator, self.critic)
        ]

    def progress(self) -> tuple[float, float]:
        """Return the distance of the mean of generated points from the ring's; 2.8 at the start."""
        return statistics.fmean(self.errors[-len(self.errors) // 10 :]), 0.5 * self.errors[0]


class A2C(Learner):
    """Learns to hold points at the middle of a line from rewards.

    The loss is the policy loss plus half the value loss minus an entropy bonus; it is noisy and
    changes its sign. Points keep their state from step to step, but one in 50 is moved elsewhere.
    """

    POINTS, MOVES, DISCOUNT = 32, 5, 0.9

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 3e-3)
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 3), nn.Linear(32, 1)
        self.state = torch.zeros(self.POINTS, 2)
        self.distances: list[float] = []

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        return [
            2 * torch.randn(self.POINTS, 2, generator=generator),
            torch.rand(self.POINTS, generator=generator),
            torch.rand(self.MOVES, self.POINTS, generator=generator),
        ]

    def loss(self, batch: list[Tensor]) -> Tensor:
        elsewhere, chance, lucks = (each.float() for each in batch)
        state = torch.where(chance[:, None] < 0.02, elsewhere, self.state)
        chances, values, entropies, rewards = [], [], [], []
        for luck in lucks:
            log_share, value = self._judge(state)
            below = log_share.detach().exp().cumsum(dim=1)
            action = (luck[:, None] > below).sum(dim=1).clamp(max=2)
            speed = 0.8 * state[:, 1] + 0.3 * (action - 1)
            state = torch.stack([state[:, 0] + 0.3 * speed, speed], dim=1).clamp(-4, 4)
            chances.append(log_share.gather(1, action[:, None])[:, 0])
            entropies.append(-(log_share.exp() * log_share).sum(dim=1))
            values.append(value)
            rewards.append(0.2 * (1 - state[:, 0].abs()))
        gain, gains = self._judge(state)[1].detach(), []
        for reward in reversed(rewards):
            gain = reward + self.DISCOUNT * gain
            gains.insert(0, gain)
        self.state = state
        self.distances.append(float(state[:, 0].abs().mean()))
        better = torch.stack(gains) - torch.stack(values)
        of_policy = -(torch.stack(chances) * better.detach()).mean()
        return of_policy + 0.5 * better.square().mean() - 0.01 * torch.stack(entropies).mean()

    def _judge(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the actions, and the value of the state."""
        hidden = self.body(state.to(self.policy.weight.dtype))
        return self.policy(hidden).float().log_softmax(dim=1), self.value(hidden).float()[:, 0]

    def progress(self) -> tuple[float, float]:
        """Return the final distance from the middle, and half of the largest distance."""
        last = self.distances[-len(self.distances) // 10 :]
        return statistics.fmean(last), 0.5 * max(self.distances)


class Contrastive(Learner):
    """Matches images and texts by two towers with a trainable logit scale."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 1e-3)
        self.image = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 16))
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.criterion = ContrastiveLoss()
        self.register_buffer("mixing", torch.randn(2, 8, 24))

    def batch(self, index: int, generator: torch.Generator) -> Tensor:
        latent = torch.randn(32, 8, generator=generator)
        # Both towers get independent noise, so that pairs are sometimes confused.
        return latent + 0.4 * torch.randn(2, 32, 8, generator=generator)

    def loss(self, batch: Tensor) -> Tensor:
        views = torch.einsum("vbd,vdk->vbk", batch, self.mixing.to(batch.dtype)).tanh()
        features = [F.normalize(tower(v).float()) for tower, v in zip(
            (self.image, self.text), views, strict=True
        )]  # fmt: skip
        return self.criterion(*features, self.log_scale.float().exp().clamp(max=100))


class LoRA(Learner):
    """Adapts a frozen network by products of rank 4, whose second factor starts at zero."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 3e-3, weight_decay=0.0)
        self.base = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 4)]).requires_grad_(False)
        self.down = nn.ModuleList([nn.Linear(16, 4, bias=False), nn.Linear(64, 4, bias=False)])
        self.up = nn.ModuleList([nn.Linear(4, 64, bias=False), nn.Linear(4, 4, bias=False)])
        self.register_buffer("shift", 0.3 * torch.randn(4, 16))
        for layer in self.up:
            nn.init.zeros_(layer.weight)

    def batch(self, index: int, generator: torch.Generator) -> Tensor:
        return torch.randn(32, 16, generator=generator)

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.base[0](batch).relu()
            target = self.base[1](hidden).float() + (batch.float() @ self.shift.float().T)
        x = batch
        for index, (base, down, up) in enumerate(zip(self.base, self.down, self.up, strict=True)):
            x = base(x) + up(down(x))
            x = x.relu() if index == 0 else x
        return F.mse_loss(x.float(), target)


class Curriculum(Learner):
    """Fits a wave over a range that widens twice, so that the loss jumps twice."""

    RANGES = (1.0, 2.0, 3.0)

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 3e-3)
        self.network = nn.Sequential(
            nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)
        )

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        reach = self.RANGES[min(3 * index // self.steps, 2)]
        x = reach * (2 * torch.rand(32, 1, generator=generator) - 1)
        noise = 0.3 * torch.randn(32, 1, generator=generator)
        return [x, (2 * x).sin() + 0.5 * x + noise]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self.network(batch[0]).float(), batch[1].float())

    def progress(self) -> tuple[float, float]:
        """Return the final loss, and the loss when the widest range began."""
        begun = 2 * len(self.losses) // 3 + 1
        last = statistics.fmean(self.losses[-len(self.losses) // 10 :])
        return last, statistics.fmean(self.losses[begun : begun + 5])


class Hinge(Learner):
    """Separates two clouds by a margin, so that the loss of most batches is exactly 0."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 3e-3)
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        side = 2.0 * torch.randint(2, (8, 1), generator=generator) - 1
        return [side + torch.randn(8, 8, generator=generator), side[:, 0]]

    def loss(self, batch: list[Tensor]) -> Tensor:
        score, side = self.network(batch[0]).float()[:, 0], batch[1].float()
        return (1 - side * score).relu().mean()


class ShortLastBatch(Learner):
    """Trains on 131 samples in batches of 16; the last batch has three samples."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 3e-3)
        self.network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(131, 8, generator=generator)
        y = x[:, 0] * x[:, 1] + 0.5 * torch.randn(131, generator=generator)
        shuffled = torch.Generator().manual_seed(1)
        return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=shuffled)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self.network(batch[0]).float()[:, 0], batch[1].float())


OTHER_MODELS: dict[str, Any] = {
    "ViT": ViT, "conv + BN": ConvNet, "GAN": GAN, "A2C": A2C, "contrastive": Contrastive,
    "LoRA at zero": LoRA, "curriculum": Curriculum, "hinge": Hinge,
    "short last batch": ShortLastBatch,
}  # fmt: skip
