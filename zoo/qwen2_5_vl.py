"""The vision tower of Qwen2.5-VL: images of any size as features that stand in for tokens of its language tower.

Source: `Qwen2_5_VisionTransformerPretrainedModel` of transformers 5. The language tower is the decoder family's
(`decoder.encode` takes the features); `qwen2_5_vl_inputs` has the patches, places and positions that both ask for.

Mesh axes: patches over `context`, heads and mlp over the tensor axes; `pipe` must be 1. All images are one sequence,
so that the devices of `data` compute the same. Shapes inside layers are one device's. The blocks are stacked and run by
one `lax.scan`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int, jaxtyped

from shardzoo.errors import fail_if
from shardzoo.zoo import layout
from shardzoo.zoo.attention import attention
from shardzoo.zoo.decoder_model import Mlp
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.layers import ColumnLinear, Leaf, RMSNorm, RowLinear, contract, own_share
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import CONTEXT, DATA, TP
from shardzoo.zoo.qwen2_5_vl_inputs import Arrangement, Grids, arrangement
from shardzoo.zoo.rope import Rope, Rotary, frequencies, rotate

Host = Array | np.ndarray  # what the public functions take
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        embed, mlp, layers, heads: sizes; embed divides by heads.
        channels, frames, patch: of a patch: channels, frames, and height and width in pixels.
        merge: side of the square of patches that make one feature.
        window: side of the windows that most blocks attend in, in pixels.
        whole: the blocks that attend to their whole frame.
        out: width of a feature, that of the language tower.
        theta: base of the rotary frequencies.
        norm_eps: of every RMS norm.
    """

    embed: int = 1280
    mlp: int = 3420
    layers: int = 32
    heads: int = 16
    channels: int = 3
    frames: int = 2
    patch: int = 14
    merge: int = 2
    window: int = 112
    whole: tuple[int, ...] = (7, 15, 23, 31)
    out: int = 3584
    theta: float = 1e4
    norm_eps: float = 1e-6

    def __post_init__(self):
        sizes = ("embed", "mlp", "layers", "heads", "channels", "frames", "patch", "merge", "window", "out")
        problems = [f"{n}={getattr(self, n)} is not at least 1: change it" for n in sizes if getattr(self, n) < 1]
        if not problems and self.embed % (4 * self.heads):
            problems.append(
                f"embed={self.embed} does not divide by {4 * self.heads} (heads={self.heads}, each of pairs that turn"
                " with the row and with the column): change one of them"
            )
        if not problems and self.side < 1:
            problems.append(f"window={self.window} is smaller than a feature's {self.merge * self.patch}: change it")
        problems += [
            f"whole={self.whole}: {i} is no block from 0 to {self.layers - 1}: change it"
            for i in self.whole
            if not 0 <= i < self.layers
        ]
        fail_if(problems, "qwen2_5_vl config")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def side(self) -> int:
        """Side of a window, in features."""
        return self.window // self.merge // self.patch

    @property
    def pixels(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.patch**2


class Attention(eqx.Module):
    """Attention within segments: x whole in embed, heads split; output whole again.

    `qkv[B, S, 3, H_TP, D] = x[B, S, E] . W[3, H_TP, D, E] + b[3, H_TP, D]`;
    `y[B, S, E] = psum_TP(o[B, S, H_TP, D] . Wo[E, H_TP, D]) + bo[E]`.
    """

    qkv: ColumnLinear
    out: RowLinear

    @classmethod
    def declare(cls, c: Config) -> "Attention":
        heads = (c.heads, c.head_dim)
        return cls(
            qkv=ColumnLinear(
                Param("block heads head_dim embed", (3, *heads, c.embed), {"heads": TP}),
                Param("block heads head_dim", (3, *heads), {"heads": TP}),
            ),
            out=RowLinear(Param("embed heads head_dim", (c.embed, *heads), {"heads": TP}), Param("embed", (c.embed,))),
        )

    def __call__(
        self, x: Float[Array, "one seq embed"], turn: Rotary, segments: Int[Array, "one seq"]
    ) -> Float[Array, "one seq embed"]:
        qkv = self.qkv(x)
        q, k = rotate(qkv[:, :, 0], turn), rotate(qkv[:, :, 1], turn)
        return self.out(attention(q, jnp.stack([k, qkv[:, :, 2]], axis=2), segment_ids=segments))


def _mlp(c: Config) -> Mlp:
    return Mlp(
        gate_up=ColumnLinear(
            Param("block mlp embed", (2, c.mlp, c.embed), {"mlp": TP}), Param("block mlp", (2, c.mlp), {"mlp": TP})
        ),
        down=RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP}), Param("embed", (c.embed,))),
    )


