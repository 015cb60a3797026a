"""Wan's pipelines: from token ids and images to a video, by text encoder, image encoder, transformers and autoencoder.

Text to video and image to video of Wan2.1 (with the image encoder; first and last frame) and Wan2.2 (two experts, one
for high and one for low noise; TI2V, whose first latent frame may be given). Source: WanPipeline and
WanImageToVideoPipeline of diffusers 0.42 and `wan/` of the Wan repositories, which differ in what `Manner` says.

`sample` and `frames` run a whole pipeline, with the weights of one component at a time if need be; the functions they
jit are pure, and of use on their own. Meshes are as for the components: the pair of guidance is a batch of two, so
that `data=2` computes both halves at once.
"""

import dataclasses
import html
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Num, UInt8

from shardzoo.errors import InputError, fail_if, not_scales, not_whole
from shardzoo.strict_json import is_number
from shardzoo.zoo import clip_vision, images, sampling, t5, wan, wan_vae
from shardzoo.zoo.pipelines import Components, Manner, Tokenizer, Wanted, refuse_idle_negative
from shardzoo.zoo.wan_model import Context, Timesteps

Host = Array | np.ndarray
FIRST, SECOND = "transformer", "transformer_2"  # the transformer, or the expert for high noise; the one for low noise
POSITIONS = 1024  # that the models' tables of positions have each way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a pipeline is besides its components.

    Attributes:
        boundary: noise level from which on the first expert works and below which the second; None with one.
        per_token: the first frame is given as a clean latent, whose tokens have the timestep 0 (TI2V).
        solver: "unipc" or "euler".
        shift: of the noise levels.
        order: of UniPC.
        manner: "diffusers" or "original": whose noise levels and whose way with images for the image encoder.
    """

    boundary: float | None = None
    per_token: bool = False
    solver: str = "unipc"
    shift: float = 1.0
    order: int = 2
    manner: Manner = "diffusers"

    def sampler(self, steps: int) -> sampling.Sampler:
        if self.solver == "euler":
            return sampling.euler(steps, shift=self.shift)
        levels = sampling.wan_levels(steps) if self.manner == "original" else None
        return sampling.unipc(steps, shift=self.shift, order=self.order, levels=levels)


_SOLVERS = {"UniPCMultistepScheduler": "unipc", "FlowMatchEulerDiscreteScheduler": "euler"}
_NEEDED = {  # what is implemented of the schedulers, where their configs say it
    "unipc": {
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "predict_x0": True,
        "solver_type": "bh2",
        "lower_order_final": True,
        "disable_corrector": [],
        "final_sigmas_type": "zero",
        "thresholding": False,
    },
    "euler": {"stochastic_sampling": False, "invert_sigmas": False},
}
_NEITHER = ("use_dynamic_shifting", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "shift_terminal")


def read_settings(settings: Mapping[str, Any], manner: Manner) -> Settings:
    """The settings of a pipeline's config files: model_index.json and, in it at `scheduler`, the scheduler's.

    Raises:
        InputError: a scheduler, or an option of it, that is not implemented; all in one message.
    """
    config = settings.get("scheduler")
    name = config.get("_class_name") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(name, str) or name not in _SOLVERS:
        raise InputError(f"scheduler: {name!r} is not implemented: {' and '.join(_SOLVERS)} are")
    solver = _SOLVERS[name]
    needed = _NEEDED[solver] | {"num_train_timesteps": sampling.TRAIN_STEPS}
    wrong = [f"{n}={config[n]!r} is not, {v!r} is" for n, v in needed.items() if config.get(n, v) != v]
    wrong += [f"{n}={config[n]!r} is not" for n in _NEITHER if config.get(n)]
    order, named = config.get("solver_order", 2), "flow_shift" if solver == "unipc" else "shift"
    wrong += [] if type(order) is int and order in (1, 2, 3) else [f"solver_order={order!r} is not, 1, 2 and 3 are"]
    shift = config.get(named)
    real = shift is None or (is_number(shift) and shift > 0)
    wrong += [] if real else [f"{named}={shift!r} is not, a finite number above 0 is"]
    boundary = settings.get("boundary_ratio")
    real = boundary is None or (is_number(boundary) and 0 <= boundary <= 1)
    wrong += [] if real else [f"boundary_ratio={boundary!r} is not, a number from 0 to 1 is"]
    fail_if(wrong, f"scheduler: not all of what this {name} is set to is implemented")
    return Settings(
        boundary=boundary,
        per_token=bool(settings.get("expand_timesteps")),
        solver=solver,
        shift=1.0 if shift is None else float(shift),
        order=order,
        manner=manner,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One video.

    Attributes:
        ids, negative_ids: token ids of the prompt and of what guidance leads away from, end token included.
        frames, height, width: of the video.
        steps: of the sampler.
        guidance: scale of the guidance, for each expert one; 1 is none.
        image, last_image: frames [height, width, 3] that it starts and ends with.
    """

    ids: list[int]
    negative_ids: list[int]
    frames: int = 81
    height: int = 480
    width: int = 832
    steps: int = 50
    guidance: tuple[float, ...] = (5.0,)
    image: UInt8[np.ndarray, "height width 3"] | None = None
    last_image: UInt8[np.ndarray, "height width 3"] | None = None

    @property
    def images(self) -> list[np.ndarray]:
        return [image for image in (self.image, self.last_image) if image is not None]

    @property
    def guided(self) -> bool:
        return any(scale > 1 for scale in self.guidance)


