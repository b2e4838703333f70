"""Draws two loss curves and their difference as SVG, for light and dark pages."""

import math
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 460
LEFT, RIGHT = 64, 16
LOSS_TOP, LOSS_BOTTOM = 74, 316
DIFFERENCE_TOP, DIFFERENCE_BOTTOM = 350, 424

# Plain classes instead of variables, which not every SVG viewer supports.
STYLE = """
text { font: 13px sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.faint { fill: #59636e; }
.paper { fill: #ffffff; }
.grid { stroke: #d1d9e0; fill: none; }
.pytorch { stroke: #f2b27a; stroke-width: 5; fill: none; stroke-linejoin: round; }
.storm { stroke: #1f5ea8; stroke-width: 1.4; fill: none; stroke-linejoin: round; }
.limit { stroke: #c0392b; stroke-dasharray: 5 4; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .faint { fill: #9198a1; }
  .paper { fill: #0d1117; }
  .grid { stroke: #30363d; }
  .pytorch { stroke: #8a5a2b; }
  .storm { stroke: #79b8ff; }
  .limit { stroke: #ff7b72; }
}
"""


@dataclass
class Panel:
    """Maps steps and values to positions in the picture."""

    steps: int
    low: float
    high: float
    top: int
    bottom: int

    def x(self, step: float) -> float:
        return LEFT + (step - 1) / max(self.steps - 1, 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.top)

    def line(self, name: str, values: list[float]) -> str:
        points = " ".join(
            f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in enumerate(values, 1)
        )
        return f'<polyline class="{name}" points="{points}"/>'

    def level(self, name: str, value: float, label: str = "") -> str:
        y = self.y(value)
        line = f'<path class="{name}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        return line + text(LEFT - 8, y + 4, label, "faint", "end")


def text(x: float, y: float, words: str, name: str = "", anchor: str = "start") -> str:
    if not words:
        return ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{name}" {place}>{escape(words)}</text>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """The ticks in a range: multiples of 1, 2 or 5 times a power of ten, with at most `count`
    intervals."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(place * step, 10) for place in range(first, last + 1)]


def number(value: float) -> str:
    return f"{value:g}"


def percent(value: float) -> str:
    """Two significant digits at least, however small the value is."""
    decimals = 2 if value == 0 else max(0, 1 - math.floor(math.log10(value)))
    return f"{value:.{decimals}f} %"


def draw(result: dict, difference_max: float) -> str:
    """Draws a result of `parity_at_length`."""
    ours, theirs = result["losses"]["storm"], result["losses"]["pytorch"]
    steps = len(ours)
    every = ours + theirs
    margin = 0.04 * (max(every) - min(every)) or 1.0
    loss = Panel(steps, min(every) - margin, max(every) + margin, LOSS_TOP, LOSS_BOTTOM)
    off = [100 * (a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    bar = 100 * difference_max
    widest = 1.25 * max(bar, *map(abs, off))
    difference = Panel(steps, -widest, widest, DIFFERENCE_TOP, DIFFERENCE_BOTTOM)

    device = {"cpu": "CPU", "cuda": "GPU"}[result["device"]]
    title = (
        f"{result['parameters'] / 1e6:.0f}M parameters, {steps} steps of {result['batch']} × "
        f"{result['sequence']} tokens, f32, {device}"
    )
    mebibytes = {
        "storm": result["storm"]["device_bytes"] / 2**20,
        "resident": result["storm"]["resident_bytes"] / 2**20,
        "pytorch": result["pytorch"]["memory_bytes"] / 2**20,
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        text(LEFT, 26, title, "title"),
        f'<path class="pytorch" d="M{LEFT} 48h24"/>',
        text(LEFT + 32, 52, f"PyTorch, {mebibytes['pytorch']:,.0f} MiB"),
        f'<path class="storm" d="M{LEFT + 220} 48h24"/>',
        text(
            LEFT + 252,
            52,
            f"STORM, {mebibytes['storm']:,.0f} MiB; resident it takes "
            f"{mebibytes['resident']:,.0f} MiB",
        ),
    ]
    for value in ticks(loss.low, loss.high, 5):
        parts.append(loss.level("grid", value, number(value)))
    parts.append(loss.line("pytorch", theirs))
    parts.append(loss.line("storm", ours))
    parts.append(text(WIDTH - RIGHT, LOSS_TOP + 14, "loss", "faint", "end"))

    parts.append(difference.level("grid", 0, "0 %"))
    for value in (-bar, bar):
        parts.append(difference.level("limit", value, f"{value:+g} %"))
    parts.append(difference.line("storm", off))
    words = f"difference of the loss, at most {percent(max(map(abs, off)))}"
    parts.append(text(WIDTH - RIGHT, DIFFERENCE_TOP - 6, words, "faint", "end"))
    for value in ticks(1, steps, 5):
        if value >= 1:
            parts.append(text(difference.x(value), HEIGHT - 14, number(value), "faint", "middle"))
    parts.append(text(LEFT, HEIGHT - 14, "step 1", "faint", "start"))
    parts.append("</svg>\n")
    return "\n".join(part for part in parts if part)
