"""What Qwen2.5-VL's towers are given beside weights: patches of images, their order, places and positions of tokens.

Qwen3.5 is given the same but for what `qwen3_5_inputs` says. Everything here is made on the host, of sizes and tokens
that are known before anything is traced. Patches come square by square (`merge` x `merge` of them make one feature),
squares by frame, row and column. Facts from transformers 5.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float, Int

from shardzoo.errors import InputError, fail_if

Grids = tuple[tuple[int, int, int], ...]  # frames, rows and columns of patches of each image
LEAST, MOST = 56 * 56, 3584 * 3584  # pixels of an image, as the published processors bound them
LONGEST = 200  # the longer side over the shorter one, at most
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of the pixels' channels


def fitting_size(height: int, width: int, *, side: int = 28, least: int = LEAST, most: int = MOST) -> tuple[int, int]:
    """The size that an image is resized to: multiples of `side`, within `least` and `most` pixels, shape about kept.

    Raises:
        InputError: an image more than 200 times as long as it is wide.
    """
    if max(height, width) > LONGEST * min(height, width):
        raise InputError(f"image: height={height} and width={width} are more than {LONGEST} to 1: crop it")
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
    return video_patches(image[None], patch=patch, merge=merge, frames=frames)


def video_patches(
    video: Float[np.ndarray, "all_frames channels height width"], *, patch: int, merge: int = 2, frames: int = 2
) -> tuple[Float[np.ndarray, "seq pixels"], tuple[int, int, int]]:
    """The patches of a normed video, each of `frames` frames, the last of them as often as is wanting; and its grid.

    Raises:
        InputError: a size that squares of patches do not divide.
    """
    count, channels, *sizes = video.shape
    side = patch * merge
    named = list(zip(("height", "width"), sizes, strict=True))
    fail_if([f"{n}={size} does not divide by {side}: resize it" for n, size in named if size % side], "patches")
    full = np.concatenate([video, np.repeat(video[-1:], -count % frames, axis=0)])
    split = [n for size in sizes for n in (size // side, merge, patch)]
    cut = full.reshape(-1, frames, channels, *split)
    cut = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)  # time, squares, patches in them, channels, frames, pixels
    grid = (len(full) // frames, sizes[0] // patch, sizes[1] // patch)
    return cut.reshape(math.prod(grid), -1), grid


@dataclasses.dataclass(frozen=True, eq=False)
class Arrangement:
    """The order in which the tower works on patches: window after window.

    Attributes:
        units: which square comes at each place.
        places: row and column of each patch, in this order.
        sizes: rows and columns of the image that each patch is of.
        windows, frames: which window, and which frame, each patch is in.
    """

    units: Int[np.ndarray, " units"]
    places: Int[np.ndarray, "seq two"]
    sizes: Int[np.ndarray, "seq two"]
    windows: Int[np.ndarray, " seq"]
    frames: Int[np.ndarray, " seq"]


def arrangement(grids: Grids, *, merge: int, side: int | None) -> Arrangement:
    """That of images of these grids, in windows of `side` x `side` squares; those at the edges are what is left.

    With None for `side` each frame is one window, and patches stay in their order.
    """
    parts, first, windows, frames = [], 0, 0, 0
    for count, *sizes in grids:
        rows, columns = (n // merge for n in sizes)
        wide = max(rows, columns) if side is None else side
        t, row, column = (x.reshape(-1) for x in np.mgrid[:count, :rows, :columns])
        across = -(-columns // wide)
        window = (t * -(-rows // wide) + row // wide) * across + column // wide
        order = np.argsort(window, kind="stable")
        inner = np.stack([x.reshape(-1) for x in np.mgrid[:merge, :merge]], axis=-1)
        places = (np.stack([row, column], axis=-1)[order, None] * merge + inner).reshape(-1, 2)
        parts.append(
            (first + order, places, np.broadcast_to(sizes, places.shape), windows + window[order], frames + t[order])
        )
        first, windows, frames = first + len(t), windows + window.max() + 1, frames + count
    units, places, sizes, window, frame = (np.concatenate(x).astype(np.int32) for x in zip(*parts, strict=True))
    return Arrangement(units, places, sizes, *(np.repeat(x, merge**2) for x in (window, frame)))


def places(tokens: Int[np.ndarray, "batch seq"], *kinds: int) -> Int[np.ndarray, "batch seq"]:
    """Which row of the features stands in for each token, or -1: those of image tokens, one after another.

    With several `kinds` of tokens (of images, of videos) the features of all of one kind come before those of the next.
    """
    found, first = np.full(tokens.shape, -1, np.int32), 0
    for kind in kinds:
        here = tokens == kind
        found[here] = first + np.arange(here.sum())
        first += here.sum()
    return found


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
    return positions_among(tokens, {image_token: grids}, merge=merge, mask=mask)


def positions_among(
    tokens: Int[np.ndarray, "batch seq"],
    kinds: Mapping[int, Grids],
    *,
    merge: int,
    mask: Bool[np.ndarray, "batch seq"] | None,
) -> Int[np.ndarray, "batch seq three"]:
    """As `positions`, for several kinds of tokens that images stand in for, each with its grids."""
    waiting = {kind: [(t, rows // merge, columns // merge) for t, rows, columns in g] for kind, g in kinds.items()}
    problems = []
    for kind, images in waiting.items():
        wanted, there = sum(map(math.prod, images)), int((tokens == kind).sum())
        if there != wanted:
            problems.append(f"tokens: {there} of images, grids are of {wanted}: give one for each (token {kind})")
    fail_if(problems, "positions")
    found = np.zeros((*tokens.shape, 3), np.int32)
    for row, ids in enumerate(tokens):
        kept = np.arange(len(ids)) if mask is None else np.flatnonzero(mask[row])
        found[row, kept] = _row(ids[kept], waiting)
    return found


def _row(
    ids: Int[np.ndarray, " seq"], waiting: Mapping[int, list[tuple[int, int, int]]]
) -> Int[np.ndarray, "seq three"]:
    """Positions of one row's tokens; takes its images from those waiting."""
    parts, at, now = [np.zeros((0, 3), np.int64)], 0, 0
    images = np.isin(ids, list(waiting))
    while at < len(ids):
        if images[at]:
            grid = waiting[int(ids[at])].pop(0)
            part = now + np.moveaxis(np.mgrid[tuple(slice(n) for n in grid)], 0, -1).reshape(-1, 3)
            now += max(grid[1:])
            if not (ids[at : at + len(part)] == ids[at]).all() or at + len(part) > len(ids):
                raise InputError(f"positions: {grid} squares of an image are not as many tokens in one row: mend them")
        else:
            count = int(np.argmax(images[at:])) if images[at:].any() else len(images) - at
            part = now + np.repeat(np.arange(count)[:, None], 3, axis=1)
            now += count
        parts.append(part)
        at += len(part)
    return np.concatenate(parts)
