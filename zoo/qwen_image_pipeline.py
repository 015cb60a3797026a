"""Qwen-Image's pipelines, text to image and editing: from token ids and images to images.

Source: QwenImagePipeline, QwenImageEditPipeline and QwenImageEditPlusPipeline of diffusers 0.42. The prompt stands in a
fixed chat, whose first tokens are left out once it is encoded; padding is masked. With guidance away from a negative
prompt, which the models need, each token of the velocity is scaled back to the norm that it has without. Images to edit
are seen by the language model, through its vision tower, and by the transformer, as latents behind those of the noise.

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
from jaxtyping import Array, Bool, Float, Num, UInt8

from shardzoo.errors import fail_if
from shardzoo.zoo import decoder, image_pipeline, image_vae, images, qwen2_5_vl, qwen2_5_vl_inputs, qwen_image, wan_vae
from shardzoo.zoo.image_pipeline import PATCH, Host, Text, one_scale, padded
from shardzoo.zoo.pipelines import Components, Manner, Picture, Tokenizer, Wanted, refuse_idle_negative

TEXT, TRANSFORMER, VAE = COMPONENTS = ("text_encoder", "transformer", "vae")
EYES = "image_encoder"  # the language model's vision tower, of pipelines that edit
CHAT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
DESCRIBE = CHAT.format(  # these are what the models were trained with
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the"
    " objects and background:"
)
EDIT = CHAT.format(
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how"
    " the user's text instruction should alter or modify the image. Generate a new image that meets the user's"
    " requirements while maintaining consistency with the original input where appropriate."
)
SEEN, SEEN_NUMBERED = "<|vision_start|>{}<|vision_end|>", "Picture {}: <|vision_start|>{}<|vision_end|>"
IMAGE_TOKEN = "<|image_pad|>"
TEXT_TOKENS = 512  # of the prompt, at most
MULTIPLE = 32  # pixels that the sides of images to edit are rounded to


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(image_pipeline.Settings):
    """What a pipeline is besides its components.

    Attributes:
        chat: round the prompt.
        left_out: tokens of the chat before the prompt.
        images: how many it edits; None is any number, numbered in the chat.
        seen_area, reference_area: pixels of an image as the language model, and as the transformer sees it.
    """

    chat: str = DESCRIBE
    left_out: int = 34
    images: int | None = 0
    seen_area: int = 1024 * 1024
    reference_area: int = 1024 * 1024


EDITS: Mapping[str, dict[str, Any]] = {
    "QwenImagePipeline": {},
    "QwenImageEditPipeline": {"chat": EDIT, "left_out": 64, "images": 1},
    "QwenImageEditPlusPipeline": {"chat": EDIT, "left_out": 64, "images": None, "seen_area": 384 * 384},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(image_pipeline.Request):
    """As `image_pipeline.Request`.

    Attributes:
        seen: the reference images as the language model sees them.
        image_token: the token that its features stand in for.
    """

    seen: tuple[UInt8[np.ndarray, "_ _ 3"], ...] = ()
    image_token: int = -1


def read_settings(settings: Mapping[str, Any], manner: Manner) -> Settings:
    """As `image_pipeline.read_settings`; there is one manner."""
    return Settings(**vars(image_pipeline.read_settings(settings)), **EDITS[settings["_class_name"]])


def needed(declared: Mapping[str, Any], settings: Settings) -> list[str]:
    """The components that the pipeline cannot do without and that are not there."""
    return image_pipeline.missing(declared, COMPONENTS if settings.images == 0 else (*COMPONENTS, EYES))


def run_parts(declared: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The components without the head of the text encoder."""
    return {**declared, TEXT: decoder.encoder_part(declared[TEXT])}


def frame_rate(settings: Settings) -> None:
    """None: these are images."""


def request(
    declared: Mapping[str, Any], settings: Settings, wanted: Wanted, tokenizer: Callable[[str], Tokenizer]
) -> Request:
    """The images that are wanted: 4 for guidance, away from a space, and 50 steps, if nothing is said.

    Edited ones have about as many pixels as the model was made for and the shape of the last image given, if nothing is
    said.

    Raises:
        InputError: what the model does not do was asked for.
    """
    image_pipeline.refuse_unknown(wanted, guidance=True, negative=True, images=settings.images != 0)
    fail_if(_number_problems(settings, len(wanted.images)), "generate")
    fail_if((p for picture in wanted.images for p in _picture_problems(settings, picture)), "generate")
    seen = tuple(scaled(picture, settings.seen_area) for picture in wanted.images)
    references = tuple(scaled(picture, settings.reference_area) for picture in wanted.images)
    scale, reader = one_scale(wanted, 4.0), tokenizer("tokenizer")
    refuse_idle_negative(wanted, scale)
    shown = _shown(settings, declared[EYES].config, seen) if seen else ""
    limit = settings.left_out + TEXT_TOKENS + len(reader.encode(shown, limit=2**31, special=False))

    def text(prompts: tuple[str, ...]) -> dict[str, Text]:
        rows = [reader.encode(settings.chat.format(shown + prompt), limit=limit) for prompt in prompts]
        return {TEXT: padded(rows, reader.padding()[0])}

    negative = " " if wanted.negative is None else wanted.negative
    return Request(
        texts=text(wanted.prompts),
        negative=text((negative,) * len(wanted.prompts)) if scale > 1 else None,
        steps=50 if wanted.steps is None else wanted.steps,
        scale=scale,
        references=references,
        seen=seen,
        image_token=reader.encode(IMAGE_TOKEN, limit=1, special=False)[0] if seen else -1,
        **image_pipeline.sides(wanted, declared[VAE].config.space_factor, references[-1:]),
    )