def needed(declared: Mapping[str, Any], settings: Settings) -> list[str]:
    """The components that a pipeline of these settings cannot do without and that are not there."""
    names = ["text_encoder", FIRST, "vae"]
    names += [SECOND] if settings.boundary is not None else []
    image = FIRST in declared and declared[FIRST].config.image is not None
    names += ["image_encoder"] if image else []
    return [name for name in names if name not in declared]


def check(declared: Mapping[str, Any], settings: Settings, request: Request) -> None:
    """Refuses what the pipeline cannot do, before any weight is there.

    Raises:
        InputError: everything that is wrong, with the nearest sizes that are right.
    """
    absent = needed(declared, settings)
    fail_if([f"{name}: missing" for name in absent], "wan_pipeline: components are missing")
    problems = [*_part_problems(declared), *size_problems(declared, request)]
    problems += _image_problems(declared[FIRST].config, settings, request)
    problems += [*sampling.too_few_steps(request.steps), *_guidance_problems(settings, request.guidance)]
    vocab = declared["text_encoder"].config.vocab
    for name, ids in (("prompt", request.ids), ("negative prompt", request.negative_ids)):
        if not 1 <= len(ids) <= wan.TEXT_TOKENS:
            problems.append(f"{name}: tokens={len(ids)} are not 1 to {wan.TEXT_TOKENS}: shorten it")
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            problems.append(f"{name}: token {max(ids)} is not in vocab={vocab}: use the text encoder's own tokenizer")
    fail_if(problems, "wan_pipeline")


def _guidance_problems(settings: Settings, guidance: object) -> Iterator[str]:
    experts = 1 if settings.boundary is None else 2
    if not isinstance(guidance, tuple):
        yield f"guidance={guidance!r} is not a tuple: give a scale for each transformer, or one for all"
        return
    if len(guidance) not in (1, experts):
        yield f"guidance: {len(guidance)} scales for {experts} transformers: give one for each, or one"
    for scale in guidance:
        yield from not_scales(guidance=scale)


