"""`InfCLStrategy(micro_batch_size="auto")`: sizes are logged and kept by resumed runs."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_mp import InfCLStrategy
from tests.quiet import parameters_of
from tests.reference.contrastive import relative_error
from tests.strategies.models import TinyCLIP, loader, make_trainer

BATCH, BYTES = 24, 6_000


def _fit(epochs: int, activation_bytes: int = BYTES, path: Any = None, **trainer: Any) -> Any:
    torch.manual_seed(5)
    model = TinyCLIP(dropout=0.3)
    strategy = InfCLStrategy(micro_batch_size="auto", activation_bytes=activation_bytes)
    trainer = make_trainer(strategy, max_epochs=epochs, **trainer)
    trainer.fit(model, loader(4 * BATCH, BATCH), ckpt_path=path)
    return model, strategy, trainer


def test_auto_sizes_are_logged_stored_in_checkpoints_and_resumed(
    tmp_path: Path, logged: list[str]
) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    model, strategy, trainer = _fit(epochs=1, logger=logger)
    sizes = strategy._cache.micro_batch_sizes
    assert set(sizes) == {"visual", "text"}
    assert 2 <= sizes["visual"] < BATCH
    found = ", ".join(f"{sizes[name]} rows for `{name}`" for name in ("visual", "text"))
    assert f"InfCLStrategy(micro_batch_size='auto') chose {found}." in logged
    assert "micro_batch_size/visual" in (tmp_path / "metrics.csv").read_text()
    path = tmp_path / "end.ckpt"
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=False)["micro_batch_sizes"] == sizes

    # Also with more memory, because dropout masks depend on the micro-batch size.
    start = parameters_of(model)
    resumed, other, _ = _fit(2, 2**30, path)
    assert other._cache.micro_batch_sizes == sizes
    assert relative_error(parameters_of(resumed), start) > 1e-3


def test_auto_size_trains_like_an_explicit_size() -> None:
    model, strategy, _ = _fit(epochs=1)
    rows = set(strategy._cache.micro_batch_sizes.values())
    assert len(rows) == 1  # the towers are equal
    torch.manual_seed(5)
    given = TinyCLIP(dropout=0.3)
    strategy = InfCLStrategy(micro_batch_size=rows.pop())
    make_trainer(strategy, max_epochs=1).fit(given, loader(4 * BATCH, BATCH))
    assert torch.equal(parameters_of(model), parameters_of(given))
