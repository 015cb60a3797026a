"""FLUX.1's pipeline, dev and schnell: from token ids to images, by CLIP and T5, the transformer and the autoencoder.

Source: FluxPipeline of diffusers 0.42. The dev model is told a scale of the guidance; guidance away from a negative
prompt is possible besides. T5 reads its padding and the transformer attends to it, as the model was trained.

`sample` and `frames` run a whole pipeline, with the weights of one component at a time if need be; the functions they
jit are pure, and of use on their own. Meshes are as for the components: the pair of guidance is a batch of twice as
many rows, so that `data=2` computes both halves at once.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Num, UInt8

from shardzoo.errors import fail_if
from shardzoo.zoo import clip_text, flux, image_pipeline, image_vae, t5
from shardzoo.zoo.image_pipeline import PATCH, Host, Request, Settings, Text, one_scale, padded
from shardzoo.zoo.pipelines import Components, Manner, Tokenizer, Wanted

POOLED, TEXT, TRANSFORMER, VAE = COMPONENTS = ("text_encoder", "text_encoder_2", "transformer", "vae")
TOKENIZERS = {POOLED: "tokenizer", TEXT: "tokenizer_2"}


def read_settings(settings: Mapping[str, Any], manner: Manner) -> Settings:
    """As `image_pipeline.read_settings`; there is one manner."""
    return image_pipeline.read_settings(settings)


def needed(declared: Mapping[str, Any], settings: Settings) -> list[str]:
    """The components that the pipeline cannot do without and that are not there."""
    return image_pipeline.missing(declared, COMPONENTS)


def run_parts(declared: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The components, all of each."""
    return dict(declared)


def frame_rate(settings: Settings) -> None:
    """None: these are images."""


def request(
    declared: Mapping[str, Any], settings: Settings, wanted: Wanted, tokenizer: Callable[[str], Tokenizer]
) -> Request:
    """The images that are wanted: 3.5 for guidance and 28 steps with dev, 4 steps with schnell, if nothing is said.

    Raises:
        InputError: what the model does not do was asked for.
    """
    told = declared[TRANSFORMER].config.guidance
    image_pipeline.refuse_unknown(wanted, guidance=told, negative=True, true_guidance=True)
    scale = 1.0 if wanted.true_guidance is None else wanted.true_guidance
    problems = []
    if (wanted.negative is not None) != (scale > 1):
        problems.append("negative and true_guidance go together: give a negative prompt, and a scale above 1")
    fail_if(problems, "generate")
    limits = {POOLED: declared[POOLED].config.positions, TEXT: flux.TEXT_TOKENS[told]}
    readers = {name: tokenizer(folder) for name, folder in TOKENIZERS.items()}

    def texts(prompts: tuple[str, ...]) -> dict[str, Text]:
        ids = {name: [reader.encode(p, limit=limits[name]) for p in prompts] for name, reader in readers.items()}
        return {name: padded(rows, *readers[name].padding(), length=limits[name]) for name, rows in ids.items()}

    return Request(
        texts=texts(wanted.prompts),
        negative=None if wanted.negative is None else texts((wanted.negative,) * len(wanted.prompts)),
        steps=(28 if told else 4) if wanted.steps is None else wanted.steps,
        told=one_scale(wanted, 3.5) if told else None,
        scale=scale,
        **image_pipeline.sides(wanted, declared[VAE].config.space_factor),
    )


def check(declared: Mapping[str, Any], settings: Settings, request: Request) -> None:
    """Refuses what the pipeline cannot do, before any weight is there.

    Raises:
        InputError: everything that is wrong, with the nearest sizes that are right.
    """
    absent = needed(declared, settings)
    fail_if([f"{name}: missing" for name in absent], "flux_pipeline: components are missing")
    model, vae = declared[TRANSFORMER].config, declared[VAE].config
    pairs = [
        (TRANSFORMER, "in_channels", model.in_channels, VAE, "tokens", vae.latent_channels * PATCH**2),
        (TRANSFORMER, "out_channels", model.out_channels, VAE, "tokens", vae.latent_channels * PATCH**2),
        (TRANSFORMER, "text", model.text, TEXT, "embed", declared[TEXT].config.embed),
        (TRANSFORMER, "pooled", model.pooled, POOLED, "embed", declared[POOLED].config.embed),
    ]
    problems = [*image_pipeline.mismatches(pairs)]
    problems += image_pipeline.problems(declared, request, vae.space_factor, (POOLED, TEXT))
    if (request.told is None) == model.guidance:
        problems.append("guidance: " + ("missing" if model.guidance else "this model is not told it: leave it out"))
    problems += ["image: this model makes images of text alone: leave it out"] if request.references else []
    fail_if(problems, "flux_pipeline")


