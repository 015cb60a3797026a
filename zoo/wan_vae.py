"""The video autoencoders of Wan2.1 and Wan2.2: causal in time, streaming, split over devices by rows.

Source: `AutoencoderKLWan` of diffusers 0.42 (`wan/modules/vae.py` and `vae2_2.py` of the authors' repositories). Wan2.2
has 2x2 patches of pixels round the network and parameter-free shortcuts round its levels. Qwen-Image's autoencoder is
Wan2.1's with other weights.

A video of 1 + 4k frames has 1 + k latent frames (for the published factor of 4). As in the source the first frame goes
through alone, then an encoder takes four frames at a time and a decoder one latent frame; what a convolution needs of
the frames before is its cache. `encode` and `decode` run over a whole video by one `lax.scan` with the caches as carry;
`encode_stream` and `decode_stream` do the same piece by piece, for videos that are not to be on the devices whole.

Mesh axes: the batch over `data`, the height over `context` and the tensor axes together (`conv.SPLIT`; see there why);
`pipe` must be 1. Weights are whole on every device. Videos and latents are as in PyTorch, [batch, channels, frames,
height, width]: a last dim of three channels would fill a tile of 128 on a TPU.

Collectives of a step on several devices along the height, by the layers: two permutations of one row for each
convolution of 3 x 3 pixels, one for each of stride 2, one all-gather in the middle. A whole video has those of two
steps: the first, and the body of the scan.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, jaxtyped

from shardzoo.errors import fail_if, nothing_in
from shardzoo.zoo import layout
from shardzoo.zoo.conv import SPLIT, Pointwise, on_mesh, pad_to_mesh
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.mesh import DATA
from shardzoo.zoo.remat import Remat, check_remat, rematerialised
from shardzoo.zoo.wan_vae_config import PRESETS, Config
from shardzoo.zoo.wan_vae_layers import Cache, Decoder, Encoder

Host = Array | np.ndarray  # what the public functions take
Video = Float[Host, "batch channels frames height width"]
FRAMES, HEIGHT = 2, 3  # dims of a video
CHUNK = 4  # frames that an encoder takes at a time


class Autoencoder(eqx.Module):
    """Encoder and decoder, and the projections on their sides of the latents."""

    encoder: Encoder
    quant: Pointwise
    post_quant: Pointwise
    decoder: Decoder
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Autoencoder":
        return cls(
            encoder=Encoder.declare(c),
            quant=Pointwise.declare(2 * c.latent_channels, 2 * c.latent_channels),
            post_quant=Pointwise.declare(c.latent_channels, c.latent_channels),
            decoder=Decoder.declare(c),
            config=c,
        )


def declare(config: Config, dtype: Any = np.float32) -> Autoencoder:
    """The declared autoencoder with every weight in `dtype`."""
    return layout.astype(Autoencoder.declare(config), dtype)


class Posterior(NamedTuple):
    """The normal distribution of latents; `log_variance` is kept within -30 and 20 (before normalisation)."""

    mean: Float[Array, "batch channels frames height width"]
    log_variance: Float[Array, "batch channels frames height width"]


def statistics(config: Config) -> tuple[Float[Array, "channels one two three"], Float[Array, "channels one two three"]]:
    """Mean and standard deviation of latents, to be broadcast over [batch, channels, frames, height, width]."""
    mean, std = (jnp.asarray(x, jnp.float32)[:, None, None, None] for x in (config.latent_mean, config.latent_std))
    return mean, std


def to_patches(video: Video, patch: int) -> Float[Array, "batch frames rows columns patch_channels"]:
    """Pixels of a patch as channels, channels last: of a pixel's channel first by column, then by row in the patch."""
    batch, channels, frames, height, width = video.shape
    x = video.reshape(batch, channels, frames, height // patch, patch, width // patch, patch)
    return x.transpose(0, 2, 3, 5, 1, 6, 4).reshape(batch, frames, height // patch, width // patch, -1)


def from_patches(x: Float[Array, "batch frames rows columns patch_channels"], patch: int) -> Video:
    """The inverse of `to_patches`."""
    batch, frames, rows, columns, _ = x.shape
    x = x.reshape(batch, frames, rows, columns, -1, patch, patch).transpose(0, 4, 1, 2, 6, 3, 5)
    return x.reshape(batch, -1, frames, rows * patch, columns * patch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Direction:
    """Encoding or decoding, as the functions that run it see it.

    Attributes:
        name: of the public function, for messages.
        channels: of what goes in.
        piece: frames of every piece that goes in but the first, which is one frame.
        gives: frames that such a piece comes out as.
        step: (model, piece, its true height, cache) -> what comes out [batch, channels, frames, height, width], cache.
        multiple: rows that must stay on one device together.
        height: rows that go in -> rows that come out.
        dtype: of the activations; None is that of the weights.
        remat: what the backward pass computes again of each step.
    """

    name: str
    channels: int
    piece: int
    gives: int
    step: Callable[[Autoencoder, Array, int, Cache], tuple[Array, Cache]]
    multiple: int
    height: Callable[[int], int]
    dtype: Any
    remat: Remat


def _encoding(config: Config, *, normalized: bool, dtype: Any, remat: Remat) -> Direction:
    def step(model: Autoencoder, video: Array, height: int, cache: Cache) -> tuple[Array, Cache]:
        moments, cache = model.encoder(to_patches(video, config.patch), height // config.patch, cache)
        moments = jnp.moveaxis(model.quant(moments), -1, 1)
        moments = moments.astype(np.promote_types(np.float32, moments.dtype))
        mean, log_variance = jnp.split(moments, 2, axis=1)
        log_variance = jnp.clip(log_variance, -30.0, 20.0)
        if normalized:
            centre, std = statistics(config)
            mean, log_variance = (mean - centre) / std, log_variance - 2 * jnp.log(std)
        return jnp.concatenate([mean, log_variance], axis=1).astype(video.dtype), cache

    return Direction(
        name="wan_vae.encode",
        channels=config.channels,
        piece=CHUNK,
        gives=CHUNK // config.time_factor,
        step=step,
        multiple=config.space_factor,
        height=lambda rows: rows // config.space_factor,
        dtype=float_dtype("wan_vae.encode", dtype),
        remat=remat,
    )


def _decoding(config: Config, *, normalized: bool, clamp: bool, dtype: Any, remat: Remat) -> Direction:
    def step(model: Autoencoder, latents: Array, height: int, cache: Cache) -> tuple[Array, Cache]:
        if normalized:
            mean, std = statistics(config)
            wide = latents.astype(np.promote_types(latents.dtype, std.dtype))
            latents = (wide * std + mean).astype(latents.dtype)
        x = model.post_quant(jnp.moveaxis(latents, 1, -1))
        x, cache = model.decoder(x, height, cache)
        video = from_patches(x, config.patch)
        return jnp.clip(video, -1.0, 1.0) if clamp else video, cache

    return Direction(
        name="wan_vae.decode",
        channels=config.latent_channels,
        piece=1,
        gives=config.time_factor,
        step=step,
        multiple=1,
        height=lambda rows: rows * config.space_factor,
        dtype=float_dtype("wan_vae.decode", dtype),
        remat=remat,
    )


def over_time(
    way: Direction, model: Autoencoder, video: Float[Array, "batch channels frames height width"], rows: int
) -> Float[Array, "batch out_channels out_frames out_height out_width"]:
    """All of a video: the first frame, then a scan over the pieces after it.

    The carry holds the result and the caches; each step writes its frames into the result, so that no array but the
    result grows with the number of frames.
    """
    step = rematerialised(way.step, way.remat, scanned=False, static_argnums=2)
    out, cache = step(model, video[:, :, :1], rows, None)
    pieces = (video.shape[FRAMES] - 1) // way.piece
    if not pieces:
        return out
    shape = list(out.shape)
    shape[FRAMES] += pieces * way.gives
    whole = jnp.zeros_like(out, shape=tuple(shape))
    whole = lax.dynamic_update_slice_in_dim(whole, out, 0, axis=FRAMES)

    def body(carry: tuple[Array, Cache], i: Array) -> tuple[tuple[Array, Cache], None]:
        whole, cache = carry
        piece = lax.dynamic_slice_in_dim(video, 1 + i * way.piece, way.piece, axis=FRAMES)
        out, cache = step(model, piece, rows, cache)
        return (lax.dynamic_update_slice_in_dim(whole, out, 1 + i * way.gives, axis=FRAMES), cache), None

    return lax.scan(body, (whole, cache), jnp.arange(pieces))[0][0]


VIDEO = P(DATA, None, None, SPLIT)
CACHE = P(DATA, None, SPLIT)


def _prepared(way: Direction, declared: Autoencoder, mesh: Mesh | AbstractMesh, video: Video) -> Array:
    """The video in the dtype to compute in, with zeros added until batch and rows can be split."""
    dtype = declared.quant.weight.dtype if way.dtype is None else way.dtype
    return pad_to_mesh(jnp.asarray(video, dtype), mesh, HEIGHT, way.multiple)


def _cut(way: Direction, out: Array, like: Video) -> Array:
    """What came out, without what was added to the batch and the rows."""
    return out[: like.shape[0], :, :, : way.height(like.shape[HEIGHT])]


def _check(way: Direction, config: Config, video: Video, frames: int | None = None) -> None:
    """That a whole video, or a piece of so many frames, is one that the direction takes."""
    problems = nothing_in(video=video.shape)
    _, channels, count, height, width = video.shape
    if channels != way.channels:
        problems.append(f"channels={channels} are not the {way.channels} of the config: pass [batch, channels, ...]")
    if frames is None and (count - 1) % way.piece:
        problems.append(f"frames={count} are not 1 + a multiple of {way.piece}: leave out or repeat frames")
    if frames is not None and count != frames:
        problems.append(f"frames={count} are not the {frames} of this piece: the first is 1, later ones {way.piece}")
    if way.multiple > 1:
        problems += _size_problems(config, {"height": height, "width": width})
    fail_if(problems, way.name)


def _size_problems(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    need = config.space_factor if config.shortcuts else config.patch
    for name, size in sizes.items():
        if size % need:
            yield f"{name}={size} does not divide by {need}: crop or pad it"
        elif size < config.space_factor:
            yield f"{name}={size} is less than {config.space_factor}, one latent pixel: use a larger one"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """A direction piece by piece: pure functions to jit, and a generator that does so.

    Attributes:
        first: (model, the first frame [batch, channels, 1, height, width]) -> (result, state).
        later: (model, the next frames, as many as `piece`, state) -> (result, next state).
        piece: frames of every piece but the first.

    A result is what `encode` or `decode` has at the same place. The state holds the caches, split over the mesh like
    the frames; what is in it is of no use elsewhere.
    """

    first: Callable[[Autoencoder, Video], tuple[Any, Cache]]
    later: Callable[[Autoencoder, Video, Cache], tuple[Any, Cache]]
    piece: int

    def cut(self, video: Video) -> Iterator[Video]:
        """The pieces of a whole video, one by one."""
        yield video[:, :, :1]
        for start in range(1, video.shape[FRAMES], self.piece):
            yield video[:, :, start : start + self.piece]

    def run(self, model: Autoencoder, pieces: Iterable[Video]) -> Iterator[Any]:
        """The result of each piece, as the pieces come. Memory on the devices is that of one step."""
        first, later = jax.jit(self.first), jax.jit(self.later, donate_argnums=2)
        state = None
        for piece in pieces:
            out, state = first(model, piece) if state is None else later(model, piece, state)
            yield out


def _whole(way: Direction, declared: Autoencoder, mesh: Mesh | AbstractMesh) -> Callable[[Autoencoder, Video], Array]:
    layout.audit(declared, mesh)
    check_remat(way.name, way.remat)

    def f(model: Autoencoder, video: Video) -> Array:
        _check(way, declared.config, video)
        height = video.shape[HEIGHT]
        shard = on_mesh(declared, mesh, lambda model, x: over_time(way, model, x, height), (VIDEO,), VIDEO)
        return _cut(way, shard(model, _prepared(way, declared, mesh, video)), video)

    return f


def _stream(way: Direction, declared: Autoencoder, mesh: Mesh | AbstractMesh, finish: Callable[[Array], Any]) -> Stream:
    layout.audit(declared, mesh)

    def step(model: Autoencoder, video: Video, *state: Cache) -> tuple[Any, Cache]:
        _check(way, declared.config, video, frames=way.piece if state else 1)
        height = video.shape[HEIGHT]

        def call(model: Autoencoder, x: Array, *state: Cache) -> tuple[Array, Cache]:
            return way.step(model, x, height, *(state or (None,)))

        shard = on_mesh(declared, mesh, call, (VIDEO, *(CACHE for _ in state)), (VIDEO, CACHE))
        out, after = shard(model, _prepared(way, declared, mesh, video), *state)
        return finish(_cut(way, out, video)), after

    return Stream(first=step, later=step, piece=way.piece)


def _posterior(moments: Array) -> Posterior:
    return Posterior(*jnp.split(moments, 2, axis=1))


def encode(
    declared: Autoencoder,
    mesh: Mesh | AbstractMesh,
    *,
    normalized: bool = True,
    dtype: Any = None,
    remat: Remat = False,
) -> Callable[[Autoencoder, Video], Posterior]:
    """The pure function `f(model, video)`: the posterior of the latents of a video of 1 + 4k frames in [-1, 1].

    The pipelines of Wan take its mean as the latents. Any batch and height will do: both are padded to what the mesh
    needs, and the result is cut back. Without shortcuts sizes need not divide by the factor of the latents: as in the
    source what is left over at the right and the bottom is dropped.

    Args:
        normalized: in units of the config's statistics, as the transformers take latents.
        dtype: of the activations; None is that of the weights.
        remat: compute each step again in the backward pass rather than keep its activations: all of it, or what a
            policy says (`remat.py`).

    Raises:
        InputError: the mesh does not fit; from f: sizes that the autoencoder does not take.
    """
    run = _whole(_encoding(declared.config, normalized=normalized, dtype=dtype, remat=remat), declared, mesh)

    @jaxtyped(typechecker=beartype)
    def f(model: Autoencoder, video: Float[Host, "batch channels frames height width"]) -> Posterior:
        return _posterior(run(model, video))

    return f


def decode(
    declared: Autoencoder,
    mesh: Mesh | AbstractMesh,
    *,
    normalized: bool = True,
    clamp: bool = True,
    dtype: Any = None,
    remat: Remat = False,
) -> Callable[[Autoencoder, Video], Array]:
    """The pure function `f(model, latents)`: the video [batch, channels, frames, height, width] of latents.

    Any batch and height will do, as for `encode`.

    Args:
        normalized: the latents are in units of the config's statistics.
        clamp: keep the video within -1 and 1.
        dtype, remat: as for `encode`.

    Raises:
        InputError: the mesh does not fit; from f: latents of other channels.
    """
    way = _decoding(declared.config, normalized=normalized, clamp=clamp, dtype=dtype, remat=remat)
    run = _whole(way, declared, mesh)

    @jaxtyped(typechecker=beartype)
    def f(
        model: Autoencoder, latents: Float[Host, "batch latent_channels latent_frames latent_height latent_width"]
    ) -> Float[Array, "batch channels frames height width"]:
        return run(model, latents)

    return f


def encode_stream(
    declared: Autoencoder, mesh: Mesh | AbstractMesh, *, normalized: bool = True, dtype: Any = None
) -> Stream:
    """`encode` piece by piece: the first frame, then four at a time; each gives a `Posterior`."""
    way = _encoding(declared.config, normalized=normalized, dtype=dtype, remat=False)
    return _stream(way, declared, mesh, _posterior)


def decode_stream(
    declared: Autoencoder, mesh: Mesh | AbstractMesh, *, normalized: bool = True, clamp: bool = True, dtype: Any = None
) -> Stream:
    """`decode` piece by piece, one latent frame at a time: a long video need never be on the devices whole.

    for frames in stream.run(model, stream.cut(latents)): ...
    """
    way = _decoding(declared.config, normalized=normalized, clamp=clamp, dtype=dtype, remat=False)
    return _stream(way, declared, mesh, lambda out: out)


def trace(declared: Autoencoder, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """Decoding, as `Family.trace` says."""
    c = declared.config
    frames = 1 + (sizes.frames - 1) // c.time_factor
    shape = (sizes.batch, c.latent_channels, frames, *sizes.cells(c.space_factor))
    return decode(declared, mesh, **run), (jax.ShapeDtypeStruct(shape, declared.quant.weight.dtype),)


register(Family(name="wan-vae", config=Config, declare=declare, presets=PRESETS, trace=trace))
