"""Table 3 and Figure 5: accuracy by loss and by batch, on the glyphs of the demo.

Legend: ``N`` test glyphs, ``n`` test glyphs of a known script, ``D`` feature width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_mp import ContrastiveLoss, InfCLStrategy, ZeroShotAccuracy
from papers._fit import train
from papers.inf_cl import printed as paper
from papers.inf_cl.losses import DenseLoss, RanksInOne
from papers.output import MEASURED, PRINTED, Output, Row

__all__ = ["Recipe", "figure5", "render_glyphs", "table3", "trained_scores"]

# One family in four styles: no name has more than four glyphs, so a batch of 4,096 need not hold a
# name twice, which would be a false negative.
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSans-Oblique")
# Scripts are the classes of the zero-shot test. No prompt is a character's name, so all are unseen.
SCRIPTS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN", "BRAILLE", "BOX")
PROMPTS = ("{}", "{} LETTER", "{} SMALL LETTER", "{} CAPITAL LETTER", "{} PATTERN", "{} DRAWINGS")
LEARNING_RATE = 3e-3
REFERENCE_BATCH = 512  # the batch whose scaled learning rate is LEARNING_RATE


@dataclass(frozen=True)
class Recipe:
    """One training on the glyphs."""

    batch: int  # global batch
    samples: int  # number of pairs in the whole training, whatever the batch
    lr: float = LEARNING_RATE  # peak learning rate of AdamW
    seed: int = 0  # seed of weights and data order
    micro_batch: int = 256  # micro-batch of the gradient cache


def render_glyphs() -> None:
    """Render the demo's glyphs into its cache if they are missing."""
    from examples.glyph_clip.data import GlyphData

    GlyphData(progress=False).prepare_data()


def model_with(loss: nn.Module, lr: float) -> Any:
    """Return a small version of the demo's model that trains with any loss and logs nothing.

    Raises:
        ModuleNotFoundError: The folder `examples` of the clone is missing.
    """
    from examples.glyph_clip.model import GlyphCLIP

    # The demo's step logs statistics that the peers' losses do not return.
    class Trained(GlyphCLIP):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            image_bD, text_bD = self(batch)
            return self.loss(image_bD, text_bD, self.logit_scale.exp())

    model = Trained(width=32, feature_width=64, lr=lr)
    model.loss = loss  # type: ignore[assignment]
    return model


