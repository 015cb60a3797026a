"""What Qwen3.5's vision tower and text model are given for images and videos beside weights.

Patches, places and the order of things are those of `qwen2_5_vl_inputs`. The frames of a video stand in the prompt one
by one, with their times as text between them: each has positions as an image of one frame has. Facts from transformers
5 (`Qwen3_5Model.get_rope_index`, `vision_utils`); bounds of an image from `size` in the preprocessor_config.json of
Qwen/Qwen3.5-9B-Base (and of Qwen3-VL): {"longest_edge": 16777216, "shortest_edge": 65536}, which are pixels.
"""

import functools

import numpy as np
from jaxtyping import Bool, Float, Int

from shardzoo.zoo import qwen2_5_vl_inputs as shared
from shardzoo.zoo.qwen2_5_vl_inputs import Arrangement, Grids, places

__all__ = ["Grids", "fitting_size", "patches", "places", "positions", "table_rows", "video_patches"]

PATCH, MERGE = 16, 2
LEAST, MOST = 65536, 16777216  # pixels of an image
patches = functools.partial(shared.patches, patch=PATCH)  # of pixels from -1 to 1
video_patches = functools.partial(shared.video_patches, patch=PATCH)
fitting_size = functools.partial(shared.fitting_size, side=PATCH * MERGE, least=LEAST, most=MOST)


def positions(
    tokens: Int[np.ndarray, "batch seq"],
    grids: Grids,
    image_token: int,
    *,
    videos: Grids = (),
    video_token: int | None = None,
    merge: int = MERGE,
    mask: Bool[np.ndarray, "batch seq"] | None = None,
) -> Int[np.ndarray, "batch seq three"]:
    """Positions of tokens in time, row and column: text counts on along all three, an image starts where text ends.

    Text after an image, or after a frame of a video, goes on after the longer side of its squares. `mask` is True for
    tokens that count; the others are at 0. Images and videos are those of the grids, row of the batch after row.

    Raises:
        InputError: tokens of images or videos that are not those of the grids.
    """
    kinds = {image_token: grids}
    if video_token is not None:
        kinds[video_token] = tuple((1, rows, columns) for t, rows, columns in videos for _ in range(t))
    return shared.positions_among(tokens, kinds, merge=merge, mask=mask)


def table_rows(order: Arrangement, side: int) -> tuple[Int[np.ndarray, "seq four"], Float[np.ndarray, "seq four"]]:
    """For each patch the four rows of a `side` x `side` table round its place, and the share that each has in it.

    The corners of an image lie on those of the table. Computed in float32 as the reference does.
    """
    last = np.maximum(order.sizes - 1, 1).astype(np.float32)
    place = order.places.astype(np.float32) * np.float32(side - 1) / last
    low = np.floor(place)
    part = place - low
    near = np.stack([low, np.minimum(low + 1, side - 1)], axis=-1).astype(np.int32)  # seq, axis, two
    share = np.stack([1 - part, part], axis=-1)
    rows = near[:, 0, :, None] * side + near[:, 1, None, :]
    return rows.reshape(-1, 4), (share[:, 0, :, None] * share[:, 1, None, :]).reshape(-1, 4)