def _norm(c: Config) -> RMSNorm:
    return RMSNorm(Param("embed", (c.embed,)), eps=c.norm_eps)


class Block(eqx.Module):
    """One layer: attention and MLP, each after a norm and added to the stream.

    Collectives: two all-reduces over the tensor axes, and those of one attention with segments.
    """

    attn_norm: RMSNorm
    attn: Attention
    mlp_norm: RMSNorm
    mlp: Mlp

    @classmethod
    def declare(cls, c: Config) -> "Block":
        return cls(attn_norm=_norm(c), attn=Attention.declare(c), mlp_norm=_norm(c), mlp=_mlp(c))

    def __call__(
        self, x: Float[Array, "one seq embed"], turn: Rotary, segments: Int[Array, "one seq"]
    ) -> Float[Array, "one seq embed"]:
        x = x + self.attn(self.attn_norm(x), turn, segments)
        return x + self.mlp(self.mlp_norm(x))


class Merger(eqx.Module):
    """The patches of a square, normed, as one feature. One all-reduce over the tensor axes.

    `y[B, U, O] = psum_TP(gelu(x[B, U, M] . W[H_TP, M] + b[H_TP]) . V[O, H_TP]) + c[O]`, M numbers of a square.
    """

    norm: RMSNorm
    up: ColumnLinear
    down: RowLinear

    @classmethod
    def declare(cls, c: Config) -> "Merger":
        wide = c.embed * c.merge**2
        return cls(
            norm=_norm(c),
            up=ColumnLinear(Param("mlp channels", (wide, wide), {"mlp": TP}), Param("mlp", (wide,), {"mlp": TP})),
            down=RowLinear(Param("embed mlp", (c.out, wide), {"mlp": TP}), Param("embed", (c.out,))),
        )

    def __call__(self, x: Float[Array, "one seq embed"]) -> Float[Array, "one units out"]:
        squares = self.norm(x).reshape(x.shape[0], -1, self.up.weight.shape[-1])
        return self.down(jax.nn.gelu(self.up(squares), approximate=False))


class Vision(eqx.Module):
    """Patches, projected; stacked blocks; merger."""

    patches: Float[Leaf, "embed channels frames height width"]
    blocks: Block
    merger: Merger
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Vision":
        return cls(
            patches=Param("embed channels frames height width", (c.embed, c.channels, c.frames, c.patch, c.patch)),
            blocks=layout.stack(Block.declare(c), c.layers),
            merger=Merger.declare(c),
            config=c,
        )


def declare(config: Config, dtype: Any = np.float32) -> Vision:
    """The declared tower with every weight in `dtype`."""
    return layout.astype(Vision.declare(config), dtype)


@runtime_checkable
class Forward(Protocol):
    """See `forward`."""

    def __call__(
        self, model: Vision, pixels: Float[Host, "seq pixels"], *, grids: Grids
    ) -> Float[Array, "rows out"]: ...


def forward(declared: Vision, mesh: Mesh | AbstractMesh, *, remat: bool = False, dtype: Any = None) -> Forward:
    """The pure function `f(model, pixels, *, grids)`: jit it, or call it inside a jitted function.

    It returns the features of all images, one for each square of patches, in the order of the tokens that they stand in
    for, the same on all devices. Any number of patches will do: they are padded to what the mesh needs.

    f's arguments, beside the live model:
        pixels: patches of the images, one image after another, as `qwen2_5_vl_inputs.patches` makes them.
        grids: frames, rows and columns of patches of each image; not traced.

    Collectives, besides those of the blocks and the merger: an all-gather of the features over `context`.

    Args:
        remat: compute each block again in the backward pass rather than keep its activations.
        dtype: of the activations; None is that of the weights.

    Raises:
        InputError: the mesh does not fit the declaration; from f, pixels that are not those of the grids.
    """
    layout.audit(declared, mesh)
    dtype = None if dtype is None else jnp.dtype(dtype)

    @jaxtyped(typechecker=beartype)
    def f(model: Vision, pixels: Float[Host, "seq pixels"], *, grids: Grids) -> Float[Array, "rows out"]:
        c = declared.config
        fail_if(_problems(c, pixels, grids), "qwen2_5_vl.forward")
        order = arrangement(grids, merge=c.merge, side=c.side)
        shard = jax.shard_map(
            lambda model, pixels: _forward(model, declared, pixels, order, remat, dtype),
            mesh=mesh,
            in_specs=(layout.specs(declared), P()),
            out_specs=P(),
            check_vma=True,
        )
        return shard(model, jnp.asarray(pixels))

    return f


