"""What each command does and prints; `app` reads the options."""

import contextlib
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo.checkpoints.pipeline import is_pipeline, is_unfinished
from shardzoo.cli import reports, targets, verdicts
from shardzoo.cli.interrupts import uninterrupted
from shardzoo.cli.terminal import count_text, note, progress_bar, say, say_json, say_table, size_text, working
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import layout
from shardzoo.zoo.families import family_names, find_family
from shardzoo.zoo.mesh import Degrees

MODEL = "model"  # what the one model of a checkpoint that is no pipeline is called


def convert(
    source: str,
    destination: Path,
    *,
    component: list[str] | None,
    dry_run: bool,
    json: bool,
    family: str | None,
    config: Path | None,
    prefix: str | None,
    select: str | None,
    **options: Any,
) -> None:
    """Converts a model, or every component of a pipeline, and prints the report."""
    with uninterrupted():
        from shardzoo.convert import convert as conversion
        from shardzoo.convert import pipeline as pipelines

    of_one: dict[str, Any] = {"family": family, "config": config, "prefix": prefix, "select": select}
    found = targets.find_pipeline_source(source, variant=options["variant"], **of_one)
    with progress_bar("checking" if dry_run else "converting") as progress:
        common = {"dry_run": dry_run, "progress": progress, **options}
        report: Any = (
            conversion.convert(source, destination, component=targets.one(component), **of_one, **common)
            if found is None
            else pipelines.convert(found, destination, components=tuple(component or ()), **common)
        )
    _note_all(report, json)
    _say_report(report, reports.conversion_lines if found is None else reports.pipeline_lines, json)


def verify(
    checkpoint: Path,
    source: str | None,
    *,
    component: list[str] | None,
    quick: bool,
    json: bool,
    variant: str | None,
    select: str | None,
) -> None:
    """Verifies and prints the report."""
    with uninterrupted():
        from shardzoo.convert import pipeline as pipelines
        from shardzoo.convert import verify as verification

    if quick and source is not None:
        raise InputError("verify: --quick reads no values, and SRC is there to compare them: leave out one of the two")
    level = "quick" if quick else "full"
    report: Any
    pipeline = targets.find_pipeline(checkpoint, component)
    with progress_bar("verifying") as progress:
        common: dict[str, Any] = {"level": level, "variant": variant, "progress": progress}
        if pipeline is None:
            report = verification.verify(checkpoint, source, select=select, **common)
        else:
            found = None if source is None else targets.find_pipeline_source(source, variant=variant, select=select)
            if source is not None and found is None:
                raise InputError(f"{source}: holds no pipeline, and {checkpoint} is one: give the folder it came from")
            report = pipelines.verify(pipeline, found, components=tuple(component or ()), **common)
    _say_report(report, reports.verification_lines if pipeline is None else reports.pipeline_lines, json)


def export(checkpoint: Path, destination: Path, *, component: list[str] | None, json: bool, **options: Any) -> None:
    """Exports and prints the report."""
    with uninterrupted():
        from shardzoo.convert import export as exporting
        from shardzoo.convert import pipeline as pipelines

    pipeline = targets.find_pipeline(checkpoint, component)
    with progress_bar("exporting") as progress:
        report: Any = (
            exporting.export(checkpoint, destination, progress=progress, **options)
            if pipeline is None
            else pipelines.export(
                pipeline, destination, components=tuple(component or ()), progress=progress, **options
            )
        )
    _note_all(report, json)
    _say_report(report, reports.export_lines if pipeline is None else reports.pipeline_lines, json)


def _note_all(report: Any, json: bool) -> None:
    for remark in () if json else report.notes:
        note(f"note: {remark}")


def _say_report(report: Any, lines: Callable[[Any], Iterable[str]], json: bool) -> None:
    if json:
        say_json(report.to_json())
    else:
        say("\n".join(lines(report)))