class Condition(NamedTuple):
    """What the transformer is told at each step, of each row: states of the text, and its pooled state."""

    text: Float[Array, "rows seq width"]
    pooled: Float[Array, "rows width"]


def encode(parts: Components, mesh: Mesh, request: Request) -> Condition:
    """What the text encoders make of the prompts and, with guidance, of the negative ones below them."""
    lies = image_pipeline.told_rows(mesh, len(request.rows(TEXT).ids))
    pooled = jax.jit(clip_text.forward(parts.declared[POOLED], mesh), out_shardings=lies)
    text = jax.jit(t5.forward(parts.declared[TEXT], mesh), out_shardings=lies)
    state = pooled(parts.live(POOLED), request.rows(POOLED).ids)
    return Condition(text(parts.live(TEXT), request.rows(TEXT).ids), state)


def velocity(
    declared: flux.Flux, mesh: Mesh, request: Request, rows: int, columns: int
) -> Callable[..., Float[Array, "batch seq channels"]]:
    """The pure function `f(model, condition, sample, timestep)`: the velocity of tokens in so many rows and columns.

    With guidance the condition is of twice the batch, the wanted rows before the unwanted ones; both halves are
    computed in one batch, and combined in float32.

    Raises:
        InputError: the mesh does not fit the declaration.
    """
    run = flux.forward(declared, mesh)
    ids = flux.image_ids(rows, columns)

    def f(
        model: flux.Flux,
        condition: Condition,
        sample: Float[Host, "batch seq channels"],
        timestep: Num[Host, ""],
    ) -> Float[Array, "batch seq channels"]:
        x = jnp.concatenate([jnp.asarray(sample)] * request.ways)
        told = None if request.told is None else jnp.full(len(x), request.told, jnp.float32)
        time = image_pipeline.times(len(x), timestep)
        out = run(model, x, condition.text, condition.pooled, time, image_ids=ids, guidance=told)
        return image_pipeline.away(out, request)

    return f


def latent_shape(vae: image_vae.Config, request: Request) -> tuple[int, int, int, int]:
    """Shape [batch, channels, height, width] of the latents that noise becomes."""
    return image_pipeline.latent_shape(vae.latent_channels, vae.space_factor, request)


def sample(
    parts: Components,
    mesh: Mesh,
    settings: Settings,
    request: Request,
    *,
    key: Array | None = None,
    noise: Float[Host, "batch channels height width"] | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Float[Array, "batch channels height width"]:
    """The latents of images: texts encoded once, then every step.

    Args:
        parts, mesh, settings: the pipeline.
        request: the images.
        key: of the noise, where that is not given.
        noise: to start from, of shape `latent_shape`.
        on_step: told after each step how many are done, and how many there are.

    Raises:
        InputError: what `check` refuses; the mesh does not fit a component; noise of another shape.
    """
    check(parts.declared, settings, request)
    shape = latent_shape(parts.declared[VAE].config, request)
    start, (grid,) = image_pipeline.starting_noise(shape, key, noise), image_pipeline.grids(shape, request)
    sampler = settings.sampler(math.prod(grid), request.steps)
    condition = encode(parts, mesh, request)
    run = velocity(parts.declared[TRANSFORMER], mesh, request, *grid)
    return image_pipeline.steps_taken(parts, TRANSFORMER, sampler, run, condition, start, on_step)


def frames(
    parts: Components, mesh: Mesh, latents: Float[Host, "batch channels height width"]
) -> Iterator[UInt8[np.ndarray, "images height width channels"]]:
    """The images as bytes, as many at a time as the mesh splits a batch into."""
    yield from image_pipeline.decoded(image_vae.decode(parts.declared[VAE], mesh), parts.live(VAE), mesh, latents)
