"""Qwen-Image transformers, 20B parameters: text to image, editing with reference images, and images as layers.

`declare` a model and make its `forward` for a mesh; the layers are in `qwen_image_model`, which says what they are made
from. Mesh axes: the batch over `data`, text and image tokens over `context`, heads and mlp over the tensor axes; `pipe`
must be 1. Any lengths of text and image will do.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, Num, jaxtyped

from shardzoo.errors import fail_if, nothing_in
from shardzoo.kernels.flash_attention.options import varying_over
from shardzoo.zoo import layout
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.flux_blocks import SUMMED, Rows, Run, ends_in_turn, rows_of, streams_dtype
from shardzoo.zoo.joint_streams import Shares, everywhere, positions_rotary
from shardzoo.zoo.layers import Residual, check_residual, pad
from shardzoo.zoo.mesh import CONTEXT, DATA, TP
from shardzoo.zoo.qwen_image_model import KINDS, Config, QwenImage
from shardzoo.zoo.remat import Remat, check_remat, rematerialised

Host = Array | np.ndarray
Grids = tuple[tuple[int, int, int], ...]  # frames, rows and columns of tokens of each image
SPACE_FACTOR = 16  # pixels of a token's side: 8 of the autoencoder's, times the patch


def declare(config: Config, dtype: Any = np.float32) -> QwenImage:
    """The declared model with every weight in `dtype`."""
    return layout.astype(QwenImage.declare(config), dtype)


def positions(
    grids: Grids, text: int, layered: bool = False
) -> tuple[Float[np.ndarray, "text three"], Float[np.ndarray, "seq three"]]:
    """Positions of this many tokens of text and of the images' tokens: image, row, column.

    Rows and columns are counted from the middle of each image. The first axis counts images, and their frames from
    there on; of `layered` images the last has -1 there. Text goes on along all axes from where the largest image ends.
    """
    images = []
    for index, (frames, rows, columns) in enumerate(grids):
        t, row, column = np.mgrid[:frames, :rows, :columns].astype(np.float64)
        t = t * 0 - 1 if layered and index == len(grids) - 1 else t + index
        places = (t, row - (rows - rows // 2), column - (columns - columns // 2))
        images.append(np.stack(places, axis=-1).reshape(-1, 3))
    start = max(side // 2 for _, *sides in grids for side in sides)
    start = max(start, len(grids) - 1) if layered else start
    return np.repeat(start + np.arange(text, dtype=np.float64)[:, None], 3, axis=1), np.concatenate(images)


@runtime_checkable
class Forward(Protocol):
    """See `forward`."""

    def __call__(
        self,
        model: QwenImage,
        image: Float[Host, "batch seq channels"],
        text: Float[Host, "batch text_seq width"],
        timesteps: Num[Host, " batch"],
        *,
        grids: Grids,
        text_mask: Bool[Host, "batch text_seq"] | None = None,
        kinds: Int[Host, " batch"] | None = None,
    ) -> Float[Array, "batch seq out_channels"]: ...


def forward(
    declared: QwenImage,
    mesh: Mesh | AbstractMesh,
    *,
    residual: Residual = "whole",
    remat: Remat = False,
    dtype: Any = None,
) -> Forward:
    """The pure function `f(model, image, text, timesteps, *, grids, text_mask, kinds)`: to be jitted.

    It returns the model's prediction [batch, seq, out_channels] in the activations' dtype, for the tokens of all
    images, split like the batch and whole on the other axes. Any batch and any lengths will do.

    f's arguments, beside the live model:
        image: tokens of the noisy latents, each of a patch's channels, then those of the reference images.
        text: states of the text encoder.
        timesteps: from 0 to 1, one for each row.
        grids: of each image, in the order of their tokens; not traced. Of layers the one they are of comes last.
        text_mask: True for text that is attended to; all of it if not given.
        kinds: which vector is added to the timestep's, one for each row, for a model with `added_cond`.

    Collectives, besides those of the blocks: one all-reduce for the conditions, one for the modulation of all blocks
    together, an all-gather of the result over the axes that split the tokens.

    Args:
        residual: "seq" splits the streams between blocks along the sequence over the tensor axes as well.
        remat: compute each block again in the backward pass rather than keep its activations: all of it, or what a
            policy says (`remat.py`).
        dtype: of the activations; None is that of the blocks' weights.

    Raises:
        InputError: the mesh does not fit the declaration; an unknown residual.
    """
    layout.audit(declared, mesh)
    check_residual("qwen_image.forward", residual)
    check_remat("qwen_image.forward", remat)
    run = Run(residual=residual, remat=remat, dtype=float_dtype("qwen_image.forward", dtype))

    @jaxtyped(typechecker=beartype)
    def f(
        model: QwenImage,
        image: Float[Host, "batch seq channels"],
        text: Float[Host, "batch text_seq width"],
        timesteps: Num[Host, " batch"],
        *,
        grids: Grids,
        text_mask: Bool[Host, "batch text_seq"] | None = None,
        kinds: Int[Host, " batch"] | None = None,
    ) -> Float[Array, "batch seq out_channels"]:
        batch = image.shape[0]
        fail_if(_problems(declared.config, image, text, grids, kinds), "qwen_image.forward")
        given = {"image": image, "text": text, "timesteps": timesteps, "text_mask": text_mask, "kinds": kinds}
        arrays = {k: pad(jnp.asarray(v), 0, mesh.shape[DATA]) for k, v in given.items() if v is not None}
        shard = layout.sharded(
            lambda model, arrays: _forward(model, declared, run, grids, **arrays),
            mesh,
            (layout.specs(declared), P(DATA)),
            P(DATA),
        )
        return shard(model, arrays)[:batch]

    return f


def _problems(config: Config, image, text, grids, kinds) -> Iterator[str]:
    yield from nothing_in(image=image.shape, text=text.shape)
    for name, x, size in (("image", image, config.in_channels), ("text", text, config.text)):
        if x.shape[-1] != size:
            yield f"{name}: width {x.shape[-1]} is not the model's {size}: give it {size} channels"
    if not grids or min(min(grid) for grid in grids) < 1:
        yield f"grids={grids} are not frames, rows and columns of at least 1: give those of each image"
    elif (tokens := sum(map(np.prod, grids))) != image.shape[1]:
        yield f"grids={grids} are {tokens} tokens, image has seq={image.shape[1]}: give the grids of all images"
    if (kinds is None) == config.added_cond:
        yield "kinds: " + (f"missing: give 0 to {KINDS - 1}" if config.added_cond else "the model has none: leave out")


def _forward(
    model: QwenImage,
    declared: QwenImage,
    run: Run,
    grids: Grids,
    *,
    image: Float[Array, "batch seq channels"],
    text: Float[Array, "batch text_seq width"],
    timesteps: Num[Array, " batch"],
    text_mask: Bool[Array, "batch text_seq"] | None = None,
    kinds: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch seq out_channels"]:
    """One device's rows of the result."""
    config, dtype = declared.config, streams_dtype(model, run)
    ends = ("image", "text", "conditions", "head")
    whole = {name: layout.gather_at_rest(getattr(model, name), getattr(declared, name)) for name in ends}
    model = dataclasses.replace(model, **whole)
    shares = Shares(text=text.shape[1], image=image.shape[1], residual=run.residual)
    tables = positions(grids, text.shape[1], config.layered)
    turns = shares.turns(*(positions_rotary(ids, config.axes, config.theta, np.float32) for ids in tables))
    valid = _valid(shares, text_mask, timesteps)
    condition = jax.nn.silu(_conditions(model, timesteps, kinds, dtype))
    condition, model = ends_in_turn(condition, model, ("image", "text", "head"))
    text_rows, image_rows, head_rows = modulations(model, declared, condition, timesteps.shape[0])
    reference = shares.take(jnp.asarray(_of_references(grids))) if config.zero_cond else None
    streams = model.text(shares.take(text.astype(dtype))), model.image(shares.take(image.astype(dtype)))
    streams, head_rows = layout.in_turn(streams, head_rows)

    def body(streams, inputs):
        block, (text_rows, image_rows) = inputs
        block = layout.gather_at_rest(block, declared.double)
        rows = text_rows, image_rows if reference is None else by_token(image_rows, reference)
        return block(streams, rows, turns, valid, run.residual), None

    body = rematerialised(body, run.remat)
    streams, _ = lax.scan(body, streams, (model.double, (text_rows, image_rows)))
    return shares.whole(model.head(streams[1], head_rows), image.shape[1])


