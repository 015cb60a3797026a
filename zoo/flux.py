"""FLUX.1 image transformers, dev and schnell: 12B parameters, text and image in one attention.

`declare` a model and make its `forward` for a mesh; the layers are in `flux_model`, which says what they are made from.
Mesh axes: the batch over `data`, text and image tokens over `context`, heads and mlp over the tensor axes; `pipe` must
be 1. Any lengths of text and image will do.
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
from jaxtyping import Array, Float, Num, jaxtyped

from shardzoo.errors import fail_if, nothing_in
from shardzoo.kernels.flash_attention.options import varying_over
from shardzoo.zoo import layout
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.flux_blocks import SUMMED, Rows, Run, ends_in_turn, rows_of, run_blocks, streams_dtype
from shardzoo.zoo.flux_model import Config, Flux
from shardzoo.zoo.joint_streams import Shares, Turns, positions_rotary
from shardzoo.zoo.layers import Residual, SplitInputLinear, check_residual, pad
from shardzoo.zoo.mesh import DATA, TP
from shardzoo.zoo.remat import Remat, check_remat

Host = Array | np.ndarray
SPACE_FACTOR = 16  # pixels of a token's side: 8 of the autoencoder's, times the patch


def declare(config: Config, dtype: Any = np.float32) -> Flux:
    """The declared model with every weight in `dtype`."""
    return layout.astype(Flux.declare(config), dtype)


def image_ids(height: int, width: int) -> Float[np.ndarray, "seq 3"]:
    """Positions of an image's tokens: 0, row, column; rows one after another."""
    return np.stack([np.zeros((height, width)), *np.mgrid[:height, :width]], axis=-1).reshape(-1, 3)


@runtime_checkable
class Forward(Protocol):
    """See `forward`."""

    def __call__(
        self,
        model: Flux,
        image: Float[Host, "batch seq channels"],
        text: Float[Host, "batch text_seq width"],
        pooled: Float[Host, "batch pooled_width"],
        timesteps: Num[Host, " batch"],
        *,
        image_ids: Num[np.ndarray, "seq axes"],
        text_ids: Num[np.ndarray, "text_seq axes"] | None = None,
        guidance: Num[Host, " batch"] | None = None,
    ) -> Float[Array, "batch seq out_channels"]: ...


def forward(
    declared: Flux,
    mesh: Mesh | AbstractMesh,
    *,
    residual: Residual = "whole",
    remat: Remat = False,
    dtype: Any = None,
) -> Forward:
    """The pure function `f(model, image, text, pooled, timesteps, *, image_ids, text_ids, guidance)`: to be jitted.

    It returns the model's prediction [batch, seq, out_channels] in the activations' dtype, split like the batch and
    whole on the other axes. Any batch and any lengths will do.

    f's arguments, beside the live model:
        image: tokens of the noisy latents, each of a patch's channels.
        text, pooled: states of the text encoders; all of text is attended to, padding too, as the models expect.
        timesteps: from 0 to 1, one for each row.
        image_ids, text_ids: positions along each axis; not traced, since the turns are made of them in float64
            once. Those of the text are zeros if not given.
        guidance: scale of the guidance, one for each row, for a model that is told it.

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
    check_residual("flux.forward", residual)
    check_remat("flux.forward", remat)
    run = Run(residual=residual, remat=remat, dtype=float_dtype("flux.forward", dtype))

    @jaxtyped(typechecker=beartype)
    def f(
        model: Flux,
        image: Float[Host, "batch seq channels"],
        text: Float[Host, "batch text_seq width"],
        pooled: Float[Host, "batch pooled_width"],
        timesteps: Num[Host, " batch"],
        *,
        image_ids: Num[np.ndarray, "seq axes"],
        text_ids: Num[np.ndarray, "text_seq axes"] | None = None,
        guidance: Num[Host, " batch"] | None = None,
    ) -> Float[Array, "batch seq out_channels"]:
        config, batch = declared.config, image.shape[0]
        text_ids = np.zeros((text.shape[1], len(config.axes))) if text_ids is None else text_ids
        fail_if(_problems(config, image, text, pooled, image_ids, text_ids, guidance), "flux.forward")
        given = {"image": image, "text": text, "pooled": pooled, "timesteps": timesteps, "guidance": guidance}
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


def _problems(config: Config, image, text, pooled, image_ids, text_ids, guidance) -> Iterator[str]:
    yield from nothing_in(image=image.shape, text=text.shape)
    sizes = (("image", image, config.in_channels), ("text", text, config.text), ("pooled", pooled, config.pooled))
    for name, x, size in sizes:
        if x.shape[-1] != size:
            yield f"{name}: width {x.shape[-1]} is not the model's {size}: give it {size} channels"
    for name, ids in (("image_ids", image_ids), ("text_ids", text_ids)):
        if ids.shape[1] != len(config.axes):
            yield f"{name}: axes={ids.shape[1]} are not the {len(config.axes)} of the model: give one position for each"
    if (guidance is None) == config.guidance:
        yield "guidance: " + ("missing" if config.guidance else "the model is not told it: leave it out")


def _forward(
    model: Flux,
    declared: Flux,
    run: Run,
    places: tuple[Turns, ...],
    *,
    image: Float[Array, "batch seq channels"],
    text: Float[Array, "batch text_seq width"],
    pooled: Float[Array, "batch pooled_width"],
    timesteps: Num[Array, " batch"],
    guidance: Num[Array, " batch"] | None = None,
) -> Float[Array, "batch seq out_channels"]:
    """One device's rows of the result."""
    dtype = streams_dtype(model, run)
    ends = ("image", "text", "conditions", "head")
    whole = {name: layout.gather_at_rest(getattr(model, name), getattr(declared, name)) for name in ends}
    model = dataclasses.replace(model, **whole)
    shares = Shares(text=text.shape[1], image=image.shape[1], residual=run.residual)
    condition = jax.nn.silu(model.conditions(timesteps, guidance, pooled.astype(dtype)))
    condition, model = ends_in_turn(condition, model, ("image", "text", "head"))
    rows, head_rows = modulations(model, declared, condition)
    streams = model.text(shares.take(text.astype(dtype))), model.image(shares.take(image.astype(dtype)))
    streams, head_rows = layout.in_turn(streams, head_rows)
    turns = shares.turns(*places)
    x = run_blocks(model, declared, streams, rows, turns, shares, shared=False, remat=run.remat)
    return shares.whole(model.head(x, head_rows), image.shape[1])


