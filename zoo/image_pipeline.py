"""What the pipelines of images share: settings and requests, texts as rows, guidance, and every step.

Sources: the pipelines of FLUX.1, FLUX.2 and Qwen-Image in diffusers 0.42, which have these parts in common.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num, UInt8, jaxtyped

from shardzoo.errors import InputError, fail_if, not_scales, not_whole
from shardzoo.strict_json import is_number
from shardzoo.zoo import images, sampling
from shardzoo.zoo.image_vae import pack, unpack
from shardzoo.zoo.mesh import DATA
from shardzoo.zoo.pipelines import Components, Wanted

Host = Array | np.ndarray
PATCH = 2  # latents of a token's side
DEFAULT_SIDE = 128  # latents of an image's side
CHANNELS = 3
LONGEST_SIDE = 16384  # pixels; far beyond what any of the models was made for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a pipeline is besides its components.

    Attributes:
        shift: of the noise levels; None where it depends on the number of tokens.
        line: numbers of tokens, and the shift exponents there, of the line between which the exponent lies.
        curve: what the exponent does to the levels.
        last: level of the last step, or None where the shift decides it.
    """

    shift: float | None = None
    line: tuple[int, int, float, float] = (256, 4096, 0.5, 1.15)
    curve: sampling.Curve = "exponential"
    last: float | None = None

    def mu(self, tokens: int, steps: int) -> float:
        """The shift exponent of an image of this many tokens: on the line."""
        few, many, low, high = self.line
        return sampling.image_mu(tokens, base_tokens=few, max_tokens=many, base_shift=low, max_shift=high)

    def sampler(self, tokens: int, steps: int) -> sampling.Euler:
        """The sampler of an image of this many tokens."""
        levels = sampling.image_levels(steps)
        if self.shift is not None:
            return sampling.euler(steps, shift=self.shift, last=self.last, levels=levels)
        return sampling.euler(steps, mu=self.mu(tokens, steps), curve=self.curve, last=self.last, levels=levels)


_SCHEDULER = "FlowMatchEulerDiscreteScheduler"
_NEEDED = {"num_train_timesteps": sampling.TRAIN_STEPS, "stochastic_sampling": False, "invert_sigmas": False}
_NEITHER = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_NUMBERS = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}


def read_settings(settings: Mapping[str, Any]) -> Settings:
    """The settings of a pipeline's config files: model_index.json and, in it at `scheduler`, the scheduler's.

    Raises:
        InputError: a scheduler, or an option of it, that is not implemented; all in one message.
    """
    config = settings.get("scheduler")
    name = config.get("_class_name") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or name != _SCHEDULER:
        raise InputError(f"scheduler: {name!r} is not implemented: {_SCHEDULER} is")
    wrong = [f"{n}={config[n]!r} is not, {v!r} is" for n, v in _NEEDED.items() if config.get(n, v) != v]
    wrong += [f"{n}={config[n]!r} is not" for n in _NEITHER if config.get(n)]
    curve = config.get("time_shift_type", "exponential")
    wrong += [] if curve in ("exponential", "linear") else [f"time_shift_type={curve!r} is not"]
    numbers = {n: config.get(n, v) for n, v in (_NUMBERS | {"shift": 1.0}).items()}
    last = config.get("shift_terminal")
    wrong += [f"{n}={v!r} is not, a finite number is" for n, v in numbers.items() if not is_number(v)]
    wrong += [] if last is None or (is_number(last) and 0 <= last < 1) else [f"shift_terminal={last!r} is not"]
    wrong += [] if not is_number(numbers["shift"]) or numbers["shift"] > 0 else ["shift of 0 or less is not"]
    if config.get("use_dynamic_shifting") and all(map(is_number, numbers.values())):
        wrong += _line_problems(numbers)
    fail_if(wrong, f"scheduler: not all of what this {name} is set to is implemented")
    few, many, low, high = (numbers[n] for n in _NUMBERS)
    return Settings(
        shift=None if config.get("use_dynamic_shifting") else float(numbers["shift"]),
        line=(int(few), int(many), float(low), float(high)),
        curve=curve,
        last=float(last) if last else None,
    )


