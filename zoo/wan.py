"""Wan video diffusion transformers: Wan2.1 (T2V, I2V, first and last frame) and Wan2.2 (TI2V, A14B).

`declare` a model, make its `forward` for a mesh, and, once for a sampling run, its `context`. The layers are in
`wan_model`, which says what they are made from. Mesh axes: the batch over `data` (a pair for classifier-free guidance
is a batch of two), the video's tokens over `context`, heads and mlp over the tensor axes; `pipe` must be 1.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int, Num, jaxtyped

from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import layout
from shardzoo.zoo.families import Family, register
from shardzoo.zoo.layers import SEQ, Residual
from shardzoo.zoo.mesh import CONTEXT, DATA, TP
from shardzoo.zoo.video_tokens import Sizes, grid_of, grid_rotary, join_patches, patches
from shardzoo.zoo.wan_model import Config, Context, Host, Modulation, Timesteps, Wan, own_share

TEXT_TOKENS = 512  # texts are zero-padded to this length, and the zeros attended to


def declare(config: Config, dtype: Any = np.float32) -> Wan:
    """The declared model with every weight in `dtype`."""
    return layout.astype(Wan.declare(config), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How `forward` runs; the options are explained there."""

    residual: Residual = "whole"
    remat: bool = False
    dtype: Any = None

    @property
    def stream_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the tokens of the stream."""
        return (CONTEXT,) if self.residual == "whole" else (CONTEXT, *TP)

    def activations(self, model: Wan) -> Any:
        return model.blocks.mlp.up.weight.dtype if self.dtype is None else self.dtype


@runtime_checkable
class Forward(Protocol):
    """See `forward`."""

    def __call__(
        self,
        model: Wan,
        latents: Float[Host, "batch channels frames height width"],
        timesteps: Num[Host, " batch"] | Num[Host, "batch seq"] | Timesteps,
        *,
        text: Float[Host, "batch kv_seq text"] | None = None,
        image: Float[Host, "images image_seq image"] | None = None,
        context: Context | None = None,
    ) -> Float[Array, "batch out_channels frames height width"]: ...


def forward(
    declared: Wan,
    mesh: Mesh | AbstractMesh,
    *,
    residual: Residual = "whole",
    remat: bool = False,
    dtype: Any = None,
) -> Forward:
    """The pure function `f(model, latents, timesteps, *, text, image, context)`: to be jitted, alone or within another.

    It returns the model's prediction [batch, out_channels, frames, height, width] in float32, split like the batch and
    whole on the other axes, as the latents are. Any batch and any number of tokens will do.

    f's arguments, beside the live model:
        latents: [batch, in_channels, frames, height, width], condition channels after the noisy ones.
        timesteps: of 0 to 1000; one for each row, or one for each token [batch, seq], or `Timesteps`: few values and
            each token's index into them, which spares what the blocks add being held for every token.
        text: the text encoder's states; all of them are attended to (the models expect `padded_text`).
        image: the image encoder's states of a model with an image branch, several images of a row one after another,
            in the rows ([2 * batch, 257, width]) or in the tokens ([batch, 514, width]).
        context: what the function `context` made, in place of text and image.

    Collectives, besides those of the blocks: an all-gather of the result over the axes that split the tokens; two
    all-reduces for the timesteps, one for the text, one for the image.

    Args:
        residual: "seq" splits the stream between blocks along the sequence over the tensor axes as well.
        remat: compute each block again in the backward pass rather than keep its activations.
        dtype: of the activations; None is that of the blocks' weights.

    Raises:
        InputError: the mesh does not fit the declaration; an unknown residual.
    """
    layout.audit(declared, mesh)
    if residual not in ("whole", "seq"):
        raise InputError(f"wan.forward: residual={residual!r} is unknown: use 'whole' or 'seq'")
    run = Run(residual=residual, remat=remat, dtype=None if dtype is None else jnp.dtype(dtype))

    @jaxtyped(typechecker=beartype)
    def f(
        model: Wan,
        latents: Float[Host, "batch channels frames height width"],
        timesteps: Num[Host, " batch"] | Num[Host, "batch seq"] | Timesteps,
        *,
        text: Float[Host, "batch kv_seq text"] | None = None,
        image: Float[Host, "images image_seq image"] | None = None,
        context: Context | None = None,
    ) -> Float[Array, "batch out_channels frames height width"]:
        config, batch = declared.config, latents.shape[0]
        grid = _check(config, latents, timesteps, text, image, context)
        values, index = timesteps if isinstance(timesteps, Timesteps) else (timesteps, None)
        given = {
            "latents": latents,
            "values": values if values.ndim == 2 else values[:, None],
            "index": index,
            "text": text,
            "image": None if image is None else image.reshape(batch, -1, image.shape[-1]),
        }
        arrays = {k: pad(jnp.asarray(v), 0, mesh.shape[DATA]) for k, v in given.items() if v is not None}
        kept = None if context is None else Context(*(x if x is None else pad(x, 1, mesh.shape[DATA]) for x in context))
        shard = jax.shard_map(
            lambda model, kept, arrays: _forward(model, declared, run, grid, context=kept, **arrays),
            mesh=mesh,
            in_specs=(layout.specs(declared), CONTEXT_SPEC, P(DATA)),
            out_specs=P(DATA),
            check_vma=True,
        )
        return shard(model, kept, arrays)[:batch]

    return f


CONTEXT_SPEC = P(None, DATA, None, None, TP)


def _check(config: Config, latents: Any, timesteps: Any, text: Any, image: Any, context: Context | None) -> Sizes:
    """The grid of tokens, if what f was given goes together."""
    title, channels = "wan.forward", latents.shape[1]
    grid = grid_of(latents.shape, config.patch, title)
    tokens = math.prod(grid)
    problems = []
    if channels != config.in_channels:
        problems.append(f"latents: channels={channels} are not the model's {config.in_channels}: add or drop some")
    each = timesteps.index if isinstance(timesteps, Timesteps) else timesteps
    if each.ndim == 2 and each.shape[1] != tokens:
        problems.append(f"timesteps: seq={each.shape[1]} are not the {tokens} tokens of {grid}: give one for each")
    if (text is None) == (context is None):
        problems.append("give either text or context")
    if context is not None and image is not None:
        problems.append("image and context were both given: the context holds the image")
    if context is not None and (context.image is None) != (config.image is None):
        problems.append("context: made by a model of another kind: one has an image branch")
    problems += _condition_problems(config, text, image) if context is None else []
    fail_if(problems, title)
    return grid


def _condition_problems(config: Config, text: Any, image: Any) -> Iterator[str]:
    if text is not None and text.shape[-1] != config.text:
        yield f"text: width {text.shape[-1]} is not the model's {config.text}: give the text encoder's states"
    if text is not None and (image is None) != (config.image is None):
        yield "image: " + ("the model has no image branch: leave it out" if image is not None else "missing")
    elif text is not None and image is not None:
        count = image.shape[0] * image.shape[1] / text.shape[0]
        if image.shape[-1] != config.image:
            yield f"image: width {image.shape[-1]} is not the model's {config.image}: give the image encoder's states"
        if image.shape[0] % text.shape[0]:
            yield f"image: {image.shape[0]} images do not divide by batch={text.shape[0]}: give as many for each row"
        if config.image_positions not in (None, count):
            yield f"image: {count:g} tokens a row are not the {config.image_positions} positions: give all images"


def context(declared: Wan, mesh: Mesh | AbstractMesh, *, dtype: Any = None) -> Callable[..., Context]:
    """The pure function `f(model, text, image=None)` that gives a sampling run's `Context`, once for all its steps.

    Text and image are as for `forward`. The result is split over the batch and by heads.

    Collectives: one all-reduce for the text, one for the image, one in each block for the norm of the keys.

    Raises:
        InputError: the mesh does not fit the declaration.
    """
    layout.audit(declared, mesh)
    run = Run(dtype=None if dtype is None else jnp.dtype(dtype))

    @jaxtyped(typechecker=beartype)
    def f(
        model: Wan,
        text: Float[Host, "batch kv_seq text"],
        image: Float[Host, "images image_seq image"] | None = None,
    ) -> Context:
        batch = text.shape[0]
        fail_if(_condition_problems(declared.config, text, image), "wan.context")
        images = None if image is None else image.reshape(batch, -1, image.shape[-1])
        arrays = [None if x is None else pad(jnp.asarray(x), 0, mesh.shape[DATA]) for x in (text, images)]
        shard = jax.shard_map(
            lambda model, text, image: _context(model, declared, run, text, image),
            mesh=mesh,
            in_specs=(layout.specs(declared), P(DATA), P(DATA)),
            out_specs=CONTEXT_SPEC,
            check_vma=True,
        )
        return jax.tree.map(lambda x: x[:, :batch], shard(model, *arrays))

    return f


def padded_text(
    text: Float[Host, "batch kv_seq text"], lengths: Int[Host, " batch"] | None = None
) -> Float[Array, "batch padded text"]:
    """The text encoder's states as the models were trained on them: zeros beyond each row's length, up to 512."""
    text = jnp.asarray(text)
    if lengths is not None:
        text = jnp.where((jnp.arange(text.shape[1]) < jnp.asarray(lengths)[:, None])[..., None], text, 0)
    return jnp.pad(text, ((0, 0), (0, max(0, TEXT_TOKENS - text.shape[1])), (0, 0)))


def pad(x: Array, axis: int, ways: int) -> Array:
    """x with zeros added until this dim divides."""
    extra = [(0, -size % ways if dim == axis else 0) for dim, size in enumerate(x.shape)]
    return jnp.pad(x, extra) if extra[axis][1] else x


def _embedded(
    model: Wan, run: Run, text: Array, image: Array | None
) -> tuple[Float[Array, "batch kv_seq embed"], Float[Array, "batch image_seq embed"] | None]:
    dtype = run.activations(model)
    return model.text(text.astype(dtype)), None if model.image is None else model.image(image.astype(dtype))


def _context(model: Wan, declared: Wan, run: Run, text: Array, image: Array | None) -> Context:
    """One device's keys and values, for all blocks."""
    ends = ("text", "image")
    model = gather_ends(model, declared, ends, to="invarying")
    embedded = _embedded(model, run, text, image)

    def body(_, cross):
        cross = layout.gather_at_rest(cross, declared.blocks.cross, to="invarying")
        return None, cross.context(*embedded)

    return lax.scan(body, None, model.blocks.cross)[1]


