"""Two streams of tokens, text and image, that attend to each other: how they lie on a mesh, and their positions.

Each stream is padded and split by itself, over `context` and with the "seq" residual over the tensor axes too, so that
neither length need divide. What a device works on is its share of the text followed by its share of the image; since
no token's place in the sequence matters but by its rotation, the shares of all devices may follow each other so.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from shardzoo.zoo.layers import SEQ, Residual, own_share, pad
from shardzoo.zoo.mesh import CONTEXT, TP

Pair = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class Turns:
    """How far each token of a stream turns a head's pairs: small, where a table of all tokens would be large.

    Attributes:
        tables: of each axis of the positions, cosines and sines (2, places, dims) of the places that occur.
        places: (seq, axes), which of them each token has.
    """

    tables: tuple[np.ndarray, ...]
    places: np.ndarray


def positions_rotary(
    ids: Float[np.ndarray, "seq axes"], dims: tuple[int, ...], theta: float, dtype: type[np.floating] = np.float64
) -> Turns:
    """The turns of positions along several axes, for `video_tokens.rotate_pairs`.

    Each axis turns `dims[axis]` of a head's dims; angles in `dtype`, tables in float32. A table is laid out like a
    head: cosines twice each, sines with the sign that their place in the pair asks for.
    """
    tables, places = [], []
    for axis, size in enumerate(dims):
        found, index = np.unique(np.asarray(ids, dtype)[:, axis], return_inverse=True)
        powers = theta ** (np.arange(0, size, 2, dtype=dtype) / dtype(size)).astype(np.float64)
        angles = (found[:, None] * (1 / powers.astype(dtype))).astype(np.float64)
        cos, sin = np.repeat(np.cos(angles), 2, axis=-1), np.stack([-np.sin(angles), np.sin(angles)], axis=-1)
        tables.append(np.stack([cos, sin.reshape(len(found), size)]).astype(np.float32))
        places.append(index.reshape(-1).astype(np.int32))
    return Turns(tuple(tables), np.stack(places, axis=-1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """How the two streams, `text` and `image` tokens long, lie on the devices of the `shard_map` it is made in."""

    text: int
    image: int
    residual: Residual

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split the streams."""
        return (CONTEXT,) if self.residual == "whole" else (CONTEXT, *TP)

    @property
    def tensor(self) -> int:
        """How often a device's share over `context` is split again."""
        return 1 if self.residual == "whole" else lax.axis_size(TP)

    def take(self, x: Shaped[Array, "batch all_seq ..."], axes: tuple[str, ...] | None = None) -> Array:
        """This device's share of a stream, padded with zeros to divide; over `axes`, by default those of the stream."""
        return own_share(pad(x, SEQ, lax.axis_size(self.axes)), axes or self.axes)

    def whole(self, x: Float[Array, "batch part_seq ..."], seq: int) -> Float[Array, "batch all_seq ..."]:
        """A stream of `seq` tokens from the shares of all devices: one all-gather."""
        return lax.all_gather(x, self.axes, axis=SEQ, tiled=True, to="invarying")[:, :seq]

    def turns(self, text: Turns, image: Turns) -> tuple[Pair, Pair]:
        """The rotary tables of the text and the image tokens that this device projects: cosines and sines."""

        def one(turns: Turns) -> Pair:
            places = self.take(jnp.asarray(turns.places)[None], (CONTEXT,))
            found = [
                jnp.take(jnp.asarray(table), places[..., axis], axis=1, mode="clip")
                for axis, table in enumerate(turns.tables)
            ]
            cos, sin = jnp.concatenate(found, axis=-1)
            return cos, sin

        return one(text), one(image)

    def valid(self) -> tuple[Bool[Array, "one text"], Bool[Array, "one image"]] | None:
        """Which of the tokens that this device projects are no padding; None where none is."""
        ways = lax.axis_size(self.axes)
        if self.text % ways == 0 and self.image % ways == 0:
            return None
        text, image = (self.take(jnp.ones((1, n), bool), (CONTEXT,)) for n in (self.text, self.image))
        return text, image

    def joined(self, text: Shaped[Array, "batch text ..."], image: Shaped[Array, "batch image ..."]) -> Array:
        """Both of what a device projects in the order of one stream: its text and image, part by part."""
        if self.tensor == 1:
            return jnp.concatenate([text, image], axis=SEQ)
        parts = [x.reshape(x.shape[0], self.tensor, -1, *x.shape[2:]) for x in (text, image)]
        both = jnp.concatenate(parts, axis=SEQ + 1)
        return both.reshape(both.shape[0], -1, *both.shape[3:])


def everywhere(valid: Bool[Array, "rows seq"], like: Array) -> Bool[Array, "batch seq"]:
    """The mask for each row of the batch."""
    return jnp.broadcast_to(valid, (like.shape[0], valid.shape[1]))