def _problems(c: Config, pixels, grids: Grids) -> Iterator[str]:
    if pixels.shape[1] != c.pixels:
        yield f"pixels: {pixels.shape[1]} numbers a patch are not the {c.pixels} of this model: cut other patches"
    for grid in grids:
        if min(grid) < 1 or grid[1] % c.merge or grid[2] % c.merge:
            yield f"grids: rows and columns of {grid} do not divide by merge={c.merge}: resize the image"
    count = sum(t * rows * columns for t, rows, columns in grids)
    if not grids or count != pixels.shape[0]:
        yield f"grids={grids} are {count} patches, pixels has seq={pixels.shape[0]}: give those of all images"


def _forward(
    model: Vision,
    declared: Vision,
    pixels: Float[Array, "seq pixels"],
    order: Arrangement,
    remat: bool,
    dtype: jnp.dtype | None,
) -> Float[Array, "rows out"]:
    """The features on every device."""
    c = declared.config
    weight, merger = _gather((model.patches, model.merger), (declared.patches, declared.merger))
    units, square = len(order.units), c.merge**2

    def share(values: np.ndarray) -> Array:
        """This device's share of what there is for each unit, padded with -1."""
        missing = -units % lax.axis_size(CONTEXT)
        padded = np.concatenate([values, np.full_like(values[:1], -1).repeat(missing, axis=0)])
        return own_share(jnp.asarray(padded)[None], (CONTEXT,))

    def each(values: np.ndarray) -> Array:
        """The same of what there is for each patch."""
        own = share(values.reshape(units, square, *values.shape[1:]))
        return own.reshape(1, -1, *own.shape[3:])

    taken = share(order.units)
    patches = pixels.reshape(units, square, *weight.shape[1:])[taken].reshape(1, -1, *weight.shape[1:])
    x = contract(patches.astype(weight.dtype if dtype is None else dtype), weight, inputs=4)
    turn, segments = _turn(c, each(order.places)), (each(order.windows), each(order.frames))

    def body(x, inputs):
        block, whole = inputs
        block = _gather(block, declared.blocks)
        return block(x, turn, jnp.where(whole, segments[1], segments[0])), None

    body = jax.checkpoint(body, prevent_cse=False) if remat else body
    x, _ = lax.scan(body, x, (model.blocks, jnp.asarray([i in c.whole for i in range(c.layers)])))
    features = lax.all_gather(merger(x)[0], CONTEXT, axis=0, tiled=True, to="invarying")
    return features[np.argsort(order.units)]


def _turn(c: Config, places: Int[Array, "one seq two"]) -> Rotary:
    """Rotary tables: half of a head's pairs turn with the row, half with the column."""
    angles = places.astype(jnp.float32)[..., None] * frequencies(Rope(theta=c.theta), c.head_dim // 2)
    angles = angles.reshape(*angles.shape[:2], -1)
    return jnp.cos(angles), jnp.sin(angles)


def _gather(live: Tree, declared: Tree) -> Tree:
    """Weights gathered from a split at rest: they act on what differs along `context` and is the same along `data`."""
    for axis, to in ((DATA, "invarying"), (CONTEXT, "varying")):
        split = jax.tree.map(
            lambda p, axis=axis: dataclasses.replace(p, rest={d: a for d, a in p.rest.items() if a == axis}), declared
        )
        live = layout.gather_at_rest(live, split, to=to)
    return live


PRESETS = {"qwen2.5-vl-7b": Config()}


def trace(declared: Vision, mesh: Mesh | AbstractMesh, sizes: TraceSizes) -> tuple[Callable, tuple]:
    """The features of one image, as `Family.trace` says."""
    c = declared.config
    side = c.patch * c.merge
    grid = (1, *(count * c.merge for count in sizes.cells(side)))
    run = forward(declared, mesh)
    pixels = jax.ShapeDtypeStruct((grid[1] * grid[2], c.pixels), jnp.float32)
    return lambda model, pixels: run(model, pixels, grids=(grid,)), (pixels,)


register(Family(name="qwen2.5-vl-vision", config=Config, declare=declare, presets=PRESETS, trace=trace))
