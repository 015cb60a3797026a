"""Pipelines by kind: what they are made of, what a user asks of them, and the functions that each kind offers.

To add a kind: write a module with the functions of `Kind`, name it in `MODULES` and the families of its components in
`FAMILIES` here, and name the classes of diffusers that it runs in `convert/pipeline_source.py`. The command line asks
for nothing else.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, UInt8

from shardzoo.errors import InputError, fail_if

Manner = Literal["diffusers", "original"]
MODULES = {
    "flux": "flux_pipeline",
    "flux2": "flux2_pipeline",
    "qwen-image": "qwen_image_pipeline",
    "wan": "wan_pipeline",
}
FAMILIES: Mapping[str, Mapping[str, str]] = {  # kind -> component -> the family that it must be of
    "flux": {"text_encoder": "clip-text", "text_encoder_2": "t5", "transformer": "flux", "vae": "image-vae"},
    "flux2": {"text_encoder": "decoder", "transformer": "flux2", "vae": "image-vae"},
    "qwen-image": {
        "text_encoder": "decoder",
        "image_encoder": "qwen2.5-vl-vision",
        "transformer": "qwen-image",
        "vae": "wan-vae",
    },
    "wan": {
        "text_encoder": "t5",
        "image_encoder": "clip-vision",
        "transformer": "wan",
        "transformer_2": "wan",
        "vae": "wan-vae",
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Components:
    """The components of a pipeline by name ("text_encoder", "transformer", "vae", ...).

    Attributes:
        declared: each as declared, with the dtypes it runs in.
        live: name -> live module. Called each time that one is needed and let go of afterwards, so that a function that
            restores it from a checkpoint keeps only one of them on the devices.
    """

    declared: Mapping[str, Any]
    live: Callable[[str], Any]


@runtime_checkable
class Picture(Protocol):
    """A picture that a user gave, of any size."""

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    def stretched(self, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
        """The whole of it at this size."""
        ...

    def covering(self, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
        """Scaled until it covers this size, and the middle cut out."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer of the pipeline's folder."""

    def padding(self) -> tuple[int, bool]:
        """The token that fills up rows, and whether it does so before the text."""
        ...

    def encode(self, text: str, *, limit: int, special: bool = True) -> list[int]:
        """Ids of a text, at most `limit`, with the special tokens that the tokenizer puts round it if `special`."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A chat as text, by the chat template."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a user asks for; None is what the pipeline does of its own accord.

    Attributes:
        prompts: a video is made of one; of several, one image of each.
        negative: what guidance leads away from.
        images: what is to be edited, or what a video starts with.
        last_image: what a video ends with.
        height, width, frames: of the result.
        steps: of the sampler.
        guidance: scales of the guidance.
        true_guidance: scale of the guidance away from `negative`, for models that are told `guidance`.

    Raises:
        InputError: one where several are meant, or what is of another kind.
    """

    prompts: tuple[str, ...]
    negative: str | None = None
    images: tuple[Picture, ...] = ()
    last_image: Picture | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    guidance: tuple[float, ...] | None = None
    true_guidance: float | None = None

    def __post_init__(self) -> None:
        pictures = [*self.images] if isinstance(self.images, Sequence) else [self.images]
        pictures += [] if self.last_image is None else [self.last_image]
        problems = [
            f"image: a {type(picture).__name__} is no picture: give it as a `cli.media.Picture`"
            for picture in pictures
            if not isinstance(picture, Picture)
        ]
        if isinstance(self.prompts, str) or not all(isinstance(prompt, str) for prompt in self.prompts):
            problems.append(f"prompts={self.prompts!r} are not a tuple of texts: give one text for each image")
        if self.negative is not None and not isinstance(self.negative, str):
            problems.append(f"negative={self.negative!r} is not a text: give one for all images")
        if self.guidance is not None and not isinstance(self.guidance, Sequence):
            problems.append(f"guidance={self.guidance!r} is not a tuple of scales: give one for each transformer")
        fail_if(problems, "generate")
        for name in ("height", "width", "frames", "steps"):
            if isinstance(getattr(self, name), np.integer):
                object.__setattr__(self, name, int(getattr(self, name)))


@runtime_checkable
class Kind(Protocol):
    """What the module of a kind offers; settings and requests are dataclasses of its own.

    Settings have `shift`, of the noise levels; requests have `height`, `width` and `steps`.
    """

    def read_settings(self, settings: Mapping[str, Any], manner: Manner) -> Any:
        """The settings that the pipeline's config files say."""
        ...

    def needed(self, declared: Mapping[str, Any], settings: Any) -> list[str]:
        """The components that it cannot do without and that are not there."""
        ...

    def run_parts(self, declared: Mapping[str, Any], settings: Any) -> dict[str, Any]:
        """The components as far as they are run: what need not be restored is left out."""
        ...

    def frame_rate(self, settings: Any) -> int | None:
        """Frames a second of its videos; None where it makes images."""
        ...

    def request(
        self, declared: Mapping[str, Any], settings: Any, wanted: Wanted, tokenizer: Callable[[str], Tokenizer]
    ) -> Any:
        """The request for what is wanted; tokenizers by the name of their folder."""
        ...

    def check(self, declared: Mapping[str, Any], settings: Any, request: Any) -> None:
        """Refuses what it cannot do."""
        ...

    def sample(
        self,
        parts: Components,
        mesh: Mesh,
        settings: Any,
        request: Any,
        *,
        key: Array | None = None,
        on_step: Callable[[int, int], None] | None = None,
    ) -> Array:
        """The latents of the result."""
        ...

    def frames(
        self, parts: Components, mesh: Mesh, latents: Array
    ) -> Iterator[UInt8[np.ndarray, "frames height width channels"]]:
        """Frames or images, a few at a time."""
        ...


def refuse_idle_negative(wanted: Wanted, *scales: float) -> None:
    """Refuses a negative prompt that no guidance would lead away from.

    Raises:
        InputError: there is one, and all scales are 1 or less.
    """
    if wanted.negative is not None and all(scale <= 1 for scale in scales):
        said = ", ".join(f"{scale:g}" for scale in scales)
        raise InputError(f"generate: negative does nothing at guidance={said}: give a scale above 1, or leave it out")


def family_problems(kind: str, families: Mapping[str, str]) -> list[str]:
    """Components that are not of the family that a pipeline of this kind needs; `families` is component -> family."""
    return [
        f"{name}: is of family {families[name]}, and a {kind} pipeline needs {wanted}: use one of that"
        for name, wanted in FAMILIES.get(kind, {}).items()
        if families.get(name, wanted) != wanted
    ]


def find_kind(name: str) -> Kind:
    """The module of a kind.

    Raises:
        InputError: there is none.
    """
    if name not in MODULES:
        raise InputError(f"pipeline kind={name!r} is not in this zoo: there are {', '.join(sorted(MODULES))}")
    module: Any = importlib.import_module(f"{__package__}.{MODULES[name]}")
    return module
