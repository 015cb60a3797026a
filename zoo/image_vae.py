"""The image autoencoders of FLUX.1 and FLUX.2, split over devices by rows.

Source: `AutoencoderKL` and `AutoencoderKLFlux2` of diffusers 0.42, and the `autoencoder.py` of the black-forest-labs
repositories. FLUX.2's has a projection of the moments and one of the latents, and holds the statistics of its latents.
Qwen-Image's autoencoder is that of `wan_vae`, with one frame.

From pixels to what a transformer takes, and back:

    posterior = encode(declared, mesh)(model, images)           # images from -1 to 1, [batch, 3, height, width]
    tokens = pack(posterior.mean)                               # or pack(posterior.sample(key))
    images = decode(declared, mesh)(model, unpack(tokens, rows, columns))    # rows and columns of latents

Mesh axes: the batch over `data`, the height over `context` and the tensor axes together (`conv.SPLIT`; see there why);
`pipe` must be 1. Weights are whole on every device. Images and latents are [batch, channels, height, width], as in
PyTorch: a last dim of three channels would fill a tile of 128 on a TPU.

Collectives on several devices along the height, by the layers: two permutations of one row for each convolution of
3 x 3 pixels, one for each of stride 2; a small all-gather for each norm, and one of the latents' size in each middle.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, PRNGKeyArray, Shaped, UInt32, jaxtyped

from shardzoo.errors import fail_if, nothing_in
from shardzoo.zoo import layout
from shardzoo.zoo.conv import SPLIT, Pointwise, on_mesh, pad_to_mesh
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.image_vae_config import PRESETS, Config
from shardzoo.zoo.image_vae_layers import Decoder, Encoder
from shardzoo.zoo.layers import Leaf
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import DATA
from shardzoo.zoo.remat import Remat, check_remat

Host = Array | np.ndarray  # what the public functions take
HEIGHT = 2  # dim of an image
IMAGE = P(DATA, None, SPLIT)
Key = PRNGKeyArray | UInt32[Array, "2"]


class Statistics(eqx.Module):
    """Mean and variance of the latents, for each channel and place in a patch, in the order of a token."""

    mean: Float[Leaf, " channels"]
    variance: Float[Leaf, " channels"]

    @classmethod
    def declare(cls, c: Config) -> "Statistics":
        one = Param("channels", (c.latent_channels * c.patch**2,))
        return cls(mean=one, variance=one)


class Autoencoder(eqx.Module):
    """Encoder and decoder, the projections on their sides of the latents, and the latents' statistics."""

    encoder: Encoder
    quant: Pointwise | None
    post_quant: Pointwise | None
    decoder: Decoder
    statistics: Statistics | None
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Autoencoder":
        moments, latents = 2 * c.latent_channels, c.latent_channels
        return cls(
            encoder=Encoder.declare(c),
            quant=Pointwise.declare(moments, moments) if c.quant else None,
            post_quant=Pointwise.declare(latents, latents) if c.post_quant else None,
            decoder=Decoder.declare(c),
            statistics=Statistics.declare(c) if c.statistics else None,
            config=c,
        )


def declare(config: Config, dtype: Any = np.float32) -> Autoencoder:
    """The declared autoencoder with every weight in `dtype`."""
    return layout.astype(Autoencoder.declare(config), dtype)


class Posterior(NamedTuple):
    """The normal distribution of latents; `log_variance` is kept within -30 and 20 (before normalisation)."""

    mean: Float[Array, "batch channels height width"]
    log_variance: Float[Array, "batch channels height width"]

    def sample(self, key: Key) -> Float[Array, "batch channels height width"]:
        """Latents drawn from it; the likeliest ones are `mean`."""
        noise = jax.random.normal(key, self.mean.shape, np.promote_types(np.float32, self.mean.dtype))
        return self.mean + (jnp.exp(0.5 * self.log_variance).astype(noise.dtype) * noise).astype(self.mean.dtype)


