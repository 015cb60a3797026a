"""Generating images and videos from a pipeline's folder, with one component at a time on the devices."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardzoo.checkpoints.pipeline import Pipeline
from shardzoo.cli import media
from shardzoo.cli.devices import start_mesh
from shardzoo.cli.tokenizers import read_tokenizer
from shardzoo.cli.weights import Held, Models
from shardzoo.errors import InputError, fail_if
from shardzoo.progress import Progress
from shardzoo.zoo import layout
from shardzoo.zoo.mesh import Degrees
from shardzoo.zoo.pipelines import Components, Kind, Wanted, family_problems, find_kind

VAE = "vae"  # keeps the dtype it is stored in: it is small, and bfloat16 shows
TRANSFORMER = "transformer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Where the result goes; `fps` None is what the pipeline's videos have."""

    path: Path
    overwrite: bool
    fps: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What was written (frames of a video, or images), and the seconds of each part of the work."""

    out: str
    video: bool
    frames: int
    height: int
    width: int
    mesh: str
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def generate(
    pipeline: Pipeline,
    wanted: Wanted,
    output: Output,
    *,
    shift: float | None,
    seed: int,
    dtype: np.dtype | None,
    degrees: Degrees,
    offload: bool,
    held: Held,
    on_step: Progress | None,
) -> Made:
    """Makes images or a video and writes them.

    Raises:
        InputError: whatever is wrong with the pipeline, the options or the mesh, before a weight is read.
    """
    kind = find_kind(pipeline.kind)
    settings = _settings(kind, pipeline, shift)
    plain = _parts(kind, pipeline, settings, dtype, offload)
    models = Models(plain, held, usual=TRANSFORMER, unquantized=(VAE,))
    parts = models.declared
    request = kind.request(parts, settings, wanted, lambda name: read_tokenizer(pipeline, name))
    kind.check(parts, settings, request)
    rate = kind.frame_rate(settings)
    if rate is None and output.fps is not None:
        raise InputError(f"{pipeline.path}: makes images, which --fps is not for: leave it out")
    media.check_output(output.path, overwrite=output.overwrite, video=rate is not None, count=len(wanted.prompts))
    _check_mesh(parts, degrees)
    mesh = start_mesh(layout.with_kv(parts[TRANSFORMER], degrees))
    told = _Told(on_step, request.steps)

    def live(name: str) -> Any:
        told.say(f"restoring {name}")
        return models.restore(name, pipeline.checkpoint(name), mesh, part=True, dtype=None if name == VAE else dtype)

    components = Components(declared=parts, live=live)
    begin = time.monotonic()
    latents = kind.sample(components, mesh, settings, request, key=jax.random.key(seed), on_step=told.step)
    jax.block_until_ready(latents)
    sampled = time.monotonic()
    pieces = kind.frames(components, mesh, latents)
    count = media.write_frames(output.path, pieces, output.fps or rate)
    return Made(
        out=str(output.path),
        video=rate is not None,
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


def _settings(kind: Kind, pipeline: Pipeline, shift: float | None) -> Any:
    found = kind.read_settings(pipeline.settings, "original" if pipeline.layout == "original" else "diffusers")
    if shift is not None and not 0 < shift < float("inf"):
        raise InputError(f"generate: shift={shift} is not above 0 and finite: change it")
    return found if shift is None else dataclasses.replace(found, shift=shift)


def _parts(kind: Kind, pipeline: Pipeline, settings: Any, dtype: np.dtype | None, offload: bool) -> dict[str, Any]:
    """The declared components, in the dtypes that they will run in and where they will lie."""
    if dtype is not None and dtype.itemsize < 2:
        raise InputError(f"generate: dtype={dtype.name} is for storage: run in float32, bfloat16 or float16")
    families = {name: one.family for name, one in pipeline.components.items()}
    fail_if(family_problems(pipeline.kind, families), f"{pipeline.path}: its components are not of one pipeline")
    declared = {name: pipeline.checkpoint(name).declared for name in pipeline.components}
    pipeline.require(kind.needed(declared, settings))
    run = kind.run_parts(declared, settings)
    typed = {n: one if n == VAE else layout.astype(one, dtype) for n, one in run.items()}
    return {n: layout.keep_on_host(one) if offload else one for n, one in typed.items()}


def _check_mesh(parts: dict[str, Any], degrees: Degrees) -> None:
    """Refuses a mesh that any component does not fit."""
    problems = []
    for name, declared in parts.items():
        try:
            layout.audit(declared, degrees)
        except InputError as error:
            problems.append(f"{name}: {error}")
    fail_if(problems, "generate: the mesh does not fit every component")