def _conditions(
    model: QwenImage, timesteps: Num[Array, " batch"], kinds: Int[Array, " batch"] | None, dtype: Any
) -> Float[Array, "rows one embed"]:
    """Those of each row of the batch, and with `zero_cond` those of timestep 0 after them."""
    if not model.config.zero_cond:
        return model.conditions(timesteps, kinds, dtype)
    both = jnp.concatenate([timesteps, jnp.zeros_like(timesteps)])
    return model.conditions(both, None if kinds is None else jnp.concatenate([kinds, kinds]), dtype)


def _valid(
    shares: Shares, text_mask: Bool[Array, "batch text_seq"] | None, like: Array
) -> tuple[Bool[Array, "rows text"], Bool[Array, "rows image"]] | None:
    """Which of the tokens that this device projects may be attended to; None where all may."""
    valid = shares.valid()
    if text_mask is None:
        return valid
    image = shares.take(jnp.ones((1, shares.image), bool), (CONTEXT,)) if valid is None else valid[1]
    return shares.take(text_mask, (CONTEXT,)), everywhere(image, like)


def _of_references(grids: Grids) -> Bool[np.ndarray, "one seq"]:
    """Which tokens are of reference images: all but those of the first."""
    return np.arange(sum(map(np.prod, grids)))[None] >= np.prod(grids[0])


