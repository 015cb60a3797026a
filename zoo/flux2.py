"""FLUX.2 image transformers, dev (32B) and klein (4B and 9B): text, image and reference images in one attention.

`declare` a model and make its `forward` for a mesh; the layers are in `flux2_model` and `flux_blocks`, which say what
they are made from. Mesh axes: the batch over `data`, text and image tokens over `context`, heads and mlp over the
tensor axes; `pipe` must be 1. Any lengths of text and image will do.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Num, jaxtyped

from shardzoo.errors import fail_if, nothing_in
from shardzoo.zoo import layout
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.flux2_model import Config, Flux2
from shardzoo.zoo.flux_blocks import Run, ends_in_turn, run_blocks, streams_dtype
from shardzoo.zoo.joint_streams import Shares, Turns, positions_rotary
from shardzoo.zoo.layers import Residual, check_residual, pad
from shardzoo.zoo.mesh import DATA
from shardzoo.zoo.remat import Remat, check_remat

Host = Array | np.ndarray
SPACE_FACTOR = 16  # pixels of a token's side: 8 of the autoencoder's, times the patch
REFERENCE = 10  # how far reference images stand apart along the first axis


def declare(config: Config, dtype: Any = np.float32) -> Flux2:
    """The declared model with every weight in `dtype`."""
    return layout.astype(Flux2.declare(config), dtype)


def image_ids(height: int, width: int, references: tuple[tuple[int, int], ...] = ()) -> Float[np.ndarray, "seq 4"]:
    """Positions of an image's tokens, then of those of reference images of these heights and widths: all in tokens.

    Axes: image (0; references 10, 20, ...), row, column, 0. Rows follow one after another.
    """
    grids = [
        np.stack([np.full(size, REFERENCE * n), *np.mgrid[: size[0], : size[1]], np.zeros(size)], axis=-1)
        for n, size in enumerate(((height, width), *references))
    ]
    return np.concatenate([grid.reshape(-1, 4) for grid in grids])


def text_ids(length: int) -> Float[np.ndarray, "seq 4"]:
    """Positions of a text's tokens: 0, 0, 0, their place."""
    return np.arange(length)[:, None] * np.array([0.0, 0.0, 0.0, 1.0])


@runtime_checkable
class Forward(Protocol):
    """See `forward`."""

    def __call__(
        self,
        model: Flux2,
        image: Float[Host, "batch seq channels"],
        text: Float[Host, "batch text_seq width"],
        timesteps: Num[Host, " batch"],
        *,
        image_ids: Num[np.ndarray, "seq axes"],
        text_ids: Num[np.ndarray, "text_seq axes"] | None = None,
        guidance: Num[Host, " batch"] | None = None,
    ) -> Float[Array, "batch seq out_channels"]: ...


