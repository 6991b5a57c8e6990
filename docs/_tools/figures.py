"""Draws the figures of the documentation: `python docs/_tools/figures.py` writes docs/images/*.svg.

A figure is a list of boxes, arrows and words on a grid of pixels; nothing is laid out by itself.
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
    "grey": "#eeeeee",
    "white": "#ffffff",
}
EDGES = {
    "blue": "#3f6fc4",
    "green": "#3c8b45",
    "orange": "#c97b12",
    "red": "#c03a3a",
    "grey": "#777777",
    "white": "#777777",
}
_QUIET = "GradientUnderflowMonitor()\nAdamStateMonitor()"
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Figure:
    """Collects shapes.

    Args:
        width: In pixels.
        height: In pixels.
        title: What a screen reader says.
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
        """Write lines around a point."""
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
        """Draw a box with words in it."""
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='5' "
            f"fill='{FILLS[color]}' stroke='{EDGES[color]}'/>"
        )
        if text:
            self.words(x + width / 2, y + height / 2, text, size, bold)

    def arrow(self, *points: float, text: str = "", dx: float = 0, dy: float = -9) -> None:
        """Draw an arrow through points, x before y, with words at its middle."""
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
    """What plugs into a Trainer."""
    f = Figure(900, 300, "What plugs into a Trainer")
    f.box(330, 20, 240, 260, "", "grey")
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
        ("half compute, fp32 weights:\nlearns as fp32 does", "blue"),
        ("memory grows with b, not b²;\ngradients of the whole batch", "green"),
        ("alarms with a value to set;\none page, also after kill -9", "orange"),
        ("the same in any loop:\nplain torch, Fabric, Accelerate", "green"),
    )
    for n, (text, color) in enumerate(outcomes):
        f.box(640, 60 + 53 * n, 240, 48, text, color)
        f.arrow(550, 84 + 53 * n, 640, 84 + 53 * n)
    f.save("overview")


def working_copies() -> None:
    """What computes, and what is at rest."""
    f = Figure(860, 300, "Working copies of BalancedAMP")
    f.words(150, 22, "at rest: yours, fp32", 14, bold=True)
    f.words(545, 22, "while a module computes: half", 14, bold=True)
    f.box(40, 50, 220, 56, "weight  p\nfp32, 4 bytes", "blue")
    f.box(40, 205, 220, 56, "p.grad\nfp32, 4 bytes, unscaled", "blue")
    f.box(360, 50, 160, 56, "half copy\n2 bytes, kept", "orange")
    f.box(600, 50, 220, 56, "forward of the module\nop policy, norms in fp32", "green")
    f.box(600, 205, 220, 56, "backward\nloss times scale", "green")
    f.box(360, 205, 160, 56, "half gradient\nlet go at once", "orange")
    f.arrow(260, 78, 360, 78, text="one foreach copy\na step", dy=-22)
    f.arrow(520, 78, 600, 78, text="stands in for p", dy=-10)
    f.arrow(710, 106, 710, 205, text="loss", dx=22, dy=0)
    f.arrow(600, 233, 520, 233)
    f.arrow(360, 233, 260, 233, text="cast by\nthe engine", dy=-18)
    f.arrow(100, 205, 100, 106, text="optimizer step,\nfp32, any optimizer", dx=70, dy=0)
    f.words(430, 288, "DDP, clipping, hooks, averages and checkpoints see the left side only", 12)
    f.save("working-copies")


def residuals() -> None:
    """How a weight and a residual carry 22 bits."""
    f = Figure(860, 250, "Weight and residual of PureFP16")
    f.words(430, 20, "one parameter of PureFP16: two fp16 numbers, 11 bits each", 14, bold=True)
    f.box(60, 42, 340, 46, "weight w: the upper 11 bits, what modules see", "blue")
    f.box(404, 42, 340, 46, "residual r: the lower 11 bits, scaled by 2¹¹", "orange")
    f.box(250, 120, 360, 40, "m = w + r / 2¹¹, in fp32, exact", "green")
    f.arrow(230, 88, 350, 120)
    f.arrow(574, 88, 500, 120)
    f.box(250, 192, 360, 40, "step(m, fp32 gradient, fp32 states)", "green")
    f.arrow(430, 160, 430, 192)
    f.arrow(250, 212, 30, 212, 30, 65, 60, 65)
    f.words(140, 200, "split: 22 bits are kept", 12)
    f.arrow(610, 212, 790, 212, 790, 65, 744, 65)
    f.words(700, 140, "an update of w · 2⁻²⁰ is kept;\nin w alone, below w · 2⁻¹² is lost", 12)
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
                color = "grey" if is_diagonal else color
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
    f.words(615, 318, "tiles stay within a workspace: memory O(b), not O(b²)", 12)
    f.save("two-sweeps")