def _line_problems(numbers: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the ends of the line that the shift depends on."""
    few, many = (numbers[name] for name in ("base_image_seq_len", "max_image_seq_len"))
    said = f"base_image_seq_len={few!r} and max_image_seq_len={many!r}"
    if few != int(few) or many != int(many):
        yield f"{said} are not, whole numbers are"
    elif few == many:
        yield f"{said} are not, two different numbers are"


class Text(NamedTuple):
    """Token ids of a batch of texts, and which of them are not padding."""

    ids: Int[np.ndarray, "batch seq"]
    mask: Bool[np.ndarray, "batch seq"]


Texts = Mapping[str, Text]  # text encoder -> what it reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Images of one size, as many as the texts have rows.

    Attributes:
        texts: the prompts, for each text encoder.
        negative: what guidance leads away from, row by row; None without guidance.
        height, width: in pixels.
        steps: of the sampler.
        told: scale of the guidance that the model itself is told.
        scale: of the guidance away from `negative`; 1 is none.
        references: images that the model sees besides, for all rows.
    """

    texts: Texts
    negative: Texts | None = None
    height: int = 1024
    width: int = 1024
    steps: int = 28
    told: float | None = None
    scale: float = 1.0
    references: tuple[UInt8[np.ndarray, "_ _ 3"], ...] = ()

    @property
    def batch(self) -> int:
        return next(iter(self.texts.values())).ids.shape[0]

    @property
    def guided(self) -> bool:
        return self.negative is not None and self.scale > 1

    @property
    def ways(self) -> int:
        """How many rows the model computes for an image."""
        return 2 if self.guided else 1

    def rows(self, encoder: str) -> Text:
        """What an encoder reads: the prompts and, with guidance, the negative ones below them, on the right padded."""
        texts = [self.texts[encoder]]
        texts += [self.negative[encoder]] if self.guided and self.negative is not None else []
        length = max(text.ids.shape[1] for text in texts)
        grown = [[np.pad(x, ((0, 0), (0, length - x.shape[1]))) for x in text] for text in texts]
        return Text(*(np.concatenate(part) for part in zip(*grown, strict=True)))


def padded(rows: Sequence[list[int]], pad: int, left: bool = False, *, length: int | None = None) -> Text:
    """Rows of ids filled up to a length, or to the longest of them, on the right or on the left."""
    length = max(map(len, rows)) if length is None else length
    ids = np.full((len(rows), length), pad, np.int32)
    mask = np.zeros(ids.shape, bool)
    for i, row in enumerate(rows):
        at = slice(length - len(row), length) if left else slice(0, len(row))
        ids[i, at], mask[i, at] = row, True
    return Text(ids, mask)


ALWAYS = frozenset({"prompts", "height", "width", "steps"})
OPTIONS = {"images": "image"}  # what users know a field by, where it is called something else


def refuse_unknown(wanted: Wanted, **takes: bool) -> None:
    """Refuses what was asked for and the model does not do; `takes` says what it does besides the usual.

    Raises:
        InputError: everything that it does not, by name.
    """
    problems = [] if wanted.prompts else ["prompts: none was given: give one for each image"]
    for field in dataclasses.fields(wanted):
        given = getattr(wanted, field.name)
        if _is_given(given) and field.name not in ALWAYS and not takes.get(field.name):
            problems.append(f"{OPTIONS.get(field.name, field.name)}: this model does not take it: leave it out")
    if wanted.guidance is not None and len(wanted.guidance) > 1:
        problems.append(f"guidance: {len(wanted.guidance)} scales for one transformer: give one")
    fail_if(problems, "generate")


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, tuple | list) and not value)


