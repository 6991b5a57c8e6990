"""A small CLIP for glyphs and their names.

Legend: ``b`` rows of a rank's batch, ``D`` feature width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from examples.glyph_clip.data import Batch
from examples.glyph_clip.towers import GlyphTower, NameTower
from lightning_mp import ContrastiveLoss, ContrastiveRecall

MAX_LOGIT_SCALE = 100.0  # CLIP's limit; above it, single pairs dominate the loss
WARMUP_SHARE = 0.1
SCALE_LR = 10.0  # ratio of the learning rate of logit scale and bias to that of other parameters


class GlyphCLIP(LightningModule):
    """Contrastive model of glyphs and names, without code for the gradient cache.

    Args:
        width: Channels of the glyph tower's last stage.
        feature_width: Feature width D.
        jitter: Strength of the glyphs' random distortion in training.
        lr: Peak learning rate of AdamW, after a tenth of the steps; then a cosine to 0.
        weight_decay: Weight decay of matrices; vectors and the logit scale have none.
        logit_scale: The logit scale at the start; it is learned, up to 100.
        loss: The loss; `None` is `ContrastiveLoss`. SigLIP's takes two lines in the config:
            `loss: SigmoidContrastiveLoss` and `logit_bias: -10`.
        logit_bias: The logit bias at the start, learned as well; `None` for none.
    """

    logit_bias: nn.Parameter | None

    def __init__(
        self,
        *,
        width: int = 128,
        feature_width: int = 256,
        jitter: float = 1.5,
        lr: float = 3e-3,
        weight_decay: float = 0.05,
        logit_scale: float = 14.0,
        loss: ContrastiveLoss | None = None,
        logit_bias: float | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["loss"])  # the loss has no state
        self.lr = lr
        self.weight_decay = weight_decay
        self.visual = GlyphTower(width=width, feature_width=feature_width, jitter_strength=jitter)
        self.text = NameTower(feature_width=feature_width)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(logit_scale)))
        bias = None if logit_bias is None else nn.Parameter(torch.tensor(logit_bias))
        # Also registered as `None`, so that the attribute exists.
        self.register_parameter("logit_bias", bias)
        self.loss = ContrastiveLoss() if loss is None else loss
        self.recall = ContrastiveRecall(top_k=(1, 5, 10))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Encode glyphs and names as normalized features, ``(b, D)`` each."""
        image_bD = F.normalize(self.visual(batch["image"]), dim=-1)
        text_bD = F.normalize(self.text(batch["text"]), dim=-1)
        return image_bD, text_bD

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        image_bD, text_bD = self(batch)
        loss, statistics = self.loss(
            image_bD, text_bD, self.logit_scale.exp(), self.logit_bias, statistics=True
        )
        # With the batch size, which Lightning would otherwise infer from the batch.
        self.log_dict(statistics._asdict(), batch_size=len(image_bD))
        self.log("loss", loss, prog_bar=True, batch_size=len(image_bD))
        self.log("logit_scale", self.logit_scale.exp(), batch_size=len(image_bD))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            # After the step, because a clamp in the forward has no gradient beyond its limit.
            self.logit_scale.clamp_(max=math.log(MAX_LOGIT_SCALE))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        image_bD, text_bD = self(batch)
        # With name ids, because all glyphs of one name match it.
        self.recall.update(image_bD, text_bD, batch["name_id"], batch["name_id"])

    def on_validation_epoch_end(self) -> None:
        values: Any = self.recall.compute()
        shown = {name: value for name, value in values.items() if not name.endswith("_queries")}
        # Already computed over all ranks: the mean over ranks changes nothing and avoids a warning.
        self.log_dict(shown, sync_dist=True)
        self.recall.reset()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        of_logits = [p for p in (self.logit_scale, self.logit_bias) if p is not None]
        vectors = [
            p for p in self.parameters() if p.ndim <= 1 and all(p is not x for x in of_logits)
        ]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
                # Adam changes a value by about `lr` per step, too little for the logit scale.
                {"params": of_logits, "weight_decay": 0.0, "lr": SCALE_LR * self.lr},
            ],
            lr=self.lr,
            # 0.999 averages over 1,000 steps, several times the length of the run.
            betas=(0.9, 0.98),
            fused=True,  # one pass over the hashed tables instead of ten
        )
        steps = int(self.trainer.estimated_stepping_batches)

        def share_of_peak(step: int) -> float:
            warmup_steps = max(1, round(WARMUP_SHARE * steps))
            progress = (step - warmup_steps) / max(1, steps - warmup_steps)
            return min((step + 1) / warmup_steps, 0.5 * (1 + math.cos(math.pi * max(0, progress))))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