def inspect(checkpoint: Path, *, component: list[str] | None, json: bool) -> None:
    """Prints the manifest, of a pipeline that of every component, of a training run what each of its steps is."""
    with uninterrupted():
        from shardzoo import checkpoints
        from shardzoo.checkpoints.checkpoint import finished_steps

    if steps := finished_steps(checkpoint):
        _inspect_run(checkpoint, {step: checkpoints.open(checkpoint / str(step)).manifest for step in steps}, json=json)
        return
    pipeline = targets.find_pipeline(checkpoint, component)
    if pipeline is None:
        manifest = checkpoints.open(checkpoint).manifest
        if json:
            say_json(manifest.to_json())
        else:
            _say_manifest(checkpoint, manifest)
        return
    found = {name: pipeline.checkpoint(name).manifest for name in component or pipeline.components}
    if json:
        components = {name: manifest.to_json() for name, manifest in found.items()}
        say_json({"kind": pipeline.kind, "settings": pipeline.settings, "components": components})
        return
    total = sum(manifest.total_bytes for manifest in found.values())
    say(f"{checkpoint}: pipeline {pipeline.kind} of {', '.join(found)}, {size_text(total)}")
    say("settings: " + ", ".join(f"{name}={_plain(value)}" for name, value in pipeline.settings.items()))
    for name, manifest in found.items():
        say("")
        _say_manifest(checkpoint / name, manifest)


def _inspect_run(folder: Path, manifests: dict[int, Any], *, json: bool) -> None:
    """The steps of a training run, and the manifest of the last."""
    if json:
        steps = [{"step": step, "bytes": m.total_bytes, **(m.training or {})} for step, m in manifests.items()]
        say_json({"folder": str(folder), "steps": steps, "last": manifests[max(manifests)].to_json()})
        return
    total = sum(manifest.total_bytes for manifest in manifests.values())
    say(f"{folder}: training run, {len(manifests)} steps, {size_text(total)}")
    say_table(
        (">step", "saved (UTC)", "mesh", ">processes", ">bytes", "metrics", "data"),
        [reports.training_row(step, manifest) for step, manifest in manifests.items()],
    )
    say("")
    last = max(manifests)
    _say_manifest(folder / str(last), manifests[last])


def _say_manifest(checkpoint: Path, manifest: Any) -> None:
    header = manifest.header
    say(f"{checkpoint}: {header.family} ({header.component}), {size_text(manifest.total_bytes)}")
    say("config: " + ", ".join(f"{name}={_plain(value)}" for name, value in header.config.items()))
    for source in header.sources:
        say(f"from: {source.name} ({source.kind}, {size_text(source.size)}, sha256 {source.sha256 or 'unknown'})")
    if manifest.training is not None:
        for line in reports.training_lines(manifest):
            say(line)
    rest = (manifest.training or {}).get("rest", {})
    say_table(
        ("parameter", "dims", "shape", "dtype", "split", ">bytes"),
        [_leaf_row(path, leaf.spec, rest.get(path, {})) for path, leaf in manifest.all_leaves().items()],
    )
    for key, other in header.aliases.items():
        say(f"tied: {key} = {other}")
    for skipped in header.skipped:
        say(f"left out: {skipped.key} ({skipped.reason})")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name}={_plain(inner)}" for name, inner in value.items()) + ")"
    return str(value)


def _leaf_row(path: str, spec: Any, rest: dict[str, str]) -> tuple[str, ...]:
    """A line of the table for a leaf: `spec` has dims, shape, dtype and split; `rest` is how it was split at rest."""
    splits = [f"{dim} over {' x '.join(axes)}" for dim, axes in spec.split.items()]
    split = ", ".join([*splits, *(f"{dim} at rest over {axis}" for dim, axis in rest.items())]) or "whole"
    size = int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize
    return (
        path,
        " ".join(spec.dims),
        " x ".join(map(str, spec.shape)),
        spec.dtype.name,
        split,
        size_text(size),
    )