def trained_scores(
    recipe: Recipe, loss: nn.Module, *, cached: bool = True, ranks: int = 1
) -> dict[str, float]:
    """Train the demo's model with another loss, and test it on an unseen font family.

    Towers distort each glyph at random. Two losses see the same distortions only if the towers
    process the same micro-batches, as with `cached`.
    """
    from examples.glyph_clip.data import GlyphData
    from examples.glyph_clip.glyphs import TRAIN_FONTS

    # `GlyphData` takes the fonts that are left out of training; `train` does not validate.
    left_out = [font for font in TRAIN_FONTS if font not in FONTS]
    pl.seed_everything(recipe.seed, verbose=False)
    data = GlyphData(
        batch_size=recipe.batch, validation_fonts=left_out, seed=recipe.seed, progress=False
    )
    model = model_with(loss, recipe.lr)
    strategy: Any = "auto" if ranks == 1 else "ddp"
    if cached:
        strategy = InfCLStrategy(micro_batch_size=recipe.micro_batch, process_group_backend="gloo")
    train(
        model,
        data,
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        # Limited by steps, so that every batch size sees the same number of pairs.
        max_epochs=-1,
        max_steps=max(1, recipe.samples // recipe.batch),
        limit_val_batches=0,
    )
    return _scores(model, data)


@torch.no_grad()
def _scores(model: Any, data: Any) -> dict[str, float]:
    """Return recall and zero-shot accuracy on the whole test family, computed on every rank."""
    from examples.glyph_clip.report import encode

    table = data.tables["test"]
    image_ND, text_ND = encode(model, table)
    # It may hold glyphs of an earlier evaluation.
    model.recall.reset()
    model.recall.update(image_ND, text_ND)
    model.recall.sync_on_compute = False  # a sync would count the glyphs once for every rank
    scores = {"top1": _zero_shot_top1(model, table, image_ND)}
    for name, value in model.recall.compute().items():
        score = name.replace("image_to_text_recall", "i2t_r")
        scores[score.replace("text_to_image_recall", "t2i_r")] = float(value)
    return scores


def _zero_shot_top1(model: Any, table: Any, image_ND: Tensor) -> float:
    """Return the zero-shot accuracy of the script of a glyph, by prompts as in CLIP."""
    from examples.glyph_clip.glyphs import decode_name, encode_names

    names = [decode_name(code) for code in table.codes]
    first_words = [name.partition(" ")[0] for name in names]
    rows_n = torch.tensor([row for row, word in enumerate(first_words) if word in SCRIPTS])
    target_n = torch.tensor([SCRIPTS.index(first_words[row]) for row in rows_n.tolist()])
    prompts = [prompt.format(script) for script in SCRIPTS for prompt in PROMPTS]
    # Every rank has all glyphs, so there is nothing to gather.
    accuracy = ZeroShotAccuracy(num_classes=len(SCRIPTS), top_k=(1,), sync_on_compute=False)
    classes = torch.arange(len(SCRIPTS)).repeat_interleave(len(PROMPTS))
    accuracy.update_prompts(model.text(torch.from_numpy(encode_names(prompts))), classes)
    accuracy.update(image_ND[rows_n], target_n)
    scores: Any = accuracy.compute()  # a dict, because no single `value` was requested
    return float(scores["top1"])


def table3(out: Output) -> None:
    """Compare recall and zero-shot top-1 by loss, with mean and spread over three seeds."""
    # At least two seeds, because one seed has no spread.
    batch, samples, seeds = (128, 512, 2) if out.fast else (512, 32_768, 3)
    large = 4 * batch
    losses: dict[str, tuple[Callable[[], nn.Module], int]] = {
        f"dense (CLIP), {batch}": (DenseLoss, batch),
        f"local (OpenCLIP) as of 4 ranks, {batch}": (lambda: RanksInOne(4), batch),
        f"lightning-mp, {batch}": (ContrastiveLoss, batch),
        f"lightning-mp, {large}": (ContrastiveLoss, large),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in losses}
    work = [(name, seed) for name in losses for seed in range(seeds)]
    for name, seed in out.progress(work, "Table 3, training"):
        make, size = losses[name]
        # Micro-batches of half the batch, so that every row uses the cache.
        recipe = Recipe(batch=size, samples=samples, seed=seed, micro_batch=batch // 2)
        found[name].append(trained_scores(recipe, make()))
    rows: list[Row] = []
    for name, scores in found.items():
        row: Row = {"kind": MEASURED, "loss": name, "data": "glyphs"}
        for score in ("top1", "i2t_r@1", "t2i_r@1"):
            values = [each[score] for each in scores]
            row |= {score: statistics.fmean(values), f"{score}_sd": statistics.stdev(values)}
        rows.append(row | {"seeds": seeds, "samples": samples})
    scores_of = paper.figures()["table3_acc_[INval,v2,ObjNet,OOD,COCO_I2T,COCO_T2I]"]
    for name, (top1, *_, i2t, t2i) in scores_of.items():
        row = {"kind": PRINTED, "loss": name, "data": "ImageNet, COCO"}
        rows.append(row | {"top1": top1 / 100, "i2t_r@1": i2t / 100, "t2i_r@1": t2i / 100})
    out.table("table3", rows, "Table 3: zero-shot top-1 and recall by loss")


def figure5(out: Output) -> None:
    """Measure recall by batch at a fixed number of samples, with fixed and scaled learning rate."""
    batches = (64, 256) if out.fast else (64, 128, 256, 512, 1024, 2048, 4096)
    samples = 512 if out.fast else 32_768
    rows: list[Row] = []
    work = [(batch, rule) for batch in batches for rule in ("fixed", "scaled")]
    for batch, rule in out.progress(work, "Figure 5, training"):
        # The usual rule for Adam: the noise of a mean gradient falls by the same factor.
        factor = math.sqrt(batch / REFERENCE_BATCH) if rule == "scaled" else 1.0
        recipe = Recipe(batch=batch, samples=samples, lr=LEARNING_RATE * factor)
        # Both rules agree at the reference batch.
        same = [row for row in rows if row["batch"] == batch and row["lr"] == recipe.lr]
        if same:
            rows.append({**same[0], "learning_rate": rule})
            continue
        scores = trained_scores(recipe, ContrastiveLoss())
        shown = ("i2t_r@1", "i2t_r@10", "t2i_r@1", "t2i_r@10", "top1")
        rows.append(
            {
                "kind": MEASURED,
                "learning_rate": rule,
                "lr": recipe.lr,
                "batch": batch,
                "steps": samples // batch,
                "samples": samples,
                **{score: scores[score] for score in shown},
            }
        )
    out.table("figure5", rows, "Figure 5: accuracy by batch, at a fixed number of samples")
    title = f"Figure 5: {samples:,} glyphs seen, by batch (measured)"
    with out.picture("figure5", 2, title) as (recall, top1):
        for rule, words, color, marker in (
            ("fixed", "fixed", "#d55e00", "o-"),
            ("scaled", f"times sqrt(batch / {REFERENCE_BATCH})", "#00429d", "s--"),
        ):
            points = [row for row in rows if row["learning_rate"] == rule]
            x = [row["batch"] for row in points]
            style = {"color": color, "label": f"learning rate {words}"}
            recall.plot(x, [row["t2i_r@10"] for row in points], marker, **style)
            top1.plot(x, [row["top1"] for row in points], marker, **style)
        recall.set(xlabel="batch", ylabel="name to glyph, recall@10")
        top1.set(xlabel="batch", ylabel="script, zero-shot top-1")
        for axes in (recall, top1):
            axes.set_xscale("log", base=2)
            axes.legend(frameon=False)
