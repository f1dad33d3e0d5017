"""Colours for jobs, shared by the simulator's picture and the web page (pure).

The eight colours of Okabe and Ito, "Color Universal Design" (2008), can be distinguished with every common form of
colour blindness; black is left out, since text is black. Jobs with the same hue differ in lightness.
"""

from __future__ import annotations

import colorsys

HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")
"""Blue, orange, green, purple, sky, vermilion, yellow (darker than theirs, to be seen on white)."""

_GOLDEN = 0.618033988749895  # multiples of it, modulo 1, lie as far apart as any number of points can
_SPREAD = 0.34


def rgb(hue: int, shade: float = 0.5) -> tuple[float, float, float]:
    """Return red, green and blue from 0 to 1.

    Args:
        hue: Index into ``HUES``, modulo their number.
        shade: 0 for the darkest variant of the hue, 1 for the lightest, 0.5 for the hue itself.
    """
    text = HUES[hue % len(HUES)]
    red, green, blue = (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
    h, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    return colorsys.hls_to_rgb(h, min(max(lightness + _SPREAD * (shade - 0.5), 0.12), 0.85), saturation)


def shade_of(number: int) -> float:
    """Return the shade (0 to 1) of the n-th job with the same hue, counted from 0; the first gets the pure hue."""
    return (0.5 + number * _GOLDEN) % 1.0


def colour(number: int) -> str:
    """Return the colour ``#rrggbb`` of the n-th job, counted from 0; each round of hues has a different shade."""
    return as_hex(rgb(number, shade_of(number // len(HUES))))


def as_hex(parts: tuple[float, float, float]) -> str:
    """Return red, green and blue from 0 to 1 as ``#rrggbb``."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
