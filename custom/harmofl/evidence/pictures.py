"""Small pictures for pages: images as PNG in the page itself, outlines of masks as SVG paths over them."""

import base64
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray


def png(image: NDArray[Any], window: tuple[float, float]) -> str:
    """A PNG of 8 bits a channel as data URI.

    Args:
        image: (H, W) gray or (H, W, 3).
        window: the values that become black and white.
    """
    from PIL import Image as Pillow

    low, high = window
    pixels = np.rint(np.clip((image - low) / (high - low), 0, 1) * 255).astype(np.uint8)
    stored = BytesIO()
    Pillow.fromarray(pixels).save(stored, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stored.getvalue()).decode()


def outline(mask: NDArray[np.bool_]) -> str:
    """The border of the foreground as an SVG path, in pixels from the corner of the image."""
    from skimage.measure import find_contours

    contours = find_contours(np.pad(mask, 1).astype(np.float32), 0.5)  # padded: a border at the edge is closed too
    # a padded pixel's center lies at its index, half a pixel from its corner
    points = [" ".join(f"{x - 0.5:g} {y - 0.5:g}" for y, x in contour) for contour in contours]
    return " ".join(f"M{line}Z" for line in points)