def _forward(
    model: Wan,
    declared: Wan,
    run: Run,
    grid: Sizes,
    *,
    latents: Float[Array, "batch channels frames height width"],
    values: Num[Array, "batch count"],
    index: Int[Array, "batch seq"] | None = None,
    text: Float[Array, "batch kv_seq text"] | None = None,
    image: Float[Array, "batch image_seq image"] | None = None,
    context: Context | None = None,
) -> Float[Array, "batch out_channels frames height width"]:
    """One device's rows of the result."""
    config, dtype, axes = model.config, run.activations(model), run.stream_axes
    model = gather_ends(model, declared, ("patch", "time", "text", "image", "head"))
    tokens, ways = math.prod(grid), lax.axis_size(axes)
    x = own_share(pad(patches(latents.astype(dtype), config.patch), SEQ, ways), axes)
    x = model.patch(x).astype(jnp.float32)
    modulation = _modulation(model, run, values, index, ways)
    share = -(-tokens // ways) * ways // lax.axis_size(CONTEXT)
    turn = grid_rotary(config.head_dim, grid, lax.axis_index(CONTEXT) * share + jnp.arange(share))
    lengths = None if tokens % ways == 0 else jnp.full(latents.shape[0], tokens, jnp.int32)
    embedded = None if text is None else _embedded(model, run, text, image)

    def body(x, inputs):
        block, keys = inputs
        block = layout.gather_at_rest(block, declared.blocks)
        keys = block.cross.context(*embedded) if keys is None else keys
        return block(x, modulation, keys, turn, lengths, dtype, run.residual), None

    body = jax.checkpoint(body, prevent_cse=False) if run.remat else body
    x, _ = lax.scan(body, x, (model.blocks, context))
    with jax.default_matmul_precision("highest"):
        y = model.head(x, modulation)
    y = lax.all_gather(y, axes, axis=SEQ, tiled=True, to="invarying")
    return join_patches(y[:, :tokens], grid)


def _modulation(model: Wan, run: Run, values: Array, index: Array | None, ways: int) -> Modulation:
    """What the timesteps give; one for each token only of this device's tokens."""
    if index is not None:
        index = own_share(pad(index, SEQ, ways), run.stream_axes)
    each = index is None and values.shape[1] > 1
    values = own_share(pad(values, SEQ, ways), (CONTEXT,)) if each else values
    with jax.default_matmul_precision("highest"):
        return Modulation(*model.time(values, run.residual if each else "whole"), index)


def gather_ends(model: Wan, declared: Wan, parts: Sequence[str], *, to: str = "varying") -> Wan:
    """The model with these parts gathered from a split at rest."""
    whole = {name: layout.gather_at_rest(getattr(model, name), getattr(declared, name), to=to) for name in parts}
    return dataclasses.replace(model, **whole)


def _member(heads: int, layers: int, mlp: int, in_channels: int, out_channels: int = 16, **more: int) -> Config:
    return Config(
        in_channels=in_channels, out_channels=out_channels, heads=heads, head_dim=128, layers=layers, mlp=mlp, **more
    )


PRESETS = {
    "wan2.1-t2v-1.3b": _member(12, 30, 8960, 16),
    "wan2.1-t2v-14b": _member(40, 40, 13824, 16),
    "wan2.1-i2v-14b": _member(40, 40, 13824, 36, image=1280),
    "wan2.1-flf2v-14b": _member(40, 40, 13824, 36, image=1280, image_positions=514),
    "wan2.2-ti2v-5b": _member(24, 30, 14336, 48, 48),
    "wan2.2-t2v-a14b": _member(40, 40, 13824, 16),
    "wan2.2-i2v-a14b": _member(40, 40, 13824, 36),
}
register(Family(name="wan", config=Config, declare=declare, presets=PRESETS))
