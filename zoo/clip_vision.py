"""The image encoder of CLIP: a vision transformer that gives one of its hidden states (Wan: the last but one).

Source: CLIPVisionModel of transformers 5, and the `visual` half of the Wan2.1 repository's CLIP, which is the same.
`images.py` turns images into what it takes; `clip.py` has its blocks.

Mesh axes: the batch over `data`, heads and mlp over the tensor axes; `pipe` must be 1. Tokens are few and odd in number
(257), so that they are never split: every device of `context` computes the same. Shapes inside layers are one device's.
The blocks are stacked and run by one `lax.scan`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, jaxtyped

from shardzoo.errors import InputError, fail_if, nothing_in
from shardzoo.zoo import layout
from shardzoo.zoo.clip import Activation, Block, blocks_to_run, declare_norm, gathered, run_blocks, size_problems
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.layers import LayerNorm, Leaf, contract
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import DATA

Host = Array | np.ndarray  # what the public functions take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        embed, mlp, layers, heads: sizes; embed divides by heads.
        image, patch: height and width of images and of their patches, in pixels.
        channels: of images.
        activation: "gelu" (with the error function), or "quick_gelu", x * sigmoid(1.702 x), of OpenAI's models.
        norm_eps: of every layer norm.
    """

    embed: int
    mlp: int
    layers: int
    heads: int
    image: int = 224
    patch: int
    channels: int = 3
    activation: Activation = "gelu"
    norm_eps: float = 1e-5

    def __post_init__(self):
        problems = size_problems(self, ("embed", "mlp", "layers", "heads", "image", "patch", "channels"))
        if not problems and self.image < self.patch:
            problems.append(f"image={self.image} is smaller than patch={self.patch}: change one of them")
        fail_if(problems, "clip_vision config")

    @property
    def grid(self) -> int:
        """Patches along height and along width; what is left of an image at the right and the bottom is not seen."""
        return self.image // self.patch

    @property
    def tokens(self) -> int:
        return self.grid**2 + 1


def patches(pixels: Float[Array, "batch channels height width"], size: int) -> Float[Array, "batch seq channels p q"]:
    """Square patches of this size, row by row; each has the order of a convolution's weight."""
    batch, channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    cut = pixels[:, :, : rows * size, : columns * size].reshape(batch, channels, rows, size, columns, size)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels, size, size)


class Patches(eqx.Module):
    """Images to tokens: a class token, then each patch projected, positions added, normed. Nothing split."""

    weight: Float[Leaf, "embed channels height width"]
    first: Float[Leaf, " embed"]
    positions: Float[Leaf, "seq embed"]
    norm: LayerNorm

    @classmethod
    def declare(cls, c: Config) -> "Patches":
        return cls(
            weight=Param("embed channels height width", (c.embed, c.channels, c.patch, c.patch)),
            first=Param("embed", (c.embed,)),
            positions=Param("seq embed", (c.tokens, c.embed)),
            norm=declare_norm(c),
        )

    def __call__(self, pixels: Float[Array, "batch channels height width"]) -> Float[Array, "batch seq embed"]:
        x = contract(patches(pixels, self.weight.shape[-1]), self.weight, inputs=3)
        first = jnp.broadcast_to(self.first.astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        return self.norm(jnp.concatenate([first, x], axis=1) + self.positions.astype(x.dtype))


class Encoder(eqx.Module):
    """Patches, stacked blocks, and the norm of the class token after the last of them."""

    patches: Patches
    blocks: Block
    norm: LayerNorm
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Encoder":
        return cls(
            patches=Patches.declare(c), blocks=layout.stack(Block.declare(c), c.layers), norm=declare_norm(c), config=c
        )


def declare(config: Config, dtype: Any = np.float32) -> Encoder:
    """The declared encoder with every weight in `dtype`."""
    return layout.astype(Encoder.declare(config), dtype)


@runtime_checkable
class Forward(Protocol):
    """See `forward`."""

    def __call__(
        self, model: Encoder, pixels: Float[Host, "batch channels height width"]
    ) -> Float[Array, "batch *tokens embed"]: ...


def forward(
    declared: Encoder,
    mesh: Mesh | AbstractMesh,
    *,
    hidden_state: int | Literal["pooled"] = -2,
    dtype: Any = None,
) -> Forward:
    """The pure function `f(model, pixels)`: jit it, or call it inside a jitted function.

    Pixels are [batch, channels, image, image], normed as `images.py` does it. The result is [batch, seq, embed], split
    like the batch over `data` and the same along `context`. Any batch will do: it is padded to what the mesh needs, and
    the result is cut back.

    Args:
        hidden_state: which one, counted as transformers does: 0 the normed tokens, i the stream after block i, -1 after
            the last, with no norm. Later blocks are not run. "pooled" is the class token after the last block, normed,
            [batch, embed].
        dtype: of the activations; None is that of the weights.

    Raises:
        InputError: the mesh does not fit the declaration; no such hidden state; from f, images of another size.
    """
    layout.audit(declared, mesh)
    config = declared.config
    layers = blocks_to_run("clip_vision.forward", hidden_state, ("pooled",), config.layers)
    dtype = float_dtype("clip_vision.forward", dtype)
    shard = layout.sharded(
        lambda model, pixels: _forward(model, declared, pixels, layers, hidden_state == "pooled", dtype),
        mesh,
        (layout.specs(declared), P(DATA)),
        P(DATA),
    )

    @jaxtyped(typechecker=beartype)
    def f(model: Encoder, pixels: Float[Host, "batch channels height width"]) -> Float[Array, "batch *tokens embed"]:
        batch, *size = pixels.shape
        fail_if(nothing_in(pixels=pixels.shape), "clip_vision.forward")
        wanted = [config.channels, config.image, config.image]
        if size != wanted:
            raise InputError(f"clip_vision.forward: images of {size} where the model takes {wanted}: resize them")
        padded = jnp.pad(jnp.asarray(pixels), ((0, -batch % mesh.shape[DATA]), (0, 0), (0, 0), (0, 0)))
        return shard(model, padded)[:batch]

    return f


def _forward(
    model: Encoder,
    declared: Encoder,
    pixels: Float[Array, "batch channels height width"],
    layers: int,
    pooled: bool,
    dtype: jnp.dtype | None,
) -> Float[Array, "batch *tokens embed"]:
    """One device's share of the batch after this many blocks."""
    embed = gathered(model.patches, declared.patches)
    x = embed(pixels.astype(embed.weight.dtype if dtype is None else dtype))
    x = run_blocks(model.blocks, declared.blocks, x, run=layers, of=model.config.layers)
    return gathered(model.norm, declared.norm)(x[:, 0]) if pooled else x


PRESETS = {"vit-h-14": Config(embed=1280, mlp=5120, layers=32, heads=16, patch=14)}


def trace(declared: Encoder, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """The last hidden state but one, as `Family.trace` says; images are of the size that the model takes."""
    c = declared.config
    pixels = jax.ShapeDtypeStruct((sizes.batch, c.channels, c.image, c.image), jnp.float32)
    return forward(declared, mesh, **run), (pixels,)


register(Family(name="clip-vision", config=Config, declare=declare, presets=PRESETS, trace=trace))