def sides(wanted: Wanted, space_factor: int, references: Sequence[np.ndarray] = ()) -> dict[str, int]:
    """Height and width of what is wanted: of the first reference image, if nothing is said."""
    side = DEFAULT_SIDE * space_factor
    height, width = references[0].shape[:2] if references else (side, side)
    return {
        "height": height if wanted.height is None else wanted.height,
        "width": width if wanted.width is None else wanted.width,
    }


def problems(
    declared: Mapping[str, Any], request: Request, space_factor: int, encoders: Sequence[str]
) -> Iterator[str]:
    """What is wrong with a request, whatever the model, whose texts are read by these encoders."""
    yield from size_problems(request.height, request.width, space_factor)
    yield from sampling.too_few_steps(request.steps)
    scales = {"guidance": request.told, "scale of the guidance": request.scale}
    wrong = not_scales(**{name: scale for name, scale in scales.items() if scale is not None})
    yield from wrong
    if not wrong and (request.negative is not None) != (request.scale > 1):
        given = "one" if request.negative is not None else "none"
        yield f"negative prompt: {given} is given at a scale of the guidance of {request.scale:g}: change one of them"
    yield from _text_problems(declared, request, encoders)
    for image in request.references:
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != CHANNELS:
            yield f"image: is {image.dtype.name}{list(image.shape)}: give bytes [height, width, {CHANNELS}]"
        elif any(side < 1 or side % (PATCH * space_factor) for side in image.shape[:2]):
            yield f"image: of {image.shape[0]} x {image.shape[1]}, not multiples of {PATCH * space_factor}: resize it"


def _text_problems(declared: Mapping[str, Any], request: Request, encoders: Sequence[str]) -> Iterator[str]:
    for what, texts in (("prompt", request.texts), ("negative prompt", request.negative)):
        if texts is None:
            continue
        if {*texts} != {*encoders}:
            yield f"{what}: given for {', '.join(texts) or 'nothing'}, and {', '.join(encoders)} read it: change that"
            return
        for name, text in texts.items():
            vocab = declared[name].config.vocab
            if text.ids.ndim != 2 or text.mask.shape != text.ids.shape:
                yield f"{what}: ids of shape {text.ids.shape} and a mask of {text.mask.shape} for {name}: give rows"
            elif not len(text.ids):
                yield f"{what}: there is none for {name}: give one for each image"
            elif not text.ids.size or not 0 <= text.ids.min() <= text.ids.max() < vocab:
                yield f"{what}: not all of its tokens are in vocab={vocab} of {name}: use the encoder's own tokenizer"
            elif len(text.ids) != request.batch:
                yield f"{what}: {len(text.ids)} texts of {name} for {request.batch} images: give one for each"