def _number_problems(settings: Settings, count: int) -> Iterator[str]:
    if settings.images is None and not count:
        yield "image: this model edits images: give one or more"
    elif settings.images is not None and count != settings.images:
        yield f"image: this model takes {settings.images}, and {count} were given: change that"


def scaled(picture: Picture, area: int) -> UInt8[np.ndarray, "height width 3"]:
    """A picture of about this many pixels and about its own shape."""
    return picture.stretched(*_scaled_size(picture, area))


def _scaled_size(picture: Picture, area: int) -> tuple[int, int]:
    """Height and width of about this many pixels and of about a picture's shape; 0 where its shape is too long."""
    ratio = picture.width / picture.height
    width = math.sqrt(area * ratio)
    height, width = (round(side / MULTIPLE) * MULTIPLE for side in (width / ratio, width))
    return height, width


def _picture_problems(settings: Settings, picture: Picture) -> Iterator[str]:
    """A picture too long for the language model, scaled; one that it takes has a short side for the transformer too."""
    short, long = sorted(_scaled_size(picture, settings.seen_area))
    if long > qwen2_5_vl_inputs.LONGEST * short:
        seen = f"as the model sees it {long} x {short}, more than {qwen2_5_vl_inputs.LONGEST} to 1"
        yield f"image: of {picture.height} x {picture.width}, {seen}: cut it"


