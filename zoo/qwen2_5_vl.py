"""The vision tower of Qwen2.5-VL: images of any size as features that stand in for tokens of its language tower.

Source: `Qwen2_5_VisionTransformerPretrainedModel` of transformers 5. The language tower is the decoder family's
(`decoder.encode` takes the features); `qwen2_5_vl_inputs` has the patches, places and positions that both ask for.

Mesh axes: patches over `context`, heads and mlp over the tensor axes; `pipe` must be 1. All images are one sequence,
so that the devices of `data` compute the same (`qwen_vision`, which this tower shares with that of Qwen3.5).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from shardzoo.errors import fail_if
from shardzoo.zoo import layout, qwen_vision
from shardzoo.zoo.decoder_model import Mlp
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.layers import ColumnLinear, Leaf, RMSNorm, RowLinear, contract
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import TP
from shardzoo.zoo.qwen2_5_vl_inputs import Arrangement
from shardzoo.zoo.qwen_vision import Attention, Block, Forward, Merger, Share, patch_shape, size_problems
from shardzoo.zoo.remat import Remat


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
        problems = size_problems(self, (*qwen_vision.SIZES, "window"))
        if not problems and self.side < 1:
            problems.append(f"window={self.window} is smaller than a feature's {self.merge * self.patch}: change it")
        problems += [
            f"whole={self.whole}: {i} is no block from 0 to {self.layers - 1}: change it"
            for i in self.whole
            if not 0 <= i < self.layers
        ]
        fail_if(problems, "qwen2_5_vl config")

    @property
    def side(self) -> int:
        """Side of a window, in features."""
        return self.window // self.merge // self.patch

    @property
    def pixels(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.patch**2


def _block(c: Config) -> Block:
    return Block(
        attn_norm=_norm(c),
        attn=Attention.declare(c),
        mlp_norm=_norm(c),
        mlp=Mlp(
            gate_up=ColumnLinear(
                Param("block mlp embed", (2, c.mlp, c.embed), {"mlp": TP}), Param("block mlp", (2, c.mlp), {"mlp": TP})
            ),
            down=RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP}), Param("embed", (c.embed,))),
        ),
    )


def _norm(c: Config) -> RMSNorm:
    return RMSNorm(Param("embed", (c.embed,)), eps=c.norm_eps)


class Vision(eqx.Module):
    """Patches, projected; stacked blocks; merger."""

    patches: Float[Leaf, "embed channels frames height width"]
    blocks: Block
    merger: Merger
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Vision":
        return cls(
            patches=Param("embed channels frames height width", (c.embed, *patch_shape(c))),
            blocks=layout.stack(_block(c), c.layers),
            merger=Merger.declare(c, _norm(c)),
            config=c,
        )

    def enter(
        self, patches: Float[Array, "one seq channels frames height width"], order: Arrangement, own: Share
    ) -> Float[Array, "one seq embed"]:
        """See `qwen_vision.Tower`."""
        return contract(patches, self.patches, inputs=4)


def declare(config: Config, dtype: Any = np.float32) -> Vision:
    """The declared tower with every weight in `dtype`."""
    return layout.astype(Vision.declare(config), dtype)


def forward(declared: Vision, mesh: Mesh | AbstractMesh, *, remat: Remat = False, dtype: Any = None) -> Forward:
    """The pure function `f(model, pixels, *, grids)`, of patches as `qwen2_5_vl_inputs.patches` makes them.

    f is explained at `qwen_vision.Forward`; options and errors are those of `qwen_vision.forward`.
    """
    return qwen_vision.forward(declared, mesh, "qwen2_5_vl.forward", remat=remat, dtype=dtype)


PRESETS = {"qwen2.5-vl-7b": Config()}


def trace(declared: Vision, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """The features of one image, as `Family.trace` says."""
    return qwen_vision.trace(forward(declared, mesh, **run), declared.config, sizes)


register(Family(name="qwen2.5-vl-vision", config=Config, declare=declare, presets=PRESETS, trace=trace))