def size_problems(height: Any, width: Any, space_factor: int) -> Iterator[str]:
    """What is wrong with the sides of an image, numbers or not."""
    need = PATCH * space_factor
    for name, size in (("height", height), ("width", width)):
        if wrong := not_whole(**{name: size}):
            yield from wrong
        elif size < need or size % need:
            near = max(size // need, 1) * need
            yield f"{name}={size} is not a multiple of {need}: use {near} or {near + need}"
        elif size > LONGEST_SIDE:
            yield f"{name}={size} is more than images are made of: use at most {LONGEST_SIDE // need * need}"


def mismatches(pairs: Sequence[tuple[str, str, int, str, str, int]]) -> Iterator[str]:
    """Components that are not of one model: (component, dim, size, other component, its dim, size) that differ."""
    for name, dim, size, other, its, found in pairs:
        if size != found:
            yield f"{name}: {dim}={size} is not {other}'s {its}={found}: use components of one model"


def one_scale(wanted: Wanted, default: float) -> float:
    """The scale of the guidance."""
    return wanted.guidance[0] if wanted.guidance else default


def missing(declared: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in declared]


def latent_shape(channels: int, space_factor: int, request: Request) -> tuple[int, int, int, int]:
    """Shape [batch, channels, height, width] of the latents that noise becomes."""
    return request.batch, channels, request.height // space_factor, request.width // space_factor


def grids(shape: tuple[int, ...], request: Request) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the tokens of latents of this shape, then of each reference image."""
    rows, columns = shape[2] // PATCH, shape[3] // PATCH
    pixels = request.height // rows  # of a token's side
    return (rows, columns), *((image.shape[0] // pixels, image.shape[1] // pixels) for image in request.references)


@jaxtyped(typechecker=beartype)
def starting_noise(
    shape: tuple[SupportsIndex, ...], key: Host | None, noise: Float[Host, "batch channels height width"] | None
) -> Float[Array, "batch channels height width"]:
    """The noise given, or drawn by a key.

    Raises:
        InputError: noise of another shape.
    """
    if noise is None:
        return jax.random.normal(jax.random.key(0) if key is None else key, shape, jnp.float32)
    if noise.shape != shape:
        raise InputError(f"pipeline: noise has shape {list(noise.shape)}, the latents {list(shape)}: change it")
    return jnp.asarray(noise)


def with_references(
    sample: Float[Host, "batch seq channels"], references: Float[Array, "one reference_seq channels"] | None, ways: int
) -> Float[Array, "rows all_seq channels"]:
    """What the transformer sees: a sample, for both ways of guidance, with the tokens of reference images behind it."""
    x = jnp.concatenate([jnp.asarray(sample)] * ways)
    if references is None:
        return x
    return jnp.concatenate([x, jnp.broadcast_to(references, (len(x), *references.shape[1:]))], axis=1)


def times(rows: int, timestep: Num[Host, ""]) -> Float[Array, " rows"]:
    """A timestep of 0 to 1,000 for each row, as models take it that count to 1."""
    return jnp.full(rows, timestep, jnp.float32) / sampling.TRAIN_STEPS


def away(
    out: Float[Array, "rows seq channels"], request: Request, *, keep_norm: bool = False
) -> Float[Array, "batch seq channels"]:
    """The velocity u + scale * (w - u) of a batch whose first half is wanted and second half is not.

    Args:
        out: of twice the batch, or of the batch where there is no guidance.
        request: its guidance.
        keep_norm: scale each token back to the norm of the wanted one.
    """
    if not request.guided:
        return out
    wanted, unwanted = jnp.split(out.astype(jnp.float32), 2)
    found = unwanted + request.scale * (wanted - unwanted)
    if not keep_norm:
        return found
    norm, other = (jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (wanted, found))
    return found * (norm / other)


def told_rows(mesh: Mesh, rows: int) -> NamedSharding:
    """How what the transformer is told lies: as each step takes it, so that it is gathered once."""
    return NamedSharding(mesh, PartitionSpec() if rows % mesh.shape[DATA] else PartitionSpec(DATA))


def steps_taken(
    parts: Components,
    transformer: str,
    sampler: sampling.Euler,
    velocity: Callable[..., Array],
    condition: Any,
    noise: Float[Array, "batch channels height width"],
    on_step: Callable[[int, int], None] | None,
) -> Float[Array, "batch channels height width"]:
    """What noise becomes by every step; `velocity` is `f(model, condition, sample, timestep)` of tokens."""
    given = (parts.live(transformer), condition)
    _, x = sampling.run_stepwise(sampler, velocity, given, pack(noise), on_step=on_step)
    return unpack(x, *noise.shape[2:])


def decoded(
    run: Callable[[Any, Array], Array], model: Any, mesh: Mesh, latents: Float[Host, "batch channels height width"]
) -> Iterator[UInt8[np.ndarray, "images height width channels"]]:
    """Images as bytes, as many at a time as the mesh splits a batch into."""
    count, run = mesh.shape[DATA], jax.jit(run)
    for start in range(0, latents.shape[0], count):
        yield images.as_bytes(run(model, jnp.asarray(latents[start : start + count])))