def _shown(settings: Settings, eyes: qwen2_5_vl.Config, seen: tuple[np.ndarray, ...]) -> str:
    """What stands in the chat for images: as many tokens as they have features."""
    parts = []
    for number, grid in enumerate(_grids(eyes, seen), 1):
        tokens = IMAGE_TOKEN * (math.prod(grid) // eyes.merge**2)
        parts.append(SEEN.format(tokens) if settings.images else SEEN_NUMBERED.format(number, tokens))
    return "".join(parts)


def _grids(eyes: qwen2_5_vl.Config, seen: tuple[np.ndarray, ...]) -> qwen2_5_vl_inputs.Grids:
    """Frames, rows and columns of the patches of images."""
    sizes = (qwen2_5_vl_inputs.fitting_size(*image.shape[:2], side=eyes.patch * eyes.merge) for image in seen)
    return tuple((1, height // eyes.patch, width // eyes.patch) for height, width in sizes)


def check(declared: Mapping[str, Any], settings: Settings, request: Request) -> None:
    """Refuses what the pipeline cannot do, before any weight is there.

    Raises:
        InputError: everything that is wrong, with the nearest sizes that are right.
    """
    absent = needed(declared, settings)
    fail_if([f"{name}: missing" for name in absent], "qwen_image_pipeline: components are missing")
    model, vae, text = (declared[name].config for name in (TRANSFORMER, VAE, TEXT))
    pairs = [
        (TRANSFORMER, "in_channels", model.in_channels, VAE, "tokens", vae.latent_channels * PATCH**2),
        (TRANSFORMER, "out_channels", model.out_channels, VAE, "tokens", vae.latent_channels * PATCH**2),
        (TRANSFORMER, "text", model.text, TEXT, "embed", text.embed),
    ]
    if settings.images != 0:
        pairs.append((EYES, "out", declared[EYES].config.out, TEXT, "embed", text.embed))
    problems = [*image_pipeline.mismatches(pairs), *_number_problems(settings, len(request.references))]
    problems += image_pipeline.problems(declared, request, vae.space_factor, (TEXT,))
    problems += [
        f"{what}: tokens={int(count)} are not more than the {settings.left_out} of the chat that are left out: use the"
        " chat"
        for what, texts in (("prompt", request.texts), ("negative prompt", request.negative or {}))
        for text in texts.values()
        for count in text.mask.sum(1)
        if count <= settings.left_out
    ]
    problems += [f"{TRANSFORMER}: is one for layers: use another"] if model.layered or model.added_cond else []
    problems += ["guidance: this model is not told it: leave it out"] if request.told is not None else []
    if len(request.seen) != len(request.references):
        problems.append(f"image: {len(request.references)} are given, and {len(request.seen)} to be seen")
    fail_if(problems, "qwen_image_pipeline")


class Condition(NamedTuple):
    """What the transformer sees at each step: of each row states of the text, and which of them are not padding; tokens
    of the images to edit."""

    text: Float[Array, "rows seq width"]
    mask: Bool[Array, "rows seq"]
    references: Float[Array, "1 reference_seq channels"] | None = None


def encode(parts: Components, mesh: Mesh, settings: Settings, request: Request) -> Condition:
    """What the encoders make of the prompts, of the negative ones below them with guidance, and of images to edit."""
    text = request.rows(TEXT)
    seen = _seen(parts, mesh, request, text) if request.seen else {}
    states = jax.jit(decoder.encode(parts.declared[TEXT], mesh))(parts.live(TEXT), text.ids, text.mask, **seen)
    mask = jnp.asarray(text.mask[:, settings.left_out :])
    if not request.references:
        return Condition(states[:, settings.left_out :], mask)
    model, run = parts.live(VAE), jax.jit(reference_tokens(parts.declared[VAE], mesh))
    tokens = [run(model, images.as_values(image[None])) for image in request.references]
    return Condition(states[:, settings.left_out :], mask, jnp.concatenate(tokens, axis=1))


def _seen(parts: Components, mesh: Mesh, request: Request, text: Text) -> dict[str, Array | np.ndarray]:
    """What the language model is given of the images: their features, once for all rows, and where they belong.

    Tokens of an image have positions by row and column, as the model was trained; in diffusers 0.42 they have them with
    transformers 4 alone, as those of transformers 5 ask to be told which tokens are of images.
    """
    declared = parts.declared[EYES]
    eyes, grids = declared.config, _grids(declared.config, request.seen)
    fitted = [
        np.asarray(images.resized(image[None], rows * eyes.patch, columns * eyes.patch)[0])
        for image, (_, rows, columns) in zip(request.seen, grids, strict=True)
    ]
    options = {"patch": eyes.patch, "merge": eyes.merge, "frames": eyes.frames}
    pixels = np.concatenate([qwen2_5_vl_inputs.patches(image, **options)[0] for image in fitted])
    run = qwen2_5_vl.forward(declared, mesh)
    features = jax.jit(lambda model, pixels: run(model, pixels, grids=grids))(parts.live(EYES), pixels)
    token, each = request.image_token, [row[None] for row in text.ids]
    places = np.concatenate([qwen2_5_vl_inputs.places(row, token) for row in each])
    positions = qwen2_5_vl_inputs.positions(text.ids, grids * len(text.ids), token, merge=eyes.merge, mask=text.mask)
    return {"features": features, "places": places, "positions": positions}


def reference_tokens(declared: wan_vae.Autoencoder, mesh: Mesh) -> Callable[..., Float[Array, "batch seq channels"]]:
    """The pure function `f(model, pixels)`: the tokens of images from -1 to 1."""
    run = wan_vae.encode(declared, mesh)

    def f(
        model: wan_vae.Autoencoder, pixels: Float[Host, "batch 3 height width"]
    ) -> Float[Array, "batch seq channels"]:
        return image_vae.pack(run(model, pixels[:, :, None]).mean[:, :, 0].astype(jnp.float32))

    return f


def velocity(
    declared: qwen_image.QwenImage, mesh: Mesh, request: Request, grids: tuple[tuple[int, int], ...]
) -> Callable[..., Float[Array, "batch seq channels"]]:
    """The pure function `f(model, condition, sample, timestep)` of `flux_pipeline.velocity`.

    `grids` are rows and columns of the images' tokens, then those of the images to edit.
    """
    run = qwen_image.forward(declared, mesh)
    sizes = tuple((1, *grid) for grid in grids)

    def f(
        model: qwen_image.QwenImage,
        condition: Condition,
        sample: Float[Host, "batch seq channels"],
        timestep: Num[Host, ""],
    ) -> Float[Array, "batch seq channels"]:
        x = image_pipeline.with_references(sample, condition.references, request.ways)
        time = image_pipeline.times(len(x), timestep)
        out = run(model, x, condition.text, time, grids=sizes, text_mask=condition.mask)
        return image_pipeline.away(out[:, : sample.shape[1]], request, keep_norm=True)

    return f


def latent_shape(vae: wan_vae.Config, request: Request) -> tuple[int, int, int, int]:
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
    decode = wan_vae.decode(parts.declared[VAE], mesh)

    def run(model: wan_vae.Autoencoder, latents: Array) -> Array:
        return decode(model, latents[:, :, None])[:, :, 0]

    yield from image_pipeline.decoded(run, parts.live(VAE), mesh, latents)