def forward(
    declared: Flux2,
    mesh: Mesh | AbstractMesh,
    *,
    residual: Residual = "whole",
    remat: Remat = False,
    dtype: Any = None,
) -> Forward:
    """The pure function `f(model, image, text, timesteps, *, image_ids, text_ids, guidance)`: to be jitted.

    It returns the model's prediction [batch, seq, out_channels] in the activations' dtype, split like the batch and
    whole on the other axes. Any batch and any lengths will do.

    f's arguments, beside the live model:
        image: tokens of the noisy latents, then those of reference images if there are any; the result has a row for
            each of them, of which only those of the noisy latents mean something.
        text: states of the text encoder's layers, side by side; all of it is attended to, padding too, as the models
            expect.
        timesteps: from 0 to 1, one for each row.
        image_ids, text_ids: positions along each axis; not traced, since the turns are made of them in float64
            once. Those of the text are `text_ids` of its length if not given.
        guidance: scale of the guidance, one for each row, for a model that is told it; klein models are not.

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
    check_residual("flux2.forward", residual)
    check_remat("flux2.forward", remat)
    run = Run(residual=residual, remat=remat, dtype=float_dtype("flux2.forward", dtype))
    text_places = text_ids

    @jaxtyped(typechecker=beartype)
    def f(
        model: Flux2,
        image: Float[Host, "batch seq channels"],
        text: Float[Host, "batch text_seq width"],
        timesteps: Num[Host, " batch"],
        *,
        image_ids: Num[np.ndarray, "seq axes"],
        text_ids: Num[np.ndarray, "text_seq axes"] | None = None,
        guidance: Num[Host, " batch"] | None = None,
    ) -> Float[Array, "batch seq out_channels"]:
        config, batch = declared.config, image.shape[0]
        text_ids = text_places(text.shape[1]) if text_ids is None else text_ids
        fail_if(_problems(config, image, text, image_ids, text_ids, guidance), "flux2.forward")
        given = {"image": image, "text": text, "timesteps": timesteps, "guidance": guidance}
        arrays = {k: pad(jnp.asarray(v), 0, mesh.shape[DATA]) for k, v in given.items() if v is not None}
        places = tuple(positions_rotary(ids, config.axes, config.theta) for ids in (text_ids, image_ids))
        shard = layout.sharded(
            lambda model, arrays: _forward(model, declared, run, places, **arrays),
            mesh,
            (layout.specs(declared), P(DATA)),
            P(DATA),
        )
        return shard(model, arrays)[:batch]

    return f


def _problems(config: Config, image, text, image_ids, text_ids, guidance) -> Iterator[str]:
    yield from nothing_in(image=image.shape, text=text.shape)
    for name, x, size in (("image", image, config.in_channels), ("text", text, config.text)):
        if x.shape[-1] != size:
            yield f"{name}: width {x.shape[-1]} is not the model's {size}: give it {size} channels"
    for name, ids in (("image_ids", image_ids), ("text_ids", text_ids)):
        if ids.shape[1] != len(config.axes):
            yield f"{name}: axes={ids.shape[1]} are not the {len(config.axes)} of the model: give one position for each"
    if (guidance is None) == config.guidance:
        yield "guidance: " + ("missing" if config.guidance else "the model is not told it (klein): leave it out")


def _forward(
    model: Flux2,
    declared: Flux2,
    run: Run,
    places: tuple[Turns, ...],
    *,
    image: Float[Array, "batch seq channels"],
    text: Float[Array, "batch text_seq width"],
    timesteps: Num[Array, " batch"],
    guidance: Num[Array, " batch"] | None = None,
) -> Float[Array, "batch seq out_channels"]:
    """One device's rows of the result."""
    dtype = streams_dtype(model, run)
    ends = ("image", "text", "conditions", "modulation", "head")
    whole = {name: layout.gather_at_rest(getattr(model, name), getattr(declared, name)) for name in ends}
    model = dataclasses.replace(model, **whole)
    shares = Shares(text=text.shape[1], image=image.shape[1], residual=run.residual)
    condition = jax.nn.silu(model.conditions(timesteps, guidance, dtype))
    condition, model = ends_in_turn(condition, model, ("image", "text", "modulation", "head"))
    rows, head_rows = model.modulation(condition, model.head.modulation)
    streams = model.text(shares.take(text.astype(dtype))), model.image(shares.take(image.astype(dtype)))
    streams, (rows, head_rows) = layout.in_turn(streams, (rows, head_rows))
    turns = shares.turns(*places)
    x = run_blocks(model, declared, streams, rows, turns, shares, shared=True, remat=run.remat)
    return shares.whole(model.head(x, head_rows), image.shape[1])


PRESETS = {
    "flux2-dev": Config(),
    "flux2-klein-4b": Config(heads=24, double_layers=5, single_layers=20, mlp=9216, text=7680, guidance=False),
    "flux2-klein-9b": Config(heads=32, double_layers=8, single_layers=24, mlp=12288, text=12288, guidance=False),
}
TEXT_TOKENS = 512


def trace(declared: Flux2, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """The prediction for an image, as `Family.trace` says."""
    c, (rows, columns) = declared.config, sizes.cells(SPACE_FACTOR)
    dtype, batch = declared.double.image.up.weight.dtype, sizes.batch
    passing = forward(declared, mesh, **run)

    def f(model: Flux2, image: Array, text: Array, timesteps: Array) -> Array:
        guidance = timesteps if c.guidance else None
        return passing(model, image, text, timesteps, image_ids=image_ids(rows, columns), guidance=guidance)

    shapes = ((rows * columns, c.in_channels), (TEXT_TOKENS, c.text))
    arrays = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape in shapes]
    return f, (*arrays, jax.ShapeDtypeStruct((batch,), jnp.float32))


register(Family(name="flux2", config=Config, declare=declare, presets=PRESETS, trace=trace))
