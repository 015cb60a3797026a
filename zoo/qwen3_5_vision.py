"""The vision tower of Qwen3.5: images and videos as features that stand in for tokens of its text model.

Source: `Qwen3_5VisionModel` of transformers 5. The text model is `qwen3_5`, whose `forward` takes the features;
`qwen3_5_inputs` has the patches, places and positions that both ask for. Beside Qwen2.5-VL's tower this one has layer
norms, a plain MLP, no windows, and learned positions: a square table that is read between its rows for images of other
sizes.

Mesh axes: patches over `context`, heads and mlp over the tensor axes; `pipe` must be 1. All images are one sequence,
so that the devices of `data` compute the same (`qwen_vision`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from shardzoo.errors import fail_if
from shardzoo.zoo import layout, qwen_vision
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.layers import ColumnLinear, LayerNorm, Leaf, RowLinear, contract
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import TP
from shardzoo.zoo.qwen2_5_vl_inputs import Arrangement
from shardzoo.zoo.qwen3_5_inputs import table_rows
from shardzoo.zoo.qwen_vision import Attention, Block, Forward, Merger, Share, patch_shape, size_problems
from shardzoo.zoo.remat import Remat
from shardzoo.zoo.wan_model import Mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes.

    Attributes:
        embed, mlp, layers, heads: sizes; embed divides by 4 * heads.
        channels, frames, patch: of a patch: channels, frames, and height and width in pixels.
        merge: side of the square of patches that make one feature.
        out: width of a feature, that of the text model.
        positions: rows of the table of positions, of which the largest square is read.
        theta: base of the rotary frequencies.
        norm_eps: of every norm.
    """

    embed: int = 1152
    mlp: int = 4304
    layers: int = 27
    heads: int = 16
    channels: int = 3
    frames: int = 2
    patch: int = 16
    merge: int = 2
    out: int = 5120
    positions: int = 2304
    theta: float = 1e4
    norm_eps: float = 1e-6

    def __post_init__(self):
        fail_if(size_problems(self, (*qwen_vision.SIZES, "positions")), "qwen3_5_vision config")

    @property
    def pixels(self) -> int:
        """Numbers of a patch."""
        return math.prod(patch_shape(self))

    @property
    def side(self) -> None:
        """There are no windows."""
        return None

    @property
    def whole(self) -> tuple[int, ...]:
        """All blocks attend to their whole frame."""
        return tuple(range(self.layers))


def _block(c: Config) -> Block:
    return Block(
        attn_norm=_norm(c),
        attn=Attention.declare(c),
        mlp_norm=_norm(c),
        mlp=Mlp(
            up=ColumnLinear(Param("mlp embed", (c.mlp, c.embed), {"mlp": TP}), Param("mlp", (c.mlp,), {"mlp": TP})),
            down=RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP}), Param("embed", (c.embed,))),
        ),
    )


def _norm(c: Config) -> LayerNorm:
    return LayerNorm(Param("embed", (c.embed,)), Param("embed", (c.embed,)), eps=c.norm_eps)


class Vision(eqx.Module):
    """Patches, projected, and the table of their positions; stacked blocks; merger."""

    patches: Float[Leaf, "embed channels frames height width"]
    bias: Float[Leaf, " embed"]
    positions: Float[Leaf, "positions embed"]
    blocks: Block
    merger: Merger
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Vision":
        return cls(
            patches=Param("embed channels frames height width", (c.embed, *patch_shape(c))),
            bias=Param("embed", (c.embed,)),
            positions=Param("positions embed", (c.positions, c.embed)),
            blocks=layout.stack(_block(c), c.layers),
            merger=Merger.declare(c, _norm(c)),
            config=c,
        )

    def enter(
        self, patches: Float[Array, "one seq channels frames height width"], order: Arrangement, own: Share
    ) -> Float[Array, "one seq embed"]:
        """See `qwen_vision.Tower`; positions are put together in float32."""
        rows, shares = (own(values) for values in table_rows(order, math.isqrt(self.config.positions)))
        learned = jnp.sum(self.positions.astype(jnp.float32)[rows] * shares[..., None], axis=2)
        x = contract(patches, self.patches, inputs=4) + self.bias.astype(patches.dtype)
        return x + learned.astype(x.dtype)


def declare(config: Config, dtype: Any = np.float32) -> Vision:
    """The declared tower with every weight in `dtype`."""
    return layout.astype(Vision.declare(config), dtype)


def forward(declared: Vision, mesh: Mesh | AbstractMesh, *, remat: Remat = False, dtype: Any = None) -> Forward:
    """The pure function `f(model, pixels, *, grids)`, of patches as those of `qwen3_5_inputs` are made.

    f is explained at `qwen_vision.Forward`; options and errors are those of `qwen_vision.forward`.
    """
    return qwen_vision.forward(declared, mesh, "qwen3_5_vision.forward", remat=remat, dtype=dtype)


PRESETS = {"qwen3.5-27b": Config()}


def trace(declared: Vision, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """The features of one image, as `Family.trace` says."""
    return qwen_vision.trace(forward(declared, mesh, **run), declared.config, sizes)


register(Family(name="qwen3-5-vision", config=Config, declare=declare, presets=PRESETS, trace=trace))