@jaxtyped(typechecker=beartype)
def pack(latents: Shaped[Host, "batch channels height width"], patch: int = 2) -> Shaped[Array, "batch seq packed"]:
    """Latents as tokens, a square of `patch` x `patch` each, row by row.

    In a token all places of the first channel come first, row by row in the square: as FLUX.1, FLUX.2 and Qwen-Image
    take them.

    Raises:
        InputError: height or width do not divide by `patch`.
    """
    batch, channels, height, width = latents.shape
    fail_if(_patch_problems(height, width, patch), "image_vae.pack")
    x = jnp.asarray(latents).reshape(batch, channels, height // patch, patch, width // patch, patch)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch**2)


@jaxtyped(typechecker=beartype)
def unpack(
    tokens: Shaped[Host, "batch seq packed"], height: int, width: int, patch: int = 2
) -> Shaped[Array, "batch channels height width"]:
    """The inverse of `pack`: latents of this height and width.

    Raises:
        InputError: another number of tokens than such latents have, or channels that are not those of squares.
    """
    batch, seq, packed = tokens.shape
    problems = _patch_problems(height, width, patch)
    rows, columns = height // patch, width // patch
    if not problems and seq != rows * columns:
        problems.append(
            f"seq={seq} are not the {rows} x {columns} tokens of these latents: pass their height and width"
        )
    if packed % patch**2:
        problems.append(f"packed={packed} are not channels of squares of {patch} x {patch}: pass another patch")
    fail_if(problems, "image_vae.unpack")
    x = jnp.asarray(tokens).reshape(batch, rows, columns, packed // patch**2, patch, patch)
    return x.transpose(0, 3, 1, 4, 2, 5).reshape(batch, -1, height, width)


def _patch_problems(height: int, width: int, patch: int) -> list[str]:
    sizes = {"height": height, "width": width}
    return [
        f"{name}={size} of latents does not divide by {patch}: use images of another size"
        for name, size in sizes.items()
        if size % patch
    ]


def units(model: Autoencoder, height: int, width: int) -> tuple[Array, Array]:
    """What normalised latents are counted from and in: two numbers, or arrays [channels, height, width]; float32."""
    c = model.config
    if model.statistics is None:
        return jnp.float32(c.shift), jnp.float32(1 / c.scale)

    def spread(of_patch: Array) -> Array:
        shape = (c.latent_channels, c.patch, c.patch)
        return jnp.tile(of_patch.reshape(shape), (1, height // c.patch, width // c.patch))

    wide = np.promote_types(np.float32, model.statistics.mean.dtype)
    mean, variance = model.statistics.mean.astype(wide), model.statistics.variance.astype(wide)
    return spread(mean), spread(jnp.sqrt(variance + c.statistics_eps))


@jaxtyped(typechecker=beartype)
def normalize(
    model: Autoencoder, latents: Float[Host, "batch channels height width"]
) -> Float[Array, "batch channels height width"]:
    """Latents in the units that transformers take, in their dtype: FLUX.1's (latents - shift) * scale, FLUX.2's by the
    statistics of the checkpoint.

    Raises:
        InputError: the model has statistics, and height or width do not divide by the patch.
    """
    latents = jnp.asarray(latents)
    height, width = latents.shape[2:]
    _check_units(model.config, height, width, "image_vae.normalize")
    centre, unit = units(model, height, width)
    wide = latents.astype(np.promote_types(latents.dtype, unit.dtype))
    return ((wide - centre) / unit).astype(latents.dtype)


@jaxtyped(typechecker=beartype)
def denormalize(
    model: Autoencoder, latents: Float[Host, "batch channels height width"]
) -> Float[Array, "batch channels height width"]:
    """The inverse of `normalize`: latents as the encoder gives and the decoder takes them.

    Raises:
        InputError: as `normalize`.
    """
    latents = jnp.asarray(latents)
    height, width = latents.shape[2:]
    _check_units(model.config, height, width, "image_vae.denormalize")
    centre, unit = units(model, height, width)
    wide = latents.astype(np.promote_types(latents.dtype, unit.dtype))
    return (wide * unit + centre).astype(latents.dtype)


def _check_units(config: Config, height: int, width: int, name: str) -> None:
    fail_if(_patch_problems(height, width, config.patch) if config.statistics else [], name)


def encode(
    declared: Autoencoder,
    mesh: Mesh | AbstractMesh,
    *,
    normalized: bool = True,
    dtype: Any = None,
    remat: Remat = False,
) -> Callable[[Autoencoder, Float[Host, "batch channels height width"]], Posterior]:
    """The pure function `f(model, images)`: the posterior of the latents of images in [-1, 1].

    Any batch and size will do: both are padded to what the mesh needs, and the result is cut back. As in the source,
    what is left over at the right and the bottom of sizes that do not divide by the factor of the latents is dropped,
    level by level.

    Args:
        normalized: in the units that transformers take (`normalize`).
        dtype: of the activations; None is that of the weights.
        remat: compute each residual block again in the backward pass rather than keep its activations: all of it, or
            what a policy says (`remat.py`).

    Raises:
        InputError: the mesh does not fit; from f: images of other channels or too small; normalised latents that do not
            make whole patches, where the model has statistics.
    """
    layout.audit(declared, mesh)
    check_remat("image_vae.encode", remat)
    config, asked = declared.config, float_dtype("image_vae.encode", dtype)
    dtype = declared.decoder.conv_in.weight.dtype if asked is None else asked

    def moments(model: Autoencoder, images: Array, height: int) -> Array:
        x = model.encoder(jnp.moveaxis(images, 1, -1), height, remat=remat)
        return jnp.moveaxis(x if model.quant is None else model.quant(x), -1, 1)

    @jaxtyped(typechecker=beartype)
    def f(model: Autoencoder, images: Float[Host, "batch channels height width"]) -> Posterior:
        batch, _, height, _ = images.shape
        _check_images(config, images.shape, normalized=normalized)
        shard = on_mesh(declared, mesh, lambda model, x: moments(model, x, height), (IMAGE,), IMAGE)
        out = shard(model, pad_to_mesh(jnp.asarray(images, dtype), mesh, HEIGHT, config.space_factor))
        out = out[:batch, :, : height // config.space_factor]
        mean, log_variance = jnp.split(out.astype(np.promote_types(np.float32, out.dtype)), 2, axis=1)
        log_variance = jnp.clip(log_variance, -30.0, 20.0)
        if normalized:
            centre, unit = units(model, *mean.shape[2:])
            mean, log_variance = (mean - centre) / unit, log_variance - 2 * jnp.log(jnp.abs(unit))
        return Posterior(mean.astype(out.dtype), log_variance.astype(out.dtype))

    return f


def _check_images(config: Config, shape: tuple[int, ...], *, normalized: bool) -> None:
    _, channels, height, width = shape
    factor, problems = config.space_factor, nothing_in(images=shape)
    if channels != config.channels:
        problems.append(f"channels={channels} are not the {config.channels} of the config: pass [batch, channels, ...]")
    small = {name: size for name, size in (("height", height), ("width", width)) if size < factor}
    problems += [
        f"{name}={size} is less than {factor}, one latent pixel: use a larger one" for name, size in small.items()
    ]
    if normalized and config.statistics:
        problems += _patch_problems(height // factor, width // factor, config.patch)
    fail_if(problems, "image_vae.encode")


def decode(
    declared: Autoencoder,
    mesh: Mesh | AbstractMesh,
    *,
    normalized: bool = True,
    clamp: bool = True,
    dtype: Any = None,
    remat: Remat = False,
) -> Callable[[Autoencoder, Float[Host, "batch channels height width"]], Float[Array, "batch channels height width"]]:
    """The pure function `f(model, latents)`: the images [batch, channels, height, width] of latents.

    Any batch and size will do, as for `encode`.

    Args:
        normalized: the latents are in the units that transformers take (`normalize`).
        clamp: keep the images within -1 and 1.
        dtype, remat: as for `encode`.

    Raises:
        InputError: the mesh does not fit; from f: latents of other channels; normalised ones that do not make whole
            patches, where the model has statistics.
    """
    layout.audit(declared, mesh)
    check_remat("image_vae.decode", remat)
    config, asked = declared.config, float_dtype("image_vae.decode", dtype)
    dtype = declared.decoder.conv_in.weight.dtype if asked is None else asked

    def images(model: Autoencoder, latents: Array, height: int) -> Array:
        x = jnp.moveaxis(latents, 1, -1)
        x = model.decoder(x if model.post_quant is None else model.post_quant(x), height, remat=remat)
        x = jnp.moveaxis(x, -1, 1)
        return jnp.clip(x, -1.0, 1.0) if clamp else x

    @jaxtyped(typechecker=beartype)
    def f(
        model: Autoencoder, latents: Float[Host, "batch latent_channels latent_height latent_width"]
    ) -> Float[Array, "batch channels height width"]:
        batch, channels, height, _ = latents.shape
        problems = nothing_in(latents=latents.shape)
        if channels != config.latent_channels:
            problems.append(
                f"channels={channels} are not the {config.latent_channels} of the config: pass [batch, channels, ...]"
            )
        fail_if(problems, "image_vae.decode")
        given = denormalize(model, latents) if normalized else jnp.asarray(latents)
        shard = on_mesh(declared, mesh, lambda model, x: images(model, x, height), (IMAGE,), IMAGE)
        out = shard(model, pad_to_mesh(given.astype(dtype), mesh, HEIGHT))
        return out[:batch, :, : height * config.space_factor]

    return f


def trace(declared: Autoencoder, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """Decoding, as `Family.trace` says."""
    c = declared.config
    rows, columns = (count * c.patch for count in sizes.cells(c.space_factor * c.patch))
    shape = (sizes.batch, c.latent_channels, rows, columns)
    return decode(declared, mesh, **run), (jax.ShapeDtypeStruct(shape, declared.decoder.conv_in.weight.dtype),)


register(Family(name="image-vae", config=Config, declare=declare, presets=PRESETS, trace=trace))
