"""Contrastive matching of letters in two fonts: `python -m examples.inf_cl`."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.data import letters
from lightning_mp import ContrastiveLoss, ContrastiveRecall, InfCLStrategy


class Matcher(pl.LightningModule):
    """Two towers; `training_step` contains no code for micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 32))
        self.right = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 32))
        self.log_scale, self.loss = nn.Parameter(torch.tensor(2.0)), ContrastiveLoss()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        left, right = F.normalize(self.left(batch[0])), F.normalize(self.right(batch[1]))
        # The logarithm keeps the scale positive.
        return self.loss(left, right, self.log_scale.exp())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> float:
    """Train; return recall@1 from one font to the other."""
    pl.seed_everything(0)
    pairs = TensorDataset(letters(("DejaVuSans",))[0], letters(("DejaVuSerif",))[0])
    model = Matcher()
    # The towers process a sixth of the batch at a time; the loss compares all 234 pairs.
    strategy = InfCLStrategy(towers=["left", "right"], micro_batch_size=39)
    settings = {"max_epochs": 100, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=strategy, devices=1, **settings)
    trainer.fit(model, DataLoader(pairs, batch_size=234, shuffle=True))
    recall = ContrastiveRecall(top_k=(1,))
    left, right = (
        letters((f"{name}-Bold",), shifts=1)[0] for name in ("DejaVuSans", "DejaVuSerif")
    )
    recall.update(model.left(left).detach(), model.right(right).detach())
    share = float(recall.compute()["image_to_text_recall@1"])
    print(f"{share:.0%} of the bold letters retrieved, none of which were trained on; chance is 4%")
    return share


if __name__ == "__main__":
    main()
