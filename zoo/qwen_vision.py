"""What the vision towers of Qwen2.5-VL and Qwen3.5 share: images of any size as features that stand in for tokens.

Source: the vision classes of `qwen2_5_vl` and `qwen3_5` in transformers 5. A tower projects patches, runs blocks in
which they attend to each other inside a frame or a window of it, and makes one feature of each square of patches.

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

from shardzoo.errors import fail_if, not_above_zero
from shardzoo.zoo import layout
from shardzoo.zoo.attention import attention
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import TraceSizes
from shardzoo.zoo.layers import ColumnLinear, LayerNorm, RMSNorm, RowLinear, exact_gelu, in_float32, own_share, unpacked
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import CONTEXT, DATA, TP
from shardzoo.zoo.qwen2_5_vl_inputs import Arrangement, Grids, arrangement
from shardzoo.zoo.remat import Remat, check_remat, rematerialised
from shardzoo.zoo.rope import Rope, Rotary, frequencies, rotate

Host = Array | np.ndarray  # what the public functions take
Tree = TypeVar("Tree")
Share = Callable[[np.ndarray], Array]  # (seq, ...) of all patches -> (1, this device's, ...)


@runtime_checkable
class Sizes(Protocol):
    """What a tower's config says that both towers have; embed divides by 4 * heads.

    `side` is that of the windows, in features, and `whole` lists the blocks that attend to their whole frame.
    """

    @property
    def embed(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def patch(self) -> int: ...
    @property
    def merge(self) -> int: ...
    @property
    def out(self) -> int: ...
    @property
    def theta(self) -> float: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def side(self) -> int | None: ...
    @property
    def whole(self) -> tuple[int, ...]: ...


SIZES = ("embed", "mlp", "layers", "heads", "channels", "frames", "patch", "merge", "out")


def size_problems(c: Sizes, sizes: tuple[str, ...]) -> list[str]:
    """What is wrong with a config: sizes below 1, numbers not above 0, heads without pairs for rows and columns."""
    problems = [f"{n}={getattr(c, n)} is not at least 1: change it" for n in sizes if getattr(c, n) < 1]
    problems += not_above_zero(c, "theta", "norm_eps")
    if not problems and c.embed % (4 * c.heads):
        problems.append(
            f"embed={c.embed} does not divide by {4 * c.heads} (heads={c.heads}, each of pairs that turn"
            " with the row and with the column): change one of them"
        )
    return problems


def patch_shape(c: Sizes) -> tuple[int, int, int, int]:
    """Channels, frames, rows and columns of the numbers of a patch."""
    return c.channels, c.frames, c.patch, c.patch


class Attention(eqx.Module):
    """Attention within segments: x whole in embed, heads split; output whole again.

    `qkv[B, S, 3, H_TP, D] = x[B, S, E] . W[3, H_TP, D, E] + b[3, H_TP, D]`;
    `y[B, S, E] = psum_TP(o[B, S, H_TP, D] . Wo[E, H_TP, D]) + bo[E]`.
    """

    qkv: ColumnLinear
    out: RowLinear

    @classmethod
    def declare(cls, c: Sizes) -> "Attention":
        heads = (c.heads, c.embed // c.heads)
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
        q, k, v = unpacked(self.qkv(x))
        kv = jnp.stack([rotate(k, turn), v], axis=2)
        return self.out(attention(rotate(q, turn), kv, segment_ids=segments))


class Block(eqx.Module):
    """One layer: attention and MLP, each after a norm and added to the stream.

    Collectives: two all-reduces over the tensor axes, and those of one attention with segments.
    """

    attn_norm: RMSNorm | LayerNorm
    attn: Attention
    mlp_norm: RMSNorm | LayerNorm
    mlp: Callable[[Array], Array]

    def __call__(
        self, x: Float[Array, "one seq embed"], turn: Rotary, segments: Int[Array, "one seq"]
    ) -> Float[Array, "one seq embed"]:
        x = x + self.attn(self.attn_norm(x), turn, segments)
        return x + self.mlp(self.mlp_norm(x))


class Merger(eqx.Module):
    """The patches of a square, normed, as one feature. One all-reduce over the tensor axes.

    `y[B, U, O] = psum_TP(gelu(x[B, U, M] . W[H_TP, M] + b[H_TP]) . V[O, H_TP]) + c[O]`, M numbers of a square.
    """

    norm: RMSNorm | LayerNorm
    up: ColumnLinear
    down: RowLinear

    @classmethod
    def declare(cls, c: Sizes, norm: RMSNorm | LayerNorm) -> "Merger":
        wide = c.embed * c.merge**2
        return cls(
            norm=norm,
            up=ColumnLinear(Param("mlp channels", (wide, wide), {"mlp": TP}), Param("mlp", (wide,), {"mlp": TP})),
            down=RowLinear(Param("embed mlp", (c.out, wide), {"mlp": TP}), Param("embed", (c.out,))),
        )

    def __call__(self, x: Float[Array, "one seq embed"]) -> Float[Array, "one units out"]:
        squares = self.norm(x).reshape(x.shape[0], -1, self.up.weight.shape[-1])
        return self.down(in_float32(exact_gelu, self.up(squares)))


@runtime_checkable
class Tower(Protocol):
    """A vision tower: stacked blocks and a merger behind a first layer of its own, which has weights for patches."""

    @property
    def patches(self) -> Array: ...
    @property
    def blocks(self) -> Block: ...
    @property
    def merger(self) -> Merger: ...
    @property
    def config(self) -> Sizes: ...

    def enter(
        self, patches: Float[Array, "one seq channels frames height width"], order: Arrangement, own: Share
    ) -> Float[Array, "one seq embed"]:
        """The stream, from this device's patches; `own` gives its share of what `order` knows of each patch."""
        ...