def by_token(rows: Rows, reference: Bool[Array, "one part_seq"]) -> Rows:
    """For each token the row of its timestep, of [now, then timestep 0] along the batch."""
    halves = [jnp.split(row, 2) for row in rows]
    return tuple(jnp.where(reference[..., None], zero, now) for now, zero in halves)


def modulations(
    model: QwenImage, declared: QwenImage, condition: Float[Array, "rows one embed"], batch: int
) -> tuple[Rows, Rows, Rows]:
    """The rows of modulation of text, image [row][layer, rows, 1, embed] and head, under one all-reduce.

    Text and head know of the timestep only, the first `batch` rows of the condition.
    """
    live, split = ((tree.double.text.modulation, tree.double.image.modulation) for tree in (model, declared))
    biases = layout.gather_at_rest([layer.bias for layer in live], [layer.bias for layer in split])
    condition, biases = layout.in_turn(condition, biases)
    condition = varying_over(condition, SUMMED)
    now = condition[:batch]

    def body(_, layers):
        text, image = layout.gather_at_rest(layers, split)
        return None, (text.partial(now), image.partial(condition))

    _, (text, image) = lax.scan(body, None, live)
    text, image, head = lax.psum((text, image, model.head.modulation.partial(now)), TP)
    text, image = (x + bias.astype(x.dtype)[:, None, None] for x, bias in zip((text, image), biases, strict=True))
    head = head + model.head.modulation.bias.astype(head.dtype)
    return rows_of(text), rows_of(image), rows_of(head)


PRESETS = {
    "qwen-image": Config(),
    "edit-2511": Config(zero_cond=True),
    "layered": Config(layered=True, added_cond=True),
}
TEXT_TOKENS = 1024  # the longest prompt


def trace(declared: QwenImage, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """The prediction for an image, with a reference image of its size for models of that kind; see `Family.trace`."""
    c, grid = declared.config, (1, *sizes.cells(SPACE_FACTOR))
    grids = (grid,) * (2 if c.zero_cond or c.layered else 1)
    dtype, batch = declared.double.image.up.weight.dtype, sizes.batch
    passing = forward(declared, mesh, **run)

    def f(model: QwenImage, image: Array, text: Array, timesteps: Array) -> Array:
        kinds = jnp.zeros(batch, jnp.int32) if c.added_cond else None
        return passing(model, image, text, timesteps, grids=grids, kinds=kinds)

    shapes = ((int(np.prod(grid)) * len(grids), c.in_channels), (min(sizes.tokens, TEXT_TOKENS), c.text))
    arrays = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape in shapes]
    return f, (*arrays, jax.ShapeDtypeStruct((batch,), jnp.float32))


register(Family(name="qwen-image", config=Config, declare=declare, presets=PRESETS, trace=trace))
