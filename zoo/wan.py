"""Wan video diffusion transformers: Wan2.1 (T2V, I2V, first and last frame) and Wan2.2 (TI2V, A14B).

`declare` a model, make its `forward` for a mesh, and, once for a sampling run, its `context`. The layers are in
`wan_model`, which says what they are made from. Mesh axes: the batch over `data` (a pair for classifier-free guidance
is a batch of two), the video's tokens over `context`, heads and mlp over the tensor axes; `pipe` must be 1.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int, Num, Shaped, jaxtyped

from shardzoo.errors import fail_if, nothing_in
from shardzoo.zoo import layout
from shardzoo.zoo.attention import attention, exchange
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.layers import SEQ, Residual, own_share, pad, settled
from shardzoo.zoo.mesh import CONTEXT, DATA, TP, traced_platform
from shardzoo.zoo.remat import Remat, check_remat, rematerialised
from shardzoo.zoo.video_tokens import Sizes, grid_of, grid_rotary, join_patches, patches
from shardzoo.zoo.wan_model import Config, Context, Host, Modulation, Timesteps, Wan

CHUNKS = 512, 1024  # fewest and most tokens: by arithmetic, 512 rows read a weight faster than v4, v5e and v5p use it
CHUNK_WIDTH = 2560  # of a device's heads, up to which chunks are longest: what a chunk takes grows with both
CPU_CHUNK = 4096  # XLA for CPUs clears the place of all chunks' results first, and writes each into it on one core
ROWS = 16  # chunks are padded to a multiple of this many tokens on each device, as tiles of 16-bit floats are
TEXT_TOKENS = 512  # texts are zero-padded to this length, and the zeros attended to
IMAGE_TOKENS = 257  # of one image, as the published image encoder gives them


def declare(config: Config, dtype: Any = np.float32) -> Wan:
    """The declared model with every weight in `dtype`."""
    return layout.astype(Wan.declare(config), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How `forward` runs; the options are explained there."""

    residual: Residual = "whole"
    remat: Remat = False
    dtype: Any = None
    chunk: int | None = None

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
    remat: Remat = False,
    dtype: Any = None,
    chunk: int | None = None,
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
        remat: compute each block again in the backward pass rather than keep its activations: all of it, or what a
            policy says (`remat.py`).
        dtype: of the activations; None is that of the blocks' weights.
        chunk: most tokens that a device works on at once outside the attention among them: bounds its memory. None is
            1,024, fewer, down to 512, where a device's heads are wider than 2,560; on CPUs 4,096.

    Raises:
        InputError: the mesh does not fit the declaration; an unknown residual; a chunk below 1.
    """
    layout.audit(declared, mesh)
    problems = [] if residual in ("whole", "seq") else [f"residual={residual!r} is unknown: use 'whole' or 'seq'"]
    check_remat("wan.forward", remat)
    problems += [] if chunk is None or chunk >= 1 else [f"chunk={chunk} is not at least 1: change it"]
    fail_if(problems, "wan.forward")
    residual = residual if math.prod(mesh.shape[axis] for axis in TP) > 1 else "whole"  # one device: they are the same
    run = Run(residual=residual, remat=remat, dtype=float_dtype("wan.forward", dtype), chunk=chunk)

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
        kept = None if context is None else Context(*(x if x is None else pad(x, 2, mesh.shape[DATA]) for x in context))
        shard = layout.sharded(
            lambda model, kept, arrays: _forward(model, declared, run, grid, context=kept, **arrays),
            mesh,
            (layout.specs(declared), CONTEXT_SPEC, P(DATA)),
            P(DATA),
        )
        return shard(model, kept, arrays)[:batch]

    return f


CONTEXT_SPEC = P(None, None, DATA, None, TP)


def _check(config: Config, latents: Any, timesteps: Any, text: Any, image: Any, context: Context | None) -> Sizes:
    """The grid of tokens, if what f was given goes together."""
    title, channels = "wan.forward", latents.shape[1]
    fail_if(nothing_in(latents=latents.shape), title)
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
    given = {name: x.shape for name, x in (("text", text), ("image", image)) if x is not None}
    if empty := nothing_in(**given):
        yield from empty
        return
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
    run = Run(dtype=float_dtype("wan.context", dtype))

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
        shard = layout.sharded(
            lambda model, text, image: _context(model, declared, run, text, image),
            mesh,
            (layout.specs(declared), P(DATA), P(DATA)),
            CONTEXT_SPEC,
        )
        return jax.tree.map(lambda x: x[:, :, :batch], shard(model, *arrays))

    return f


def padded_text(
    text: Float[Host, "batch kv_seq text"], lengths: Int[Host, " batch"] | None = None
) -> Float[Array, "batch padded text"]:
    """The text encoder's states as the models were trained on them: zeros beyond each row's length, up to 512."""
    text = jnp.asarray(text)
    if lengths is not None:
        text = jnp.where((jnp.arange(text.shape[1]) < jnp.asarray(lengths)[:, None])[..., None], text, 0)
    return jnp.pad(text, ((0, 0), (0, max(0, TEXT_TOKENS - text.shape[1])), (0, 0)))


def _embedded(
    model: Wan, run: Run, text: Array, image: Array | None
) -> tuple[Float[Array, "batch kv_seq embed"], Float[Array, "batch image_seq embed"] | None]:
    dtype = run.activations(model)
    return model.text(text.astype(dtype)), None if model.image is None else model.image(image.astype(dtype))


def _context(model: Wan, declared: Wan, run: Run, text: Array, image: Array | None) -> Context:
    """One device's keys and values, for all blocks."""
    ends = ("text", "image")
    model = layout.gather_parts(model, declared, ends, to="invarying")
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
    config, dtype = model.config, run.activations(model)
    model = layout.gather_parts(model, declared, ("patch", "time", "text", "image", "head"))
    tokens = math.prod(grid)
    heads = config.heads // lax.axis_size(TP)
    split = Split.of(tokens, run, heads * config.head_dim)
    x = model.patch(split.own(patches(latents.astype(dtype), config.patch))).astype(jnp.float32)
    modulation = _modulation(model, run, split, values, index)
    turn = grid_rotary(config.head_dim, grid, lax.axis_index(CONTEXT) * split.share + jnp.arange(split.share))
    lengths = None if split.total == tokens else jnp.full(latents.shape[0], tokens, jnp.int32)
    embedded = None if text is None else _embedded(model, run, text, image)
    plan = exchange(heads, heads, split.context)
    width = heads // plan.heads * config.head_dim

    def body(x, inputs):
        block, keys = inputs
        block = layout.gather_at_rest(block, declared.blocks)
        keys = block.cross.context(*embedded) if keys is None else keys

        # Between the chunks a device's heads lie as the TPU's kernel reads them, and each chunk is exchanged by itself:
        # all tokens of queries, keys and values are held once, and neither copied nor received beside what was sent.
        def project(x, turn, along):
            q, kv = block.project(x, modulation._replace(**along), turn, dtype, run.residual)
            q, k, v = (
                jnp.moveaxis(y.reshape(*y.shape[:2], plan.heads, width), 2, 1) for y in (q, kv[:, :, 0], kv[:, :, 1])
            )
            k, v = jnp.split(plan.swap(jnp.concatenate([k, v])), 2)
            return [plan.swap(q), k, v]

        def attend(x, attended, along):
            attended = jnp.moveaxis(plan.swap(attended), 1, 2)
            attended = attended.reshape(*attended.shape[:2], heads, config.head_dim)
            return block.attend(x, attended, modulation._replace(**along), keys, run.residual)

        def feed(x, _, along):
            return block.feed(x, modulation._replace(**along), dtype, run.residual)

        flat = split.each_chunk(project, plan.heads, x, turn, modulation.along)
        q, k, v = (y.reshape(y.shape[0], -1, heads // plan.heads, config.head_dim) for y in flat)
        attended = attention(q, jnp.stack([k, v], axis=2), lengths=lengths, exchanged=plan)
        attended = attended.reshape(attended.shape[0], plan.heads, -1, width)
        # In loops of their own: of weights gathered from a split at rest, only those of one loop are held.
        x = split.update_chunks(attend, x, attended, modulation.along)
        return split.update_chunks(feed, x, None, modulation.along), None

    body = rematerialised(body, run.remat)
    x, _ = lax.scan(body, x, (model.blocks, context))
    return join_patches(split.join(model.head(x, modulation)), grid, config.patch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How tokens lie on devices: contiguous shares over `context`, each in chunks, each chunk over the tensor axes.

    Over the tensor axes only with the "seq" residual. What a device gathers of its chunk is then a contiguous stretch.

    Attributes:
        context, tensor: devices.
        chunks: how many chunks each device works on, one after another.
        size: tokens of a chunk on one device.
    """

    context: int
    tensor: int
    chunks: int
    size: int

    @classmethod
    def of(cls, tokens: int, run: Run, width: int) -> "Split":
        """`width` is that of a device's heads."""
        context = lax.axis_size(CONTEXT)
        tensor = lax.axis_size(TP) if run.residual == "seq" else 1
        least, most = CHUNKS
        longest = max(least, min(most, most * CHUNK_WIDTH // width // 128 * 128))
        chunk = run.chunk or (CPU_CHUNK if traced_platform() == "cpu" else longest)
        chunks = -(-tokens // (context * chunk))
        size = -(-tokens // (context * chunks * tensor))
        return cls(context=context, tensor=tensor, chunks=chunks, size=size if chunks == 1 else -(-size // ROWS) * ROWS)

    @property
    def share(self) -> int:
        """Tokens of a device's share over `context`."""
        return self.chunks * self.tensor * self.size

    @property
    def total(self) -> int:
        return self.context * self.share

    def own_context(self, x: Shaped[Array, "batch seq ..."]) -> Shaped[Array, "batch share ..."]:
        """This device's share over `context` of an unpadded sequence that is whole."""
        return own_share(pad(x, SEQ, self.total), (CONTEXT,))

    def by_device(self, x: Shaped[Array, "batch share ..."]) -> Shaped[Array, "batch share ..."]:
        """A share over `context` in another order: what each device of the tensor axes holds, device by device."""
        split = x.reshape(x.shape[0], self.chunks, self.tensor, self.size, *x.shape[2:])
        return split.swapaxes(1, 2).reshape(x.shape)

    def own(self, x: Shaped[Array, "batch seq ..."]) -> Shaped[Array, "batch part_seq ..."]:
        """The tokens that this device holds of an unpadded sequence that is whole.

        Chunk by chunk, in a loop: a TPU's compiler writes out one chunk, and all of a change of order.
        """
        x = pad(x, SEQ, self.total)
        device = lax.axis_index(TP) if self.tensor > 1 else 0
        first = lax.axis_index(CONTEXT) * self.share + device * self.size
        if self.chunks == 1:
            return lax.dynamic_slice_in_dim(x, first, self.size, SEQ)
        step = self.tensor * self.size
        each = lax.map(lambda i: lax.dynamic_slice_in_dim(x, first + i * step, self.size, SEQ), jnp.arange(self.chunks))
        return _joined(each)

    def join(self, x: Shaped[Array, "batch part_seq channels"]) -> Shaped[Array, "batch seq channels"]:
        """The padded sequence, whole on all devices, from what each one holds: one all-gather."""
        axes = (CONTEXT,) if self.tensor == 1 else (CONTEXT, *TP)
        parts = lax.all_gather(x, axes, axis=0, to="invarying")
        batch, channels = x.shape[0], x.shape[2]
        parts = parts.reshape(self.context, self.tensor, batch, self.chunks, self.size, channels)
        return parts.transpose(2, 0, 3, 1, 4, 5).reshape(batch, self.total, channels)

    def each_chunk(
        self, f: Callable[..., list[Shaped[Array, "batch ways chunk width"]]], ways: int, *args: Any
    ) -> list[Shaped[Array, "batch ways seq width"]]:
        """f of the first chunk of every array in the arguments, of the second and so on, and the results joined.

        Each takes its place in the whole result, which is never copied.
        """
        if self.chunks == 1:
            return f(*args)
        parts = jax.tree.map(self._cut, args)
        if ways == 1:  # chunks lie one after another, as a loop's results do: no place is cleared for them first
            each = lax.map(lambda part: f(*part), parts)
            return [jnp.moveaxis(y, 0, 2).reshape(*y.shape[1:3], -1, y.shape[-1]) for y in each]

        def body(held: list[Array], inputs: tuple[Array, Any]) -> tuple[list[Array], None]:
            chunk, part = inputs
            return [lax.dynamic_update_index_in_dim(h, y, chunk, 2) for h, y in zip(held, f(*part), strict=True)], None

        each = jax.eval_shape(lambda parts: f(*jax.tree.map(lambda x: x[0], parts)), parts)
        held = [jnp.zeros((*y.shape[:2], self.chunks, *y.shape[2:]), y.dtype) for y in each]
        held = lax.pcast(held, (DATA, CONTEXT, *TP), to="varying")
        held, _ = lax.scan(body, held, (jnp.arange(self.chunks), parts))
        return [y.reshape(*y.shape[:2], -1, y.shape[-1]) for y in held]

    def update_chunks(
        self, f: Callable[..., Array], x: Array, attended: Shaped[Array, "batch ways seq width"] | None, along: Any
    ) -> Array:
        """f of x, of attended and of the arrays of `along`, in chunks; the new x of each takes the place of the old."""
        if self.chunks == 1:
            return f(x, attended, along)

        def body(x: Array, inputs: tuple[Array, Array | None, Any]) -> tuple[Array, None]:
            chunk, *part = inputs
            new = f(settled(lax.dynamic_index_in_dim(x, chunk, 0, keepdims=False)), *part)
            return lax.dynamic_update_index_in_dim(x, new, chunk, 0), None

        attended = None if attended is None else self._cut(attended, 2)
        inputs = jnp.arange(self.chunks), attended, jax.tree.map(self._cut, along)
        return _joined(lax.scan(body, self._cut(x), inputs)[0])

    def _cut(self, x: Shaped[Array, "..."], axis: int = SEQ) -> Shaped[Array, "..."]:
        """The chunks of x along this axis, on a new one in front."""
        return jnp.moveaxis(x.reshape(*x.shape[:axis], self.chunks, -1, *x.shape[axis + 1 :]), axis, 0)


def _joined(x: Shaped[Array, "chunks batch chunk ..."]) -> Shaped[Array, "batch seq ..."]:
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _modulation(model: Wan, run: Run, split: Split, values: Array, index: Array | None) -> Modulation:
    """What the timesteps give; one for each token only of this device's tokens."""
    each = index is None and values.shape[1] > 1
    values = split.by_device(split.own_context(values)) if each else values
    with jax.default_matmul_precision("highest"):
        blocks, head = model.time(values, run.residual if each else "whole")
    return Modulation(blocks, head, None if index is None else split.own(index))


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


def trace(declared: Wan, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """One call for whole videos, as `Family.trace` says; latents are of the autoencoder that the channels tell."""
    c = declared.config
    time, space = 4, 16 if c.out_channels == 48 else 8
    side = max(c.patch[1:])
    grid = (1 + (sizes.frames - 1) // time, *(count * side for count in sizes.cells(space * side)))
    shapes = {
        "latents": (sizes.batch, c.in_channels, *grid),
        "timesteps": (sizes.batch,),
        "text": (sizes.batch, TEXT_TOKENS, c.text),
    }
    if c.image is not None:
        shapes["image"] = (sizes.batch, c.image_positions or IMAGE_TOKENS, c.image)
    passing = forward(declared, mesh, **run)

    def f(model: Wan, latents: Any, timesteps: Any, text: Any, image: Any = None) -> Array:
        return passing(model, latents, timesteps, text=text, image=image)

    return f, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values())


register(Family(name="wan", config=Config, declare=declare, presets=PRESETS, trace=trace))
