"""FLUX.2's pipelines, dev and klein: from token ids and reference images to images.

Source: Flux2Pipeline and Flux2KleinPipeline of diffusers 0.42. The text is a chat, of which three layers of a language
model are taken side by side, with the padding, which the transformer attends to. Dev is told a scale of the guidance;
klein as distilled has none, and klein as a base model is guided away from a negative prompt. Reference images are
encoded, and their tokens follow those of the noise at every step.

The functions are those of `flux_pipeline`, and meshes as there.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Num, UInt8

from shardzoo.errors import fail_if
from shardzoo.zoo import decoder, flux2, image_pipeline, image_vae, images, sampling
from shardzoo.zoo.image_pipeline import PATCH, Host, Request, Text, one_scale, padded
from shardzoo.zoo.pipelines import Components, Manner, Picture, Tokenizer, Wanted, refuse_idle_negative

TEXT, TRANSFORMER, VAE = COMPONENTS = ("text_encoder", "transformer", "vae")
LAYERS = {"Flux2Pipeline": (10, 20, 30), "Flux2KleinPipeline": (9, 18, 27)}  # whose states make the text
SYSTEM_MESSAGE = (  # that dev was trained with, its line break included
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object"
    " relationships, object\nattribution and actions without speculation."
)
REFERENCE_AREA = 1024 * 1024  # pixels of a reference image, at most
REFERENCE_SIDE, REFERENCE_RATIO = 64, 8  # its shortest side, and the longer side over the shorter one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(image_pipeline.Settings):
    """What a pipeline is besides its components.

    Attributes:
        layers: hidden states of the text encoder that make the text; 0 is the embedding.
        distilled: the model needs no guidance.
    """

    layers: tuple[int, ...] = LAYERS["Flux2Pipeline"]
    distilled: bool = False

    def mu(self, tokens: int, steps: int) -> float:
        """The shift exponent of an image of this many tokens: fitted."""
        return sampling.fitted_mu(tokens, steps)


def read_settings(settings: Mapping[str, Any], manner: Manner) -> Settings:
    """As `image_pipeline.read_settings`; there is one manner."""
    return Settings(
        **vars(image_pipeline.read_settings(settings)),
        layers=LAYERS[settings["_class_name"]],
        distilled=bool(settings.get("is_distilled")),
    )


def needed(declared: Mapping[str, Any], settings: Settings) -> list[str]:
    """The components that the pipeline cannot do without and that are not there."""
    return image_pipeline.missing(declared, COMPONENTS)


def run_parts(declared: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The components without the text encoder's layers after the last that is taken, and its head.

    Raises:
        InputError: a text encoder of fewer layers.
    """
    fail_if(_layer_problems(settings, declared[TEXT].config), "flux2_pipeline")
    return {**declared, TEXT: decoder.encoder_part(declared[TEXT], settings.layers)}


def _layer_problems(settings: Settings, text: decoder.Config) -> Iterator[str]:
    if settings.layers[-1] > text.layers:
        yield f"{TEXT}: layers={text.layers} are fewer than the {settings.layers[-1]} that make the text: use another"


def frame_rate(settings: Settings) -> None:
    """None: these are images."""


def request(
    declared: Mapping[str, Any], settings: Settings, wanted: Wanted, tokenizer: Callable[[str], Tokenizer]
) -> Request:
    """The images that are wanted, of the size of the first reference image if nothing is said.

    Guidance is 4 where there is any, and steps are 50, of a distilled model 4, if nothing is said.

    Raises:
        InputError: what the model does not do was asked for; images that it does not take.
    """
    told = declared[TRANSFORMER].config.guidance
    guided = not told and not settings.distilled
    image_pipeline.refuse_unknown(wanted, guidance=not settings.distilled, negative=guided, images=True)
    space_factor = declared[VAE].config.space_factor
    fail_if([problem for picture in wanted.images for problem in _picture_problems(picture)], "generate")
    references = tuple(reference(picture, PATCH * space_factor) for picture in wanted.images)
    sides = image_pipeline.sides(wanted, space_factor, references)
    reader = tokenizer("tokenizer")

    def text(prompts: tuple[str, ...]) -> dict[str, Text]:
        rows = [chat_ids(reader, prompt, told) for prompt in prompts]
        return {TEXT: padded(rows, *reader.padding(), length=flux2.TEXT_TOKENS)}

    scale = one_scale(wanted, 4.0)
    refuse_idle_negative(wanted, scale)
    return Request(
        texts=text(wanted.prompts),
        negative=text((wanted.negative or "",) * len(wanted.prompts)) if guided and scale > 1 else None,
        steps=(4 if settings.distilled else 50) if wanted.steps is None else wanted.steps,
        told=scale if told else None,
        scale=scale if guided else 1.0,
        references=references,
        **sides,
    )


def chat_ids(tokenizer: Tokenizer, prompt: str, told: bool) -> list[int]:
    """Ids of the chat that a prompt becomes: dev's has a system message, klein's the opening of a reply."""
    if told:
        chat = [("system", SYSTEM_MESSAGE), ("user", prompt.replace("[IMG]", ""))]
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in chat]
        text = tokenizer.render(messages, add_generation_prompt=False)
        return tokenizer.encode(text, limit=flux2.TEXT_TOKENS, special=False)
    message = {"role": "user", "content": prompt}
    text = tokenizer.render([message], add_generation_prompt=True, enable_thinking=False)
    return tokenizer.encode(text, limit=flux2.TEXT_TOKENS)