def run_parts(declared: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The components, all of each."""
    return dict(declared)


def frame_rate(settings: Settings) -> int:
    return 24 if settings.per_token else 16


def request(
    declared: Mapping[str, Any], settings: Settings, wanted: Wanted, tokenizer: Callable[[str], Tokenizer]
) -> Request:
    """The video that is wanted, images scaled and cut to its size.

    Raises:
        InputError: several prompts or images, a size that the pipeline does not make, or a negative prompt that
            nothing would lead away from.
    """
    problems = [] if len(wanted.prompts) == 1 else [f"{len(wanted.prompts)} prompts were given, and a video is of one"]
    problems += [f"{len(wanted.images)} images were given: give one to start with"] if len(wanted.images) > 1 else []
    problems += [] if wanted.true_guidance is None else ["true_guidance: this model does not take it: leave it out"]
    fail_if(problems, "generate")
    guidance = wanted.guidance or (5.0,)
    refuse_idle_negative(wanted, *guidance)
    encode = tokenizer("tokenizer").encode
    default = (704, 1280, 121) if settings.per_token else (480, 832, 81)
    asked = (wanted.height, wanted.width, wanted.frames)
    height, width, frames = (d if w is None else w for d, w in zip(default, asked, strict=True))
    made = Request(
        ids=encode(clean(wanted.prompts[0]), limit=wan.TEXT_TOKENS),
        negative_ids=encode(clean(wanted.negative or ""), limit=wan.TEXT_TOKENS),
        frames=frames,
        height=height,
        width=width,
        steps=50 if wanted.steps is None else wanted.steps,
        guidance=guidance,
    )
    pictures = {"image": wanted.images[0] if wanted.images else None, "last_image": wanted.last_image}
    given = {name: picture for name, picture in pictures.items() if picture is not None}
    if given:
        fail_if(list(size_problems(declared, made)), "generate")
    scaled: dict[str, Any] = {name: picture.covering(height, width) for name, picture in given.items()}
    return dataclasses.replace(made, **scaled)


def clean(prompt: str) -> str:
    """A prompt as the pipelines of Wan tidy it: HTML entities resolved, white space single."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(prompt))).strip()


def _part_problems(declared: Mapping[str, Any]) -> Iterator[str]:
    """Components that are not of one model: what one gives is not what the other takes."""
    latents = declared["vae"].config.latent_channels
    for name in (FIRST, SECOND):
        if name not in declared:
            continue
        model = declared[name].config
        pairs = [("out_channels", model.out_channels, "vae", "latent_channels", latents)]
        pairs += [("text", model.text, "text_encoder", "embed", declared["text_encoder"].config.embed)]
        if model.image is not None:
            pairs += [("image", model.image, "image_encoder", "embed", declared["image_encoder"].config.embed)]
        for dim, size, other, its, found in pairs:
            if size != found:
                yield f"{name}: {dim}={size} is not {other}'s {its}={found}: use components of one model"


def size_problems(declared: Mapping[str, Any], request: Request) -> Iterator[str]:
    """What is wrong with frames, height and width."""
    model, vae = declared[FIRST].config, declared["vae"].config
    time, sizes = vae.time_factor, {name: getattr(request, name) for name in ("frames", "height", "width")}
    if wrong := not_whole(**sizes):
        yield from wrong
        return
    longest = (POSITIONS * model.patch[0] - 1) * time + 1
    if request.frames < 1 or (request.frames - 1) % time:
        near = max(request.frames - 1, 0) // time * time + 1
        yield f"frames={request.frames} is not 1 + a multiple of {time}: use {near} or {near + time}"
    elif request.frames > longest:
        yield f"frames={request.frames} is more than the model has positions for: use at most {longest}"
    for name, patch in (("height", model.patch[1]), ("width", model.patch[2])):
        size, need = getattr(request, name), vae.space_factor * patch
        if size < need or size % need:
            near = max(size // need, 1) * need
            yield f"{name}={size} is not a multiple of {need}: use {near} or {near + need}"
        elif size > POSITIONS * need:
            yield f"{name}={size} is more than the model has positions for: use at most {POSITIONS * need}"


def _image_problems(model: wan.Config, settings: Settings, request: Request) -> Iterator[str]:
    conditioned = model.in_channels != model.out_channels
    if conditioned and request.image is None:
        yield "image: this model makes videos that start with an image: give one"
    if not conditioned and not settings.per_token and request.images:
        yield "image: this model makes videos of text alone: leave it out"
    last = request.last_image is not None
    if last and (request.image is None or (settings.per_token and not conditioned) or request.frames == 1):
        yield "last image: needs a model that takes one, a first image, and at least two frames: leave it out"
    elif conditioned and model.image is not None and last != (model.image_positions is not None):
        yield f"last image: this model is made for {'one' if model.image_positions else 'a first image alone'}"
    for image in request.images:
        if image.shape[:2] != (request.height, request.width):
            yield f"image: of {image.shape[0]} x {image.shape[1]}, not {request.height} x {request.width}: resize it"


def latent_shape(vae: wan_vae.Config, request: Request) -> tuple[int, int, int, int, int]:
    """Shape [batch, channels, frames, height, width] of the latents that noise becomes."""
    frames = 1 + (request.frames - 1) // vae.time_factor
    return 1, vae.latent_channels, frames, request.height // vae.space_factor, request.width // vae.space_factor


class Condition(NamedTuple):
    """What of given images a transformer sees at each step.

    Attributes:
        channels: beside the sample's: which frames are given, four to a latent frame, then the latents of a video that
            holds them and is grey elsewhere.
        first: the clean latents of the first frame, in place of the sample's.
    """

    channels: Float[Array, "batch channels frames height width"] | None = None
    first: Float[Array, "batch latent_channels 1 height width"] | None = None


def condition(
    declared: wan_vae.Autoencoder, mesh: Mesh, settings: Settings, frames: int
) -> Callable[[wan_vae.Autoencoder, Float[Host, "images channels height width"]], Condition]:
    """The pure function `f(model, images)`: what the transformers see of a first image, or of a first and a last one.

    Images are from -1 to 1; `frames` is the length of the video.

    Raises:
        InputError: the mesh does not fit the declaration.
    """
    encode = wan_vae.encode(declared, mesh)
    factor = declared.config.time_factor

    def f(model: wan_vae.Autoencoder, given: Float[Host, "images channels height width"]) -> Condition:
        video = jnp.asarray(given, jnp.float32).transpose(1, 0, 2, 3)[None]
        if settings.per_token:
            return Condition(first=encode(model, video[:, :, :1]).mean.astype(jnp.float32))
        count = video.shape[2]
        grey = jnp.zeros((*video.shape[:2], frames - count, *video.shape[3:]), jnp.float32)
        latents = encode(model, jnp.concatenate([video[:, :, :1], grey, video[:, :, 1:]], axis=2)).mean
        known = np.zeros(factor - 1 + frames, np.float32)  # the first frame counts `factor` times
        known[:factor] = 1
        if count > 1:
            known[-1] = 1
        mask = jnp.asarray(known.reshape(-1, factor).T)[None, :, :, None, None]
        mask = jnp.broadcast_to(mask, (1, *mask.shape[1:3], *latents.shape[3:]))
        return Condition(channels=jnp.concatenate([mask, latents.astype(jnp.float32)], axis=1))

    return f


def velocity(
    declared: wan.Wan, mesh: Mesh, *, guided: bool
) -> Callable[..., Float[Array, "batch channels frames height width"]]:
    """The pure function `f(model, context, condition, scale, sample, timestep)`: a transformer's velocity of a sample.

    With guidance the context is of twice the batch, the wanted rows before the unwanted ones; both halves are computed
    in one batch, and combined in float32.

    Raises:
        InputError: the mesh does not fit the declaration.
    """
    run = wan.forward(declared, mesh)
    rows, columns = declared.config.patch[1:]

    def f(
        model: wan.Wan,
        context: Context,
        condition: Condition,
        scale: float | Num[Host, ""],
        sample: Float[Host, "batch channels frames height width"],
        timestep: Num[Host, ""],
    ) -> Float[Array, "batch channels frames height width"]:
        ways = 2 if guided else 1
        x, batch = jnp.asarray(sample), ways * sample.shape[0]
        times: Any = jnp.full(batch, timestep)
        if condition.first is not None:
            x = with_first(condition, x)
            _, _, frames, height, width = x.shape
            each = (height // rows) * (width // columns)
            index = (jnp.arange(frames * each) >= each).astype(jnp.int32)
            values = jnp.stack([jnp.zeros_like(times), times], axis=1)
            times = Timesteps(values, jnp.broadcast_to(index, (batch, frames * each)))
        if condition.channels is not None:
            x = jnp.concatenate([x, condition.channels.astype(x.dtype)], axis=1)
        out = run(model, jnp.concatenate([x] * ways), times, context=context)
        if not guided:
            return out
        wanted, unwanted = jnp.split(out, 2)
        return unwanted + scale * (wanted - unwanted)

    return f


def with_first(
    condition: Condition, sample: Float[Host, "batch channels frames height width"]
) -> Float[Array, "batch channels frames height width"]:
    """The sample with the given first latent frame, if there is one."""
    if condition.first is None:
        return sample
    return jnp.concatenate([condition.first.astype(sample.dtype), sample[:, :, 1:]], axis=2)


def _text(parts: Components, mesh: Mesh, request: Request) -> Float[Array, "rows seq embed"]:
    """States of the prompt and, with guidance, of the negative one below it, as the transformers take them."""
    rows = [request.ids, request.negative_ids][: 2 if request.guided else 1]
    ids = np.zeros((len(rows), wan.TEXT_TOKENS), np.int32)
    for row, given in zip(ids, rows, strict=True):
        row[: len(given)] = given
    lengths = np.array([len(row) for row in rows], np.int32)
    run = jax.jit(t5.forward(parts.declared["text_encoder"], mesh, zero_padded_to=wan.TEXT_TOKENS))
    return run(parts.live("text_encoder"), ids, lengths=lengths)


def _image(
    parts: Components, mesh: Mesh, settings: Settings, request: Request, rows: int
) -> Float[Array, "rows seq embed"] | None:
    """States of the given images, one after another, for each row of the text."""
    if parts.declared[FIRST].config.image is None:
        return None
    declared = parts.declared["image_encoder"]
    pixels, size = np.stack(request.images), declared.config.image
    if settings.manner == "original":
        squares = images.stretched(images.as_values(pixels), size)
    else:
        squares = images.cropped(pixels, size)
    states = jax.jit(clip_vision.forward(declared, mesh))(parts.live("image_encoder"), squares)
    return jnp.concatenate([states.reshape(1, -1, states.shape[-1])] * rows)


def _condition(parts: Components, mesh: Mesh, settings: Settings, request: Request) -> Condition:
    if not request.images:
        return Condition()
    run = jax.jit(condition(parts.declared["vae"], mesh, settings, request.frames))
    return run(parts.live("vae"), images.as_values(np.stack(request.images)))


def _experts(settings: Settings, sampler: sampling.Sampler, request: Request) -> list[tuple[str, range, float]]:
    """Each transformer that works, the steps it takes, and the scale of its guidance."""
    steps = range(request.steps)
    high = request.steps if settings.boundary is None else sampling.high_noise_steps(sampler, settings.boundary)
    phases = [(FIRST, steps[:high], request.guidance[0]), (SECOND, steps[high:], request.guidance[-1])]
    return [phase for phase in phases if phase[1]]


def sample(
    parts: Components,
    mesh: Mesh,
    settings: Settings,
    request: Request,
    *,
    key: Array | None = None,
    noise: Float[Host, "batch channels frames height width"] | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Float[Array, "batch channels frames height width"]:
    """The latents of a video: prompt and images encoded once, then every step.

    Args:
        parts, mesh, settings: the pipeline.
        request: the video.
        key: of the noise, where that is not given.
        noise: to start from, of shape `latent_shape`.
        on_step: told after each step how many are done, and how many there are.

    Raises:
        InputError: what `check` refuses; the mesh does not fit a component; noise of another shape.
    """
    check(parts.declared, settings, request)
    shape = latent_shape(parts.declared["vae"].config, request)
    if noise is None:
        noise = jax.random.normal(jax.random.key(0) if key is None else key, shape, jnp.float32)
    elif noise.shape != shape:
        raise InputError(f"wan_pipeline: noise has shape {list(noise.shape)}, the latents {list(shape)}: change it")
    text = _text(parts, mesh, request)
    image = _image(parts, mesh, settings, request, text.shape[0])
    given = _condition(parts, mesh, settings, request)
    sampler = settings.sampler(request.steps)
    x, state = jnp.asarray(noise), sampler.init(noise)
    for name, steps, scale in _experts(settings, sampler, request):
        declared, model = parts.declared[name], parts.live(name)
        context = jax.jit(wan.context(declared, mesh))(model, text, image)
        run = velocity(declared, mesh, guided=request.guided)
        first, stop = steps.start, steps.stop
        inputs = (model, context, given, scale)
        state, x = sampling.run_stepwise(sampler, run, inputs, x, state, first=first, stop=stop, on_step=on_step)
        del model, inputs
    return with_first(given, x)


def frames(
    parts: Components, mesh: Mesh, latents: Float[Host, "batch channels frames height width"]
) -> Iterator[UInt8[np.ndarray, "frames height width channels"]]:
    """The frames of one video, a few at a time, as bytes."""
    stream = wan_vae.decode_stream(parts.declared["vae"], mesh)
    for piece in stream.run(parts.live("vae"), stream.cut(jnp.asarray(latents))):
        yield images.as_bytes(piece[0].transpose(1, 0, 2, 3))