def presets(family: str | None, *, json: bool) -> None:
    """Prints the presets with their numbers of parameters."""
    families = [find_family(name) for name in ([family] if family is not None else family_names())]
    rows = [
        (f"{one.name}/{name}", verdicts.total(one.declare(config))[0])
        for one in families
        for name, config in one.presets.items()
    ]
    if json:
        say_json([{"name": name, "parameters": count} for name, count in rows])
    else:
        say_table(("preset", ">parameters"), [(name, count_text(count)) for name, count in rows])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """How long replies are and how they are drawn; `temperature` 0 takes the likeliest token each time."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


def prompts(given: Sequence[str] | None) -> list[str]:
    """The prompts of the options, or the one on standard input.

    Raises:
        InputError: none was given and standard input is a terminal, or there is nothing in it, or no text.
    """
    if given:
        return list(given)
    try:
        text = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise InputError(f"generate: standard input is not UTF-8 ({error.reason}): change its encoding") from error
    if not text:
        raise InputError("generate: no prompt: give --prompt TEXT, or write it to standard input")
    return [text]


def generate(
    checkpoint: Path,
    texts: list[str],
    *,
    system: str | None,
    raw: bool | None,
    max_new_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    dtype: np.dtype | None,
    degrees: Degrees,
    offload: bool,
    quantize: str | None,
    lora: list[Any] | None,
    lora_ignore: list[str] | None,
    json: bool,
) -> None:
    """Restores the model onto the mesh and prints its replies."""
    with uninterrupted():
        from shardzoo import checkpoints
        from shardzoo.cli import chat, weights

    options = ReplyOptions(
        max_new_tokens=128 if max_new_tokens is None else max_new_tokens,
        temperature=temperature or 0.0,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    found = checkpoints.open(checkpoint)
    plain = layout.keep_on_host(found.declared) if offload else found.declared
    if found.family.text is None:
        raise InputError(f"{checkpoint}: generate runs language models, and this is {found.family.name!r}")
    if raw and system is not None:
        raise InputError("generate: --system is for the chat template, which --raw leaves out: leave out one of them")
    if dtype is not None and dtype.itemsize < 2:
        raise InputError(f"generate: dtype={dtype.name} is for storage: run in float32, bfloat16 or float16")
    layout.audit(plain, degrees)
    models = weights.Models({MODEL: plain}, weights.held(quantize, lora, lora_ignore), usual=MODEL)
    declared = models.declared[MODEL]
    text = chat.read_text_assets(found.assets, str(checkpoint))
    ids = [text.encode(one) if raw else text.encode_chat(one, system) for one in texts]
    with uninterrupted():
        engine = importlib.import_module(found.family.text)
    _check_request(engine, declared, ids, options)
    begin = time.monotonic()
    with _room_named(checkpoint, degrees):
        model, mesh = _restore(found, models, degrees, dtype)
        restored = time.monotonic()
        replies = _reply(engine, declared, mesh, model, ids, text.end_ids, options)
    seconds = {"restore": restored - begin, "generate": time.monotonic() - restored}
    decoded = [text.decode(reply) for reply in replies]
    if json:
        say_json(
            {
                "mesh": str(degrees),
                "seconds": seconds,
                "replies": [
                    {"prompt_tokens": len(one), "new_tokens": len(reply), "text": words}
                    for one, reply, words in zip(ids, replies, decoded, strict=True)
                ],
            }
        )
        return
    say("\n\n".join(decoded))
    if sys.stderr.isatty():
        count = sum(map(len, replies))
        note(f"({count} tokens on {degrees}; restore {seconds['restore']:.1f} s, generate {seconds['generate']:.1f} s)")


def _check_request(engine: Any, declared: Any, ids: list[list[int]], options: ReplyOptions) -> None:
    """Refuses prompts and options that generation would refuse, before a weight is read."""
    from shardzoo.zoo.next_token import Sampling

    Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    given = {"--top-k": options.top_k, "--top-p": options.top_p}
    idle = [name for name, value in given.items() if value is not None and not options.temperature]
    fail_if([f"{x} does nothing at --temperature 0: give a temperature, or leave it out" for x in idle], "generate")
    engine.check_prompts(declared.config, ids, options.max_new_tokens)


def check_texts(**texts: str | list[str] | None) -> None:
    """Refuses texts that are none: bytes of a command line that are not UTF-8, which no tokenizer takes.

    Raises:
        InputError: with the options they came by.
    """
    for name, given in texts.items():
        try:
            "".join(given or "").encode()
        except UnicodeEncodeError as error:
            raise InputError(f"generate: --{name} is not UTF-8 ({error.reason}): change its encoding") from error


def makes_images(checkpoint: Path) -> bool:
    """Whether generate makes images or a video of this: of a pipeline, not of a checkpoint.

    Raises:
        InputError: there is nothing.
    """
    if not checkpoint.exists():
        raise InputError(f"{checkpoint}: there is no such folder: check the path")
    return is_pipeline(checkpoint) or is_unfinished(checkpoint)


def refuse_options(checkpoint: Path, what: str, options: Mapping[str, Any]) -> None:
    """Refuses options that are for checkpoints of another kind, where they were given (are not None)."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{checkpoint}: {what}, and {named} would be for the other kind: leave them out")


