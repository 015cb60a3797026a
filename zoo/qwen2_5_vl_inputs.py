"""What Qwen2.5-VL's towers are given beside weights: patches of images, their order, places and positions of tokens.

Everything here is made on the host, of sizes and tokens that are known before anything is traced. Patches come square
by square (`merge` x `merge` of them make one feature), squares by frame, row and column. Facts from transformers 5.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int

from shardzoo.errors import InputError, fail_if

Grids = tuple[tuple[int, int, int], ...]  # frames, rows and columns of patches of each image
LEAST, MOST = 56 * 56, 3584 * 3584  # pixels of an image, as the published processors bound them
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of the pixels' channels


def fitting_size(height: int, width: int, *, side: int = 28, least: int = LEAST, most: int = MOST) -> tuple[int, int]:
    """The size that an image is resized to: multiples of `side`, within `least` and `most` pixels, shape about kept.

    Raises:
        InputError: an image more than 200 times as long as it is wide.
    """
    if max(height, width) > 200 * min(height, width):
        raise InputError(f"image: height={height} and width={width} are more than 200 to 1: crop it")
    rows, columns = round(height / side) * side, round(width / side) * side
    if rows * columns > most:
        factor = math.sqrt(height * width / most)
        rows, columns = (max(side, math.floor(n / factor / side) * side) for n in (height, width))
    elif rows * columns < least:
        factor = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(n * factor / side) * side for n in (height, width))
    return rows, columns


def patches(
    image: Float[np.ndarray, "channels height width"], *, patch: int = 14, merge: int = 2, frames: int = 2
) -> tuple[Float[np.ndarray, "seq pixels"], tuple[int, int, int]]:
    """The patches of a normed image (`MEAN`, `STD`), each `frames` times the same, and its grid.

    Raises:
        InputError: a size that squares of patches do not divide.
    """
    channels, *sizes = image.shape
    side = patch * merge
    named = list(zip(("height", "width"), sizes, strict=True))
    fail_if([f"{n}={size} does not divide by {side}: resize it" for n, size in named if size % side], "patches")
    split = [n for size in sizes for n in (size // side, merge, patch)]
    cut = image.reshape(channels, *split).transpose(1, 4, 2, 5, 0, 3, 6)  # squares, patches in them, channels, pixels
    each = np.repeat(cut.reshape(-1, channels, 1, patch, patch), frames, axis=2)
    return each.reshape(len(each), -1), (1, sizes[0] // patch, sizes[1] // patch)


@dataclasses.dataclass(frozen=True, eq=False)
class Arrangement:
    """The order in which the tower works on patches: window after window.

    Attributes:
        units: which square comes at each place.
        places: row and column of each patch, in this order.
        windows, frames: which window, and which frame, each patch is in.
    """

    units: Int[np.ndarray, " units"]
    places: Int[np.ndarray, "seq two"]
    windows: Int[np.ndarray, " seq"]
    frames: Int[np.ndarray, " seq"]


def arrangement(grids: Grids, *, merge: int, side: int) -> Arrangement:
    """That of images of these grids, in windows of `side` x `side` squares; those at the edges are what is left."""
    parts, first, windows, frames = [], 0, 0, 0
    for count, *sizes in grids:
        rows, columns = (n // merge for n in sizes)
        t, row, column = (x.reshape(-1) for x in np.mgrid[:count, :rows, :columns])
        across = -(-columns // side)
        window = (t * -(-rows // side) + row // side) * across + column // side
        order = np.argsort(window, kind="stable")
        inner = np.stack([x.reshape(-1) for x in np.mgrid[:merge, :merge]], axis=-1)
        places = np.stack([row, column], axis=-1)[order, None] * merge + inner
        parts.append((first + order, places.reshape(-1, 2), windows + window[order], frames + t[order]))
        first, windows, frames = first + len(t), windows + window.max() + 1, frames + count
    units, places, window, frame = (np.concatenate(x).astype(np.int32) for x in zip(*parts, strict=True))
    return Arrangement(units, places, *(np.repeat(x, merge**2) for x in (window, frame)))


def places(tokens: Int[np.ndarray, "batch seq"], image_token: int) -> Int[np.ndarray, "batch seq"]:
    """Which row of the features stands in for each token, or -1: those of image tokens, one after another."""
    images = tokens == image_token
    return np.where(images, np.cumsum(images).reshape(images.shape) - 1, -1).astype(np.int32)


def positions(
    tokens: Int[np.ndarray, "batch seq"],
    grids: Grids,
    image_token: int,
    *,
    merge: int = 2,
    mask: Bool[np.ndarray, "batch seq"] | None = None,
) -> Int[np.ndarray, "batch seq three"]:
    """Positions of tokens in time, row and column: text counts on along all three, an image starts where text ends.

    Text after an image goes on after the longer side of its squares. `mask` is True for tokens that count; the others
    are at 0. Images are those of the grids, row of the batch after row.

    Raises:
        InputError: image tokens that are not those of the grids.
    """
    found = np.zeros((*tokens.shape, 3), np.int32)
    waiting = [(t, rows // merge, columns // merge) for t, rows, columns in grids]
    wanted, there = sum(map(math.prod, waiting)), int((tokens == image_token).sum())
    fail_if([f"tokens: {there} of images, grids are of {wanted}: give one for each"] * (there != wanted), "positions")
    for row, ids in enumerate(tokens):
        kept = np.arange(len(ids)) if mask is None else np.flatnonzero(mask[row])
        found[row, kept] = _row(ids[kept] == image_token, waiting)
    return found


def _row(images: Bool[np.ndarray, " seq"], waiting: list[tuple[int, int, int]]) -> Int[np.ndarray, "seq three"]:
    """Positions of one row's tokens; takes its images from those waiting."""
    parts, at, now = [np.zeros((0, 3), np.int64)], 0, 0
    while at < len(images):
        if images[at]:
            grid = waiting.pop(0)
            part = now + np.moveaxis(np.mgrid[tuple(slice(n) for n in grid)], 0, -1).reshape(-1, 3)
            now += max(grid[1:])
            if not images[at : at + len(part)].all() or at + len(part) > len(images):
                raise InputError(f"positions: {grid} squares of an image are not as many tokens in one row: mend them")
        else:
            count = int(np.argmax(images[at:])) if images[at:].any() else len(images) - at
            part = now + np.repeat(np.arange(count)[:, None], 3, axis=1)
            now += count
        parts.append(part)
        at += len(part)
    return np.concatenate(parts)