def modulations(
    model: Flux, declared: Flux, condition: Float[Array, "batch one embed"]
) -> tuple[tuple[tuple[Rows, Rows], Rows], Rows]:
    """The rows of every block's modulation, [row][layer, batch, 1, embed], and those of the head, under one all-reduce.

    Of blocks of two streams a pair, the text's and the image's.
    """

    def partial(
        condition: Array, layers: tuple[SplitInputLinear, ...], declared: tuple[SplitInputLinear, ...]
    ) -> list[Array]:
        def body(_, layers):
            layers = layout.gather_at_rest(layers, declared)
            return None, [layer.partial(condition) for layer in layers]

        return lax.scan(body, None, layers)[1]

    def of(tree: Flux) -> tuple[tuple[SplitInputLinear, ...], tuple[SplitInputLinear, ...]]:
        return (tree.double.text.modulation, tree.double.image.modulation), (tree.single.modulation,)

    live, split = of(model), of(declared)
    at_rest = [layer.bias for layer in (*live[0], *live[1])], [layer.bias for layer in (*split[0], *split[1])]
    condition, biases = layout.in_turn(condition, layout.gather_at_rest(*at_rest))
    condition = varying_over(condition, SUMMED)
    single = partial(condition, live[1], split[1])
    condition, single = layout.in_turn(condition, single)
    sums = [*partial(condition, live[0], split[0]), *single, model.head.modulation.partial(condition)]
    sums = lax.psum(sums, TP)
    rows = [
        rows_of(total + bias.astype(total.dtype)[:, None, None]) for total, bias in zip(sums[:-1], biases, strict=True)
    ]
    head = sums[-1] + model.head.modulation.bias.astype(condition.dtype)
    return ((rows[0], rows[1]), rows[2]), tuple(head[:, :, row] for row in range(head.shape[2]))


PRESETS = {"flux1-dev": Config(), "flux1-schnell": Config(guidance=False)}
TEXT_TOKENS = {True: 512, False: 256}  # of dev and of schnell


def trace(declared: Flux, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """The prediction for an image, as `Family.trace` says."""
    c, (rows, columns) = declared.config, sizes.cells(SPACE_FACTOR)
    dtype, batch = declared.double.image.up.weight.dtype, sizes.batch
    passing = forward(declared, mesh, **run)

    def f(model: Flux, image: Array, text: Array, pooled: Array, timesteps: Array) -> Array:
        guidance = timesteps if c.guidance else None
        return passing(model, image, text, pooled, timesteps, image_ids=image_ids(rows, columns), guidance=guidance)

    shapes = ((rows * columns, c.in_channels), (TEXT_TOKENS[c.guidance], c.text), (c.pooled,))
    arrays = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape in shapes]
    return f, (*arrays, jax.ShapeDtypeStruct((batch,), jnp.float32))


register(Family(name="flux", config=Config, declare=declare, presets=PRESETS, trace=trace))
