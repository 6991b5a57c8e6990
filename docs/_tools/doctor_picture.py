"""Draws docs/images/doctor.svg: the loss of a run before and after the change that doctor names.

python -m docs._tools.doctor_picture
"""

import logging
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from docs._tools.figures import EDGES, Figure
from lightning_mp import BalancedAMP

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 40
HIGHEST = 1.5
LEFT, TOP, WIDTH, HEIGHT = 70, 50, 620, 200  # of the axes


class Losses(pl.Callback):
    """Collects the mean loss of each epoch."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self._steps: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, *_: Any) -> None:
        """Collect the loss of a step."""
        self._steps.append(outputs["loss"].float())

    def on_train_epoch_end(self, *_: Any) -> None:
        """Add the mean of the epoch."""
        self.means.append(sum(map(float, self._steps)) / len(self._steps))
        self._steps.clear()


def vit() -> nn.Module:
    """Return the model of the quick start, as in the configuration on the page."""
    page = (ROOT / "docs" / "quick-start.md").read_text()
    (code,) = re.findall(r'```python title="vit.py"\n(.*?)```', page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    model: nn.Module = names["ViT"](lr=1e-4)
    return model


def losses(**precision: Any) -> list[float]:
    """Train the model with a precision, and return the loss of each epoch."""
    pl.seed_everything(0, verbose=False)
    callback = Losses()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **precision,
    )  # fmt: skip
    trainer.fit(vit())
    return callback.means


def curve(figure: Figure, values: list[float], color: str, label: str, dy: float) -> None:
    """Draw a curve with its label above or below its end."""
    points = [
        (LEFT + WIDTH * (n + 1) / EPOCHS, TOP + HEIGHT * (1 - value / HIGHEST))
        for n, value in enumerate(values)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    figure.parts.append(
        f"<polyline points='{path}' fill='none' stroke='{EDGES[color]}' stroke-width='2'/>"
    )
    figure.words(LEFT + WIDTH, points[-1][1] + dy, f"{label}: {values[-1]:.2f}", at="end")


def main() -> None:
    """Write the picture."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    title = "Training loss of the ViT before and after the change that doctor names"
    figure = Figure(720, 300, title)
    figure.words(LEFT, 22, title, 14, bold=True, at="start")
    for value in (0.0, 0.5, 1.0, HIGHEST):
        y = TOP + HEIGHT * (1 - value / HIGHEST)
        figure.parts.append(
            f"<line x1='{LEFT}' x2='{LEFT + WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>"
        )
        figure.words(LEFT - 10, y, f"{value:g}", 12, at="end")
    for epoch in range(0, EPOCHS + 1, 10):
        figure.words(LEFT + WIDTH * epoch / EPOCHS, TOP + HEIGHT + 16, str(epoch), 12)
    figure.words(LEFT + WIDTH / 2, TOP + HEIGHT + 36, "epoch", 12)
    before, after = losses(precision="bf16-true"), losses(plugins=BalancedAMP(half="bf16"))
    curve(figure, before, "red", "precision: bf16-true", -14)
    curve(figure, after, "green", "plugins: BalancedAMP (half: bf16)", 16)
    figure.save("doctor")


if __name__ == "__main__":
    main()