@runtime_checkable
class Forward(Protocol):
    """A tower's forward pass on a mesh: a pure function, to be jitted or called inside a jitted function.

    It returns the features of all images, one for each square of patches, in the order of the tokens that they stand in
    for, the same on all devices. Any number of patches will do: they are padded to what the mesh needs. Arguments,
    beside the live model:
        pixels: patches of the images and videos, one after another, as the family's inputs module makes them.
        grids: frames, rows and columns of patches of each; not traced. Patches of one frame see each other.

    Collectives, besides those of the blocks and the merger: an all-gather of the features over `context`.
    """

    def __call__(self, model: Any, pixels: Float[Host, "seq pixels"], *, grids: Grids) -> Float[Array, "rows out"]: ...


def forward(declared: Tower, mesh: Mesh | AbstractMesh, name: str, *, remat: Remat, dtype: Any) -> Forward:
    """What the `forward` of a family returns; errors say `name`.

    Args:
        remat: compute each block again in the backward pass rather than keep its activations: all of it, or what a
            policy says (`remat.py`).
        dtype: of the activations; None is that of the weights.

    Raises:
        InputError: the mesh does not fit the declaration; an unknown policy; from what it returns, pixels that are not
            those of the grids.
    """
    layout.audit(declared, mesh)
    check_remat(name, remat)
    dtype = float_dtype(name, dtype)

    @jaxtyped(typechecker=beartype)
    def f(model: Any, pixels: Float[Host, "seq pixels"], *, grids: Grids) -> Float[Array, "rows out"]:
        c = declared.config
        fail_if(_problems(c, pixels, grids), name)
        order = arrangement(grids, merge=c.merge, side=c.side)
        shard = layout.sharded(
            lambda model, pixels: _forward(model, declared, pixels, order, remat, dtype),
            mesh,
            (layout.specs(declared), P()),
            P(),
        )
        return shard(model, jnp.asarray(pixels))

    return f


def _problems(c: Sizes, pixels, grids: Grids) -> Iterator[str]:
    wanted = np.prod(patch_shape(c))
    if pixels.shape[1] != wanted:
        yield f"pixels: {pixels.shape[1]} numbers a patch are not the {wanted} of this model: cut other patches"
    for grid in grids:
        if min(grid) < 1 or grid[1] % c.merge or grid[2] % c.merge:
            yield f"grids: rows and columns of {grid} do not divide by merge={c.merge}: resize the image"
    count = sum(t * rows * columns for t, rows, columns in grids)
    if not grids or count != pixels.shape[0]:
        yield f"grids={grids} are {count} patches, pixels has seq={pixels.shape[0]}: give those of all images"


def _forward(
    model: Tower,
    declared: Tower,
    pixels: Float[Array, "seq pixels"],
    order: Arrangement,
    remat: Remat,
    dtype: jnp.dtype | None,
) -> Float[Array, "rows out"]:
    """The features on every device."""
    c = declared.config
    model = _gather_ends(model, declared)
    units, square = len(order.units), c.merge**2

    def share(values: np.ndarray) -> Array:
        """This device's share of what there is for each unit, padded with -1."""
        missing = -units % lax.axis_size(CONTEXT)
        padded = np.concatenate([values, np.full_like(values[:1], -1).repeat(missing, axis=0)])
        return own_share(jnp.asarray(padded)[None], (CONTEXT,))

    def own(values: np.ndarray) -> Array:
        """The same of what there is for each patch."""
        part = share(values.reshape(units, square, *values.shape[1:]))
        return part.reshape(1, -1, *part.shape[3:])

    # Rows of numbers as they come: in the shape of patches a TPU would move them about for each of 14 pixels.
    rows = share(order.units)[..., None] * square + np.arange(square)
    patches = pixels[rows.reshape(1, -1)].reshape(1, -1, *patch_shape(c))
    x = model.enter(patches.astype(model.patches.dtype if dtype is None else dtype), order, own)
    x, merger = layout.in_turn(x, model.merger)
    turn, segments = _turn(c, own(order.places)), (own(order.windows), own(order.frames))

    def body(x, inputs):
        block, whole = inputs
        block = _gather(block, declared.blocks)
        return block(x, turn, jnp.where(whole, segments[1], segments[0])), None

    whole = jnp.asarray([i in c.whole for i in range(c.layers)])
    x, _ = lax.scan(rematerialised(body, remat), x, (model.blocks, whole))
    features = lax.all_gather(merger(x)[0], CONTEXT, axis=0, tiled=True, to="invarying")
    return features[np.argsort(order.units)]


def _turn(c: Sizes, places: Int[Array, "one seq two"]) -> Rotary:
    """Rotary tables: half of a head's pairs turn with the row, half with the column."""
    angles = places.astype(jnp.float32)[..., None] * frequencies(Rope(theta=c.theta), c.embed // c.heads // 2)
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


def _gather_ends(model: Tower, declared: Tower) -> Tower:
    """The tower with everything but its blocks so gathered."""
    live: Any = model  # a module, and so a dataclass
    names = {f.name for f in dataclasses.fields(live)} - {"blocks", "config"}
    return dataclasses.replace(live, **{n: _gather(getattr(live, n), getattr(declared, n)) for n in names})


def trace(run: Forward, c: Sizes, sizes: TraceSizes) -> tuple[Callable, tuple]:
    """The features of one image by a forward pass, as `Family.trace` says."""
    side = c.patch * c.merge
    grid = (1, *(count * c.merge for count in sizes.cells(side)))
    pixels = jax.ShapeDtypeStruct((grid[1] * grid[2], int(np.prod(patch_shape(c)))), jnp.float32)
    return lambda model, pixels: run(model, pixels, grids=(grid,)), (pixels,)