def generate_images(
    checkpoint: Path,
    texts: list[str],
    *,
    image: list[Path] | None,
    last_image: Path | None,
    guidance: list[float] | None,
    out: Path | None,
    overwrite: bool | None,
    fps: int | None,
    shift: float | None,
    seed: int,
    dtype: np.dtype | None,
    degrees: Degrees,
    offload: bool,
    quantize: str | None,
    lora: list[Any] | None,
    lora_ignore: list[str] | None,
    json: bool,
    **wanted: Any,
) -> None:
    """Makes images or a video by a pipeline and says where they are."""
    with uninterrupted():
        from shardzoo.checkpoints.pipeline import open_pipeline
        from shardzoo.cli import diffusion, media, weights
        from shardzoo.zoo.pipelines import Wanted

    if out is None:
        raise InputError("generate: no output was given: pass --out FILE.mp4, --out FILE.png, or --out FOLDER")
    asked = Wanted(
        prompts=tuple(texts),
        images=tuple(media.read_picture(path) for path in image or ()),
        last_image=None if last_image is None else media.read_picture(last_image),
        guidance=tuple(guidance) if guidance else None,
        **wanted,
    )
    with _room_named(checkpoint, degrees), progress_bar("sampling", steps=True) as progress:
        made = diffusion.generate(
            open_pipeline(checkpoint),
            asked,
            diffusion.Output(path=out, overwrite=bool(overwrite), fps=fps),
            shift=shift,
            seed=seed,
            dtype=dtype,
            degrees=degrees,
            offload=offload,
            held=weights.held(quantize, lora, lora_ignore),
            on_step=progress,
        )
    if json:
        say_json(made.to_json())
        return
    what = "frame" if made.video else "image"
    say(f"{made.out}: {made.frames} {what}{'' if made.frames == 1 else 's'} of {made.height} x {made.width}")
    if sys.stderr.isatty():
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in made.seconds.items())
        note(f"(on {made.mesh}; {parts})")


@contextlib.contextmanager
def _room_named(checkpoint: Path, degrees: Degrees) -> Iterator[None]:
    """Turns a device that runs out of memory into an `InputError`."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InputError(
            f"{checkpoint}: a device of mesh ({degrees}) has too little memory ({str(error).splitlines()[0][:200]}):"
            " use more devices, --dtype bfloat16, or fewer tokens"
        ) from error


def _restore(found: Any, models: Any, degrees: Degrees, dtype: np.dtype | None) -> tuple[Any, Any]:
    """The live model on its mesh, and the mesh."""
    from shardzoo.cli.devices import start_mesh

    declared = models.declared[MODEL]
    mesh = start_mesh(layout.with_kv(declared, degrees))
    layout.audit(declared, mesh)
    with working("restoring"):
        return models.restore(MODEL, found, mesh, dtype=dtype), mesh


def _reply(
    engine: Any,
    declared: Any,
    mesh: Any,
    model: Any,
    ids: list[list[int]],
    end_ids: tuple[int, ...],
    options: ReplyOptions,
) -> list[list[int]]:
    """The new tokens of each prompt, without the end token; `engine` is the family's module `text`."""
    import jax

    given = dataclasses.asdict(options)
    key = jax.random.key(given.pop("seed"))
    with working("generating"):
        return engine.complete(declared, mesh, model, ids, stop_ids=end_ids, key=key, **given)
