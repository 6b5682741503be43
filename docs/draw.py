"""Draws the pictures of the pages:  python docs/draw.py

    zero_bytes.svg     bytes a parameter on a rank, by ZeRO stage, from the placements of parallel/zero/layout.py

Plain SVG without a library, so that one program gives one file; tests/test_guides.py holds them equal.
"""

from pathlib import Path

import torch

from shardwise.parallel.zero.layout import buffers, strategy_of
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Shard
from shardwise.precision.policy import BucketDtypes

FOLDER = Path(__file__).parent / "pictures"
RANKS = 8
COLOURS = {"weight": "#3b6ea5", "grad": "#d1622b", "master": "#4b8f6b", "moments": "#b8883b"}
INK = "#333333"
LEFT, TOP, BAR, GAP, SCALE = 90, 46, 26, 14, 26.0


def pictures() -> dict[str, str]:
    """File name to content."""
    return {"zero_bytes.svg": zero_bytes()}


def zero_bytes() -> str:
    """A stacked bar for each stage."""
    dtypes = BucketDtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32)
    shapes = [text(LEFT, 18, f"Bytes a parameter on one of {RANKS} ranks: bf16, fp32 sums, Adam", 13)]
    for place, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + 110 * place
        shapes += [box(x, 28, 10, 10, colour), text(x + 15, 37, name, 11)]
    for stage in (0, 1, 2, 3):
        mesh = Mesh(dp_shard=RANKS)
        parts = dict.fromkeys(COLOURS, 0.0)
        for row in buffers(
            strategy_of(ZeroPolicy(stage=stage), mesh), dtypes, True, ("exp_avg", "exp_avg_sq")
        ):
            is_cut = any(isinstance(where, Shard) for where in row.placement.values())
            kind = row.kind if row.kind in COLOURS else "moments"
            parts[kind] += row.itemsize / (RANKS if is_cut else 1)
        y, x = TOP + stage * (BAR + GAP), float(LEFT)
        shapes.append(text(LEFT - 10, y + 17, f"stage {stage}", 12, "end"))
        for kind, size in parts.items():
            shapes.append(box(x, y, size * SCALE, BAR, COLOURS[kind]))
            x += size * SCALE
        shapes.append(text(x + 8, y + 17, f"{sum(parts.values()):g}", 12))
    width, height = LEFT + 20 * SCALE, TOP + 4 * (BAR + GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
    shapes.insert(0, box(0, 0, width, height, "white"))  # readable on a dark page too
    return f'{head}height="{height:g}" font-family="sans-serif">\n' + "\n".join(shapes) + "\n</svg>\n"


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle with a thin edge."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="white"/>'


def text(x: float, y: float, words: str, size: int, anchor: str = "start") -> str:
    """One line."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{INK}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in pictures().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
