"""A CLIP from a configuration of transformers or open_clip, with the recipe of Inf-CL.

References:
    - Inf-CL, https://arxiv.org/abs/2410.17243, appendix A
    - LiT, https://arxiv.org/abs/2111.07991
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp import ContrastiveLoss


class RecipeCLIP(pl.LightningModule):
    """Two encoders and a contrastive loss; pass `encode_image` and `encode_text` as towers.

    Args:
        library: The library that makes the model.
        config: Arguments of `transformers.CLIPConfig`, or of `open_clip.create_model`, such as
            `model_name`.
        lock_image: Freeze the image encoder, as LiT does; load a trained one.
        optimizer: `"adafactor"` of transformers, or `"adamw"` of torch. The paper uses the
            AdaFactor of ViT-g, whose first moment is in half precision and whose second moment
            decays by 0.95; that of transformers is in fp32 and decays by `1 - t^-0.8`.
        lr: Peak learning rate.
        weight_decay: Weight decay of all parameters.
        betas: Decay of the moments; `"adafactor"` uses the first.
        warmup_epochs: Epochs of warm-up, before a cosine decay to 0.
    """

    def __init__(
        self,
        config: dict[str, Any],
        *,
        library: Literal["transformers", "open_clip"] = "transformers",
        lock_image: bool = False,
        optimizer: Literal["adafactor", "adamw"] = "adafactor",
        lr: float = 1e-3,
        weight_decay: float = 1e-4,
        betas: Sequence[float] = (0.9, 0.95),
        warmup_epochs: float = 0.5,
    ) -> None:
        super().__init__()
        # Imported by name, so that only the library in use must be installed.
        package = importlib.import_module(library)
        self.is_open_clip = library == "open_clip"
        if self.is_open_clip:
            self.model: nn.Module = package.create_model(**config)
        else:
            self.model = package.CLIPModel(package.CLIPConfig(**config))
        self.lock_image = lock_image
        if lock_image:
            self._image_encoder.requires_grad_(False)
        self.optimizer, self.lr, self.weight_decay = optimizer, lr, weight_decay
        self.betas, self.warmup_epochs = tuple(betas), warmup_epochs
        self.loss = ContrastiveLoss()

    @property
    def _image_encoder(self) -> nn.Module:
        return self.model.visual if self.is_open_clip else self.model.vision_model

    def on_train_epoch_start(self) -> None:
        """Keep a locked encoder in evaluation mode."""
        if self.lock_image:
            self._image_encoder.eval()

    def encode_image(self, images: Tensor) -> Tensor:
        """Return normalized features of uint8 images."""
        # Converted here, so that batches are stored and copied as uint8, a quarter of fp32.
        images = images.to(self.dtype) / 127.5 - 1
        if self.is_open_clip:
            return F.normalize(self.model.encode_image(images), dim=-1)
        pooled = self.model.vision_model(pixel_values=images).pooler_output
        return F.normalize(self.model.visual_projection(pooled), dim=-1)

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Return normalized features."""
        if self.is_open_clip:
            return F.normalize(self.model.encode_text(tokens), dim=-1)
        pooled = self.model.text_model(input_ids=tokens).pooler_output
        return F.normalize(self.model.text_projection(pooled), dim=-1)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, tokens = batch
        features = self.encode_image(images), self.encode_text(tokens)
        loss = self.loss(*features, self.model.logit_scale.exp())
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Clamp the logit scale to CLIP's limit; a clamp in the forward would have no gradient."""
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(100))

    def configure_optimizers(self) -> dict[str, Any]:
        params = [p for p in self.parameters() if p.requires_grad]
        shared: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.optimizer == "adafactor":
            adafactor = importlib.import_module("transformers.optimization").Adafactor
            # By default Adafactor sets the learning rate itself and refuses a given one.
            fixed = {"scale_parameter": False, "relative_step": False}
            optimizer = adafactor(params, beta1=self.betas[0], **fixed, **shared)
        else:
            optimizer = torch.optim.AdamW(params, betas=self.betas, **shared)
        total = int(self.trainer.estimated_stepping_batches)
        warm = max(1, round(total * self.warmup_epochs / max(1, self.trainer.max_epochs or 1)))

        def factor(step: int) -> float:
            if step < warm:
                # Plus 1, so that the learning rate of the first step is not 0.
                return (step + 1) / warm
            return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            # By default, Lightning steps a schedule once per epoch.
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
