"""Generating a video from a pipeline's folder: what the options mean, and one component at a time on the devices."""

import dataclasses
import html
import re
import time
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import numpy as np

from shardzoo import checkpoints
from shardzoo.checkpoints.pipeline import Pipeline
from shardzoo.cli import chat, media
from shardzoo.cli.devices import start_mesh
from shardzoo.errors import InputError, fail_if
from shardzoo.progress import Progress
from shardzoo.strict_json import parse_object
from shardzoo.zoo import layout, wan, wan_pipeline
from shardzoo.zoo.mesh import Degrees
from shardzoo.zoo.wan_pipeline import Components, Request, Settings

VAE = "vae"  # keeps the dtype it is stored in: it is small, and bfloat16 shows


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """What was asked for; None where it was left to the pipeline."""

    negative: str
    image: Path | None
    last_image: Path | None
    height: int | None
    width: int | None
    frames: int | None
    steps: int
    guidance: tuple[float, ...]
    shift: float | None
    fps: int | None
    seed: int
    out: Path
    overwrite: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """A video that was written, and the seconds of each part of the work."""

    out: str
    frames: int
    height: int
    width: int
    mesh: str
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def generate(
    pipeline: Pipeline,
    prompt: str,
    options: VideoOptions,
    *,
    dtype: np.dtype | None,
    degrees: Degrees,
    offload: bool,
    on_step: Progress | None,
) -> Made:
    """Makes a video and writes it.

    Raises:
        InputError: whatever is wrong with the pipeline, the options or the mesh, before a weight is read.
    """
    if pipeline.kind != "wan":
        raise InputError(f"{pipeline.path}: generate runs pipelines of kind 'wan', and this is {pipeline.kind!r}")
    settings = _settings(pipeline, options)
    parts = _parts(pipeline, settings, dtype, offload)
    request = _request(pipeline, parts, settings, prompt, options)
    media.check_output(options.out, overwrite=options.overwrite)
    wan_pipeline.check(parts, settings, request)
    _check_mesh(parts, degrees)
    mesh = start_mesh(layout.with_kv(parts[wan_pipeline.FIRST], degrees))
    told = _Told(on_step, request.steps)

    def live(name: str) -> Any:
        told.say(f"restoring {name}")
        found = pipeline.checkpoint(name)
        return checkpoints.restore(found, mesh, declared=parts[name], dtype=None if name == VAE else dtype)

    components = Components(declared=parts, live=live)
    begin = time.monotonic()
    key = jax.random.key(options.seed)
    latents = wan_pipeline.sample(components, mesh, settings, request, key=key, on_step=told.step)
    jax.block_until_ready(latents)
    sampled = time.monotonic()
    frames = wan_pipeline.frames(components, mesh, latents)
    count = media.write_frames(options.out, frames, options.fps or (24 if settings.per_token else 16))
    return Made(
        out=str(options.out),
        frames=count,
        height=request.height,
        width=request.width,
        mesh=str(degrees),
        seconds={"sample": sampled - begin, "decode": time.monotonic() - sampled},
    )


class _Told:
    """Passes on how many steps are done, and what is under way."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total, self._done = progress, total, 0

    def step(self, done: int, total: int) -> None:
        self._done = done
        self.say("sampling")

    def say(self, what: str) -> None:
        if self._progress:
            self._progress(self._done, self._total, what)


def _settings(pipeline: Pipeline, options: VideoOptions) -> Settings:
    found = wan_pipeline.read_settings(pipeline.settings, "original" if pipeline.layout == "original" else "diffusers")
    if options.shift is not None and not 0 < options.shift < float("inf"):
        raise InputError(f"generate: shift={options.shift} is not above 0 and finite: change it")
    return found if options.shift is None else dataclasses.replace(found, shift=options.shift)


def _parts(pipeline: Pipeline, settings: Settings, dtype: np.dtype | None, offload: bool) -> dict[str, Any]:
    """The declared components, in the dtypes that they will run in and where they will lie."""
    if dtype is not None and dtype.itemsize < 2:
        raise InputError(f"generate: dtype={dtype.name} is for storage: run in float32, bfloat16 or float16")
    declared = {name: pipeline.checkpoint(name).declared for name in pipeline.components}
    pipeline.require(wan_pipeline.needed(declared, settings))
    typed = {n: one if dtype is None or n == VAE else layout.astype(one, dtype) for n, one in declared.items()}
    return {n: layout.keep_on_host(one) if offload else one for n, one in typed.items()}


def _request(
    pipeline: Pipeline, parts: dict[str, Any], settings: Settings, prompt: str, options: VideoOptions
) -> Request:
    default = (704, 1280, 121) if settings.per_token else (480, 832, 81)
    wanted = (options.height, options.width, options.frames)
    height, width, frames = (d if w is None else w for d, w in zip(default, wanted, strict=True))
    tokenizer = _tokenizer(pipeline)
    request = Request(
        ids=tokenizer.encode(clean(prompt)).ids,
        negative_ids=tokenizer.encode(clean(options.negative)).ids,
        frames=frames,
        height=height,
        width=width,
        steps=options.steps,
        guidance=options.guidance,
    )
    given = {"image": options.image, "last_image": options.last_image}
    paths = {name: path for name, path in given.items() if path is not None}
    if paths:  # which are scaled to the size
        fail_if(list(wan_pipeline.size_problems(parts, request)), "generate")
    pictures: dict[str, Any] = {name: media.read_picture(path, height, width) for name, path in paths.items()}
    return dataclasses.replace(request, **pictures)


def clean(prompt: str) -> str:
    """A prompt as the pipelines of Wan tidy it: HTML entities resolved, white space single."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(prompt))).strip()


def _tokenizer(pipeline: Pipeline) -> Any:
    """The text encoder's tokenizer, cutting at the longest text."""
    chat.need_packages("tokenizers")
    found = [name for name in pipeline.files if PurePosixPath(name).name == "tokenizer.json"]
    if not found:
        raise InputError(
            f"{pipeline.path}: no tokenizer.json among its files ({', '.join(pipeline.files) or 'none'}): convert again"
            " from a folder that holds the tokenizer"
        )
    described = parse_object(pipeline.read(found[0]), str(pipeline.file(found[0])))
    tokenizer = chat.make_tokenizer(described, str(pipeline.path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(wan.TEXT_TOKENS)
    return tokenizer


def _check_mesh(parts: dict[str, Any], degrees: Degrees) -> None:
    """Refuses a mesh that any component does not fit."""
    problems = []
    for name, declared in parts.items():
        try:
            layout.audit(declared, degrees)
        except InputError as error:
            problems.append(f"{name}: {error}")
    fail_if(problems, "generate: the mesh does not fit every component")
