"""Draws the figures of the documentation: `python docs/_tools/figures.py` writes docs/images/*.svg.

A figure is a list of boxes, arrows and texts at fixed pixel coordinates.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"
FILLS = {
    "blue": "#dbe7fb",
    "green": "#dcefdc",
    "orange": "#fde8cf",
    "red": "#fadcdc",
    "gray": "#eeeeee",
    "white": "#ffffff",
}
EDGES = {
    "blue": "#3f6fc4",
    "green": "#3c8b45",
    "orange": "#c97b12",
    "red": "#c03a3a",
    "gray": "#777777",
    "white": "#777777",
}
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Figure:
    """A drawing of boxes, arrows and text.

    Args:
        width: In pixels.
        height: In pixels.
        title: Title for screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' role='img'><title>{escape(title)}</title>",
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
            "markerHeight='7' orient='auto'><path d='M0 0L8 4L0 8z' fill='#444'/></marker></defs>",
            f"<rect width='{width}' height='{height}' fill='#fff'/>",
        ]

    def words(
        self, x: float, y: float, text: str, size: int = 13, bold: bool = False, at: str = "middle"
    ) -> None:
        """Write lines of text centred vertically at a point."""
        lines = text.split("\n")
        weight = " font-weight='bold'" if bold else ""
        top = y - (len(lines) - 1) * size * 0.65 + size * 0.35
        for n, line in enumerate(lines):
            self.parts.append(
                f"<text x='{x:g}' y='{top + n * size * 1.3:.1f}' {FONT} font-size='{size}' "
                f"text-anchor='{at}'{weight} fill='#222'>{escape(line)}</text>"
            )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        color: str = "blue",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        """Draw a box with centred text."""
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='5' "
            f"fill='{FILLS[color]}' stroke='{EDGES[color]}'/>"
        )
        if text:
            self.words(x + width / 2, y + height / 2, text, size, bold)

    def arrow(self, *points: float, text: str = "", dx: float = 0, dy: float = -9) -> None:
        """Draw an arrow through points x0, y0, x1, y1, ... with a label at its middle."""
        pairs = list(zip(points[::2], points[1::2], strict=True))
        path = " ".join(f"{x:g},{y:g}" for x, y in pairs)
        self.parts.append(
            f"<polyline points='{path}' fill='none' stroke='#444' marker-end='url(#tip)'/>"
        )
        if text:
            (x0, y0), (x1, y1) = pairs[len(pairs) // 2 - 1 : len(pairs) // 2 + 1]
            self.words((x0 + x1) / 2 + dx, (y0 + y1) / 2 + dy, text, 12)

    def save(self, name: str) -> None:
        """Write the file."""
        (IMAGES / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>", ""]))


def overview() -> None:
    """The plug points of a Trainer and the classes for each."""
    f = Figure(900, 300, "The plug points of a Trainer and the classes for each")
    f.box(330, 20, 240, 260, "", "gray")
    f.words(450, 42, "lightning.pytorch.Trainer", 15, bold=True)
    for n, text in enumerate(("plugins=", "strategy=", "callbacks=", "your LightningModule")):
        f.box(350, 65 + 53 * n, 200, 40, text, "white", 14)
    left = (("BalancedAMP, PureFP16,\nFSDPBalancedAMP, InfClamp", "blue", 0),)
    left += (("InfCLStrategy\ntowers in micro-batches", "green", 1),)
    for text, color, n in left:
        f.box(20, 60 + 53 * n, 240, 48, text, color)
        f.arrow(260, 84 + 53 * n, 350, 84 + 53 * n)
    right = (("Monitors, SpikeGuard,\nNonFiniteLocator", "orange", 2),)
    right += (("ContrastiveLoss, SafeAdamW,\nContrastiveRecall", "green", 3),)
    for text, color, n in right:
        f.box(20, 60 + 53 * n, 240, 48, text, color)
        f.arrow(260, 84 + 53 * n, 350, 84 + 53 * n)
    outcomes = (
        ("half-precision compute:\nconverges like fp32", "blue"),
        ("memory grows with b, not b²;\ngradients of the global batch", "green"),
        ("alarms that recommend a setting;\nan HTML report of the run", "orange"),
        ("also in other loops:\ntorch, Fabric, Accelerate", "green"),
    )
    for n, (text, color) in enumerate(outcomes):
        f.box(640, 60 + 53 * n, 240, 48, text, color)
        f.arrow(550, 84 + 53 * n, 640, 84 + 53 * n)
    f.save("overview")


def working_copies() -> None:
    """Which tensors are fp32 and which are half precision."""
    f = Figure(860, 300, "Working copies of BalancedAMP")
    f.words(150, 22, "outside a forward: fp32", 14, bold=True)
    f.words(545, 22, "while a module computes: half precision", 14, bold=True)
    f.box(40, 50, 220, 56, "weight  p\nfp32, 4 bytes", "blue")
    f.box(40, 205, 220, 56, "p.grad\nfp32, 4 bytes, unscaled", "blue")
    f.box(360, 50, 160, 56, "half copy\n2 bytes, persistent", "orange")
    f.box(600, 50, 220, 56, "forward of the module\nop policy, norms in fp32", "green")
    f.box(600, 205, 220, 56, "backward\nloss times scale", "green")
    f.box(360, 205, 160, 56, "half gradient\nfreed at once", "orange")
    f.arrow(260, 78, 360, 78, text="one copy\nper step", dy=-22)
    f.arrow(520, 78, 600, 78, text="replaces p", dy=-10)
    f.arrow(710, 106, 710, 205, text="loss", dx=22, dy=0)
    f.arrow(600, 233, 520, 233)
    f.arrow(360, 233, 260, 233, text="cast by\nautograd", dy=-18)
    f.arrow(100, 205, 100, 106, text="optimizer step,\nfp32, any optimizer", dx=70, dy=0)
    f.words(
        430,
        288,
        "DDP, clipping, hooks, averaging and checkpoints use the fp32 tensors on the left",
        12,
    )
    f.save("working-copies")


def residuals() -> None:
    """How a weight and a residual carry 22 bits."""
    f = Figure(860, 250, "Weight and residual of PureFP16")
    f.words(430, 20, "one parameter of PureFP16: two fp16 numbers of 11 bits each", 14, bold=True)
    f.box(60, 42, 340, 46, "weight w: the upper 11 bits, used by modules", "blue")
    f.box(404, 42, 340, 46, "residual r: the lower 11 bits, scaled by 2¹¹", "orange")
    f.box(250, 120, 360, 40, "m = w + r / 2¹¹, in fp32, exact", "green")
    f.arrow(230, 88, 350, 120)
    f.arrow(574, 88, 500, 120)
    f.box(250, 192, 360, 40, "step(m, fp32 gradient, fp32 states)", "green")
    f.arrow(430, 160, 430, 192)
    f.arrow(250, 212, 30, 212, 30, 65, 60, 65)
    f.words(140, 200, "split: keeps 22 bits", 12)
    f.arrow(610, 212, 790, 212, 790, 65, 744, 65)
    f.words(700, 140, "keeps updates of w · 2⁻²⁰;\nw alone loses those\nbelow w · 2⁻¹²", 12)
    f.save("residuals")


def two_sweeps() -> None:
    """The loss in two sweeps over tiles."""
    f = Figure(900, 330, "Two sweeps over the tiles of the logits")
    for left, title in ((40, "sweep 1: log-sum-exps"), (490, "sweep 2: gradients")):
        f.words(left + 150, 20, title, 14, bold=True)
        f.words(left + 20, 155, "I", 14, bold=True)
        f.words(left + 140, 42, "Tᵀ", 14, bold=True)
        for row in range(4):
            for column in range(4):
                is_diagonal = row == column
                color = "orange" if (row, column) == (1, 2) else "white"
                color = "gray" if is_diagonal else color
                f.box(left + 40 + 50 * column, 55 + 50 * row, 48, 48, "", color)
                if is_diagonal:
                    f.words(left + 64 + 50 * column, 79 + 50 * row, "pos", 11)
    f.arrow(284, 130, 320, 130)
    f.words(375, 130, "row LSE\nof negatives", 12)
    f.arrow(165, 258, 165, 285)
    f.words(165, 300, "column LSE of negatives", 12)
    f.words(165, 318, "1 product: S = s I Tᵀ, tile by tile", 12)
    f.arrow(734, 105, 775, 105)
    f.words(825, 105, "P = softmax\n(1 product)", 12)
    f.arrow(734, 175, 775, 175)
    f.words(825, 175, "dI = s P T\n(1 product)", 12)
    f.arrow(615, 258, 615, 285)
    f.words(615, 300, "dT = s Pᵀ I (1 product)", 12)
    f.words(615, 318, "tiles fit in a fixed workspace: memory O(b), not O(b²)", 12)
    f.save("two-sweeps")


def gradient_cache() -> None:
    """The two forwards of a tower."""
    f = Figure(900, 300, "The gradient cache")
    f.words(160, 20, "first forward: without a graph", 14, bold=True)
    f.words(740, 20, "replay: inside the backward", 14, bold=True)
    for n in range(3):
        f.box(20, 45 + 70 * n, 110, 46, f"micro-batch {n + 1}", "gray")
        f.box(190, 45 + 70 * n, 110, 46, f"features {n + 1}", "blue")
        f.arrow(130, 68 + 70 * n, 190, 68 + 70 * n, text="tower")
        f.arrow(300, 68 + 70 * n, 365, 138)
        f.box(590, 45 + 70 * n, 110, 46, f"dL/dfeatures {n + 1}", "orange", 12)
        f.box(770, 45 + 70 * n, 110, 46, f"micro-batch {n + 1}\nreplayed", "gray", 12)
        f.arrow(535, 138, 590, 68 + 70 * n)
        f.arrow(700, 68 + 70 * n, 770, 68 + 70 * n)
    f.box(365, 108, 170, 60, "loss over all features\nof all ranks", "green")
    f.arrow(825, 231, 825, 262, 600, 262, text="")
    f.box(330, 242, 270, 40, "p.grad: the sum, once per step", "blue")
    f.words(752, 280, "compared with the first forward", 12)
    f.save("gradient-cache")


def exchange() -> None:
    """How ranks exchange slices of their texts."""
    f = Figure(900, 300, "The exchange between ranks")
    f.words(450, 20, "four ranks, two slices: texts are exchanged, images stay", 14, bold=True)
    for rank in range(4):
        y = 45 + 56 * rank
        f.box(20, y, 120, 42, f"rank {rank}: I{rank}", "blue")
        f.box(150, y, 60, 42, f"T{rank}, 0", "orange")
        f.box(214, y, 60, 42, f"T{rank}, 1", "green")
        f.arrow(274, y + 21, 345, y + 21)
    f.box(345, 45, 105, 210, "all-gather\nof slice 1\n \nwhile slice 0\nis in use", "gray")
    for n in range(4):
        f.box(520 + 46 * n, 45, 44, 42, f"T{n}, 0", "orange", 12)
        f.box(520 + 46 * n, 101, 44, 42, f"T{n}, 1", "green", 12)
    f.arrow(450, 66, 520, 66)
    f.arrow(450, 122, 520, 122)
    f.box(520, 165, 182, 90, "every rank: its I times\na block of all T,\nin tiles", "blue")
    f.arrow(611, 143, 611, 165)
    home = "to the owners:\nlog-sum-exps\nby all-to-all,\ndT by\nreduce-scatter"
    f.box(755, 100, 130, 110, home, "gray", 12)
    f.arrow(702, 210, 730, 210, 730, 155, 755, 155)
    f.words(
        450,
        282,
        "the fewest slices that fit in the workspace: usually one, for any number of ranks",
        12,
    )
    f.save("exchange")


def nan_path() -> None:
    """From a symptom to a setting; narrow enough for a phone."""
    paths = (
        ("NaN or inf loss", "NonFiniteLocator()", "red", (
            "forward in fp16: fp32_modules, inf_clamp or half='bf16'",
            "backward in fp16: a lower loss_scale or max_scale",
            "batch: clean the data",
            "parameter under 16-true: PureFP16, SafeAdamW",
        )),
        ("Steps are skipped", "LossScaleMonitor()", "orange", (
            "scale below 1024: locate the module, fp32_modules",
            "scale at its floor: the loss itself is non-finite",
            "over 1% skipped: lower the learning rate or max_scale",
        )),
        ("The loss spikes", "SpikeGuard()", "orange", (
            "single batches: gradient_clip_val, action='skip'",
            "many steps in a row: action='rewind'",
            "steady rise: earlier checkpoint, half the learning rate",
        )),
        ("Learning stops", "GradientUnderflowMonitor()\nAdamStateMonitor()", "blue", (
            "gradients underflow: a higher loss scale or half='bf16'",
            "below epsilon: SafeAdamW(rule='atan2')",
            "after many zeros: SafeAdamW(clip_update_rms=1.0)",
        )),
    )  # fmt: skip
    f = Figure(430, 640, "From symptom to setting")
    for n, (symptom, tool, color, settings) in enumerate(paths):
        y = 8 + 158 * n
        f.box(8, y, 175, 44, symptom, color, 15, bold=True)
        f.box(213, y, 209, 44, tool, "white", 13)
        f.arrow(183, y + 22, 213, y + 22)
        f.arrow(322, y + 44, 322, y + 60)
        f.box(8, y + 60, 414, 82, "\n".join(settings), "green", 13)
    f.save("nan")


if __name__ == "__main__":
    for draw in (overview, working_copies, residuals, two_sweeps, gradient_cache, exchange):
        draw()
    nan_path()