def gradient_cache() -> None:
    """The two runs of a tower."""
    f = Figure(900, 300, "The gradient cache")
    f.words(160, 20, "run 1: no graph is kept", 14, bold=True)
    f.words(740, 20, "run 2: inside the backward", 14, bold=True)
    for n in range(3):
        f.box(20, 45 + 70 * n, 110, 46, f"micro-batch {n + 1}", "grey")
        f.box(190, 45 + 70 * n, 110, 46, f"features {n + 1}", "blue")
        f.arrow(130, 68 + 70 * n, 190, 68 + 70 * n, text="tower")
        f.arrow(300, 68 + 70 * n, 365, 138)
        f.box(590, 45 + 70 * n, 110, 46, f"dL/dfeatures {n + 1}", "orange", 12)
        f.box(770, 45 + 70 * n, 110, 46, f"micro-batch {n + 1}\nreplayed", "grey", 12)
        f.arrow(535, 138, 590, 68 + 70 * n)
        f.arrow(700, 68 + 70 * n, 770, 68 + 70 * n)
    f.box(365, 108, 170, 60, "loss over all features\nof all ranks", "green")
    f.arrow(825, 231, 825, 262, 600, 262, text="")
    f.box(330, 242, 270, 40, "p.grad: the sum, once a step", "blue")
    f.words(720, 280, "each replay is compared with its features", 12)
    f.save("gradient-cache")


def exchange() -> None:
    """How ranks pass slices of their texts around."""
    f = Figure(900, 300, "The exchange between ranks")
    f.words(450, 20, "four ranks, two slices: texts travel, images stay", 14, bold=True)
    for rank in range(4):
        y = 45 + 56 * rank
        f.box(20, y, 120, 42, f"rank {rank}: I{rank}", "blue")
        f.box(150, y, 60, 42, f"T{rank}, 0", "orange")
        f.box(214, y, 60, 42, f"T{rank}, 1", "green")
        f.arrow(274, y + 21, 345, y + 21)
    f.box(345, 45, 105, 210, "all-gather\nof slice 1\n \nwhile slice 0\nis in use", "grey")
    for n in range(4):
        f.box(520 + 46 * n, 45, 44, 42, f"T{n}, 0", "orange", 12)
        f.box(520 + 46 * n, 101, 44, 42, f"T{n}, 1", "green", 12)
    f.arrow(450, 66, 520, 66)
    f.arrow(450, 122, 520, 122)
    f.box(520, 165, 182, 90, "every rank: its I times\na block of all T,\nin tiles", "blue")
    f.arrow(611, 143, 611, 165)
    home = "sums go home:\nlog-sum-exps\nby all-to-all,\ndT by\nreduce-scatter"
    f.box(755, 100, 130, 110, home, "grey", 12)
    f.arrow(702, 210, 730, 210, 730, 155, 755, 155)
    f.words(450, 282, "as few slices as fit the workspace: mostly one, however many ranks", 12)
    f.save("exchange")


def nan_path() -> None:
    """From what is seen to what to set."""
    f = Figure(920, 450, "My run went NaN: a decision path")
    f.box(330, 10, 260, 44, "What do you see?", "grey", 15, bold=True)
    ways = (
        ("the loss is NaN or inf", "NonFiniteLocator()\nnames the producer", "red"),
        ("steps are skipped,\nthe loss scale sinks", "LossScaleMonitor()\nsays when", "orange"),
        ("the loss jumps,\nand comes back or not", "SpikeGuard()\nwarn first, then skip", "orange"),
        ("learning stops\nwithout any jump", _QUIET, "blue"),
    )
    ends = (
        "forward in fp16:\nfp32_modules, inf_clamp,\nhalf='bf16'\n \nbackward: lower\nloss_scale,"
        " max_scale\n \nbatch: clean the data\n \nparameter: 16-true?\nPureFP16, SafeAdamW",
        "below 1024: locate, then\nfp32_modules\n \nat its floor: the loss\nitself is not finite\n"
        " \nmore than 1% skipped:\nlower the learning rate,\nLossScaleConfig(max_scale)",
        "single batches:\ngradient_clip_val, 'skip'\n \nwhole stretches: 'rewind'\n \n"
        "a steady rise\n(divergence): go back,\nhalve the learning rate",
        "zeros with subnormals:\nraise the loss scale,\nor half='bf16'\n \nbelow epsilon:\n"
        "rule='atan2'\n \nafter long zeros:\nclip_update_rms=1.0",
    )
    for n, (seen, tool, color) in enumerate(ways):
        x = 15 + 228 * n
        f.arrow(460, 54, x + 105, 90)
        f.box(x, 90, 210, 48, seen, color)
        f.arrow(x + 105, 138, x + 105, 165)
        f.box(x, 165, 210, 48, tool, "white")
        f.arrow(x + 105, 213, x + 105, 240)
        f.box(x, 240, 210, 200, ends[n], "green", 12)
    f.save("nan")


if __name__ == "__main__":
    for draw in (overview, working_copies, residuals, two_sweeps, gradient_cache, exchange):
        draw()
    nan_path()