def _picture_problems(picture: Picture) -> Iterator[str]:
    short, long = sorted((picture.height, picture.width))
    size = f"image: of {picture.height} x {picture.width}"
    if short < REFERENCE_SIDE:
        yield f"{size}, with a side below {REFERENCE_SIDE} pixels: give a larger one"
    elif long > REFERENCE_RATIO * short:
        yield f"{size}, more than {REFERENCE_RATIO} times as long as wide: cut it"


def reference(picture: Picture, multiple: int) -> UInt8[np.ndarray, "height width 3"]:
    """A reference image: made smaller if it is large, then cut to multiples of a token's side, the middle kept."""
    height, width = picture.height, picture.width
    if height * width > REFERENCE_AREA:
        scale = math.sqrt(REFERENCE_AREA / (height * width))
        height, width = int(height * scale), int(width * scale)
    pixels = picture.stretched(height, width)
    top, left = (height % multiple) // 2, (width % multiple) // 2
    return pixels[top : top + height // multiple * multiple, left : left + width // multiple * multiple]


def check(declared: Mapping[str, Any], settings: Settings, request: Request) -> None:
    """Refuses what the pipeline cannot do, before any weight is there.

    Raises:
        InputError: everything that is wrong, with the nearest sizes that are right.
    """
    absent = needed(declared, settings)
    fail_if([f"{name}: missing" for name in absent], "flux2_pipeline: components are missing")
    model, vae, text = (declared[name].config for name in (TRANSFORMER, VAE, TEXT))
    pairs = [
        (TRANSFORMER, "in_channels", model.in_channels, VAE, "tokens", vae.latent_channels * PATCH**2),
        (TRANSFORMER, "out_channels", model.out_channels, VAE, "tokens", vae.latent_channels * PATCH**2),
        (TRANSFORMER, "text", model.text, TEXT, f"embed x {len(settings.layers)}", text.embed * len(settings.layers)),
    ]
    problems = [*image_pipeline.mismatches(pairs)]
    problems += image_pipeline.problems(declared, request, vae.space_factor, (TEXT,))
    problems += _layer_problems(settings, text)
    if (request.told is None) == model.guidance:
        problems.append("guidance: " + ("missing" if model.guidance else "this model is not told it: leave it out"))
    if request.guided and (settings.distilled or model.guidance):
        problems.append("negative prompt: this model is not guided away from one: leave it out")
    fail_if(problems, "flux2_pipeline")


class Condition(NamedTuple):
    """What the transformer sees at each step: states of the text of each row, and tokens of the reference images."""

    text: Float[Array, "rows seq width"]
    references: Float[Array, "1 reference_seq channels"] | None = None


def encode(parts: Components, mesh: Mesh, settings: Settings, request: Request) -> Condition:
    """What the encoders make of the prompts, of the negative ones below them with guidance, and of reference images."""
    text = request.rows(TEXT)
    run = jax.jit(decoder.encode(parts.declared[TEXT], mesh, layers=settings.layers))
    states = run(parts.live(TEXT), text.ids, text.mask)
    if not request.references:
        return Condition(states)
    model, run = parts.live(VAE), jax.jit(reference_tokens(parts.declared[VAE], mesh))
    tokens = [run(model, images.as_values(image[None])) for image in request.references]
    return Condition(states, jnp.concatenate(tokens, axis=1))


def reference_tokens(declared: Any, mesh: Mesh) -> Callable[..., Float[Array, "batch seq channels"]]:
    """The pure function `f(model, pixels)`: the tokens of images from -1 to 1."""
    run = image_vae.encode(declared, mesh)

    def f(model: Any, pixels: Float[Host, "batch 3 height width"]) -> Float[Array, "batch seq channels"]:
        return image_vae.pack(run(model, pixels).mean.astype(jnp.float32))

    return f


def velocity(
    declared: flux2.Flux2, mesh: Mesh, request: Request, grids: tuple[tuple[int, int], ...]
) -> Callable[..., Float[Array, "batch seq channels"]]:
    """The pure function `f(model, condition, sample, timestep)` of `flux_pipeline.velocity`.

    `grids` are rows and columns of the images' tokens, then those of the reference images.
    """
    run = flux2.forward(declared, mesh)
    ids = flux2.image_ids(*grids[0], grids[1:])

    def f(
        model: flux2.Flux2,
        condition: Condition,
        sample: Float[Host, "batch seq channels"],
        timestep: Num[Host, ""],
    ) -> Float[Array, "batch seq channels"]:
        x = image_pipeline.with_references(sample, condition.references, request.ways)
        told = None if request.told is None else jnp.full(len(x), request.told, jnp.float32)
        time = image_pipeline.times(len(x), timestep)
        out = run(model, x, condition.text, time, image_ids=ids, guidance=told)
        return image_pipeline.away(out[:, : sample.shape[1]], request)

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
    """The latents of images, by the arguments of `flux_pipeline.sample`.

    Raises:
        InputError: what `check` refuses; the mesh does not fit a component; noise of another shape.
    """
    check(parts.declared, settings, request)
    shape = latent_shape(parts.declared[VAE].config, request)
    start, grids = image_pipeline.starting_noise(shape, key, noise), image_pipeline.grids(shape, request)
    sampler = settings.sampler(math.prod(grids[0]), request.steps)
    condition = encode(parts, mesh, settings, request)
    run = velocity(parts.declared[TRANSFORMER], mesh, request, grids)
    return image_pipeline.steps_taken(parts, TRANSFORMER, sampler, run, condition, start, on_step)


def frames(
    parts: Components, mesh: Mesh, latents: Float[Host, "batch channels height width"]
) -> Iterator[UInt8[np.ndarray, "images height width channels"]]:
    """The images as bytes, as many at a time as the mesh splits a batch into."""
    yield from image_pipeline.decoded(image_vae.decode(parts.declared[VAE], mesh), parts.live(VAE), mesh, latents)
