"""Pipelines: every component of a source converted, compared and written back, each as a checkpoint of its own.

All components are planned, which reads every header, before one is written. `pipeline.json` is written last; what an
interrupted run has finished stands in `PARTIAL` meanwhile, so that the next one carries on behind it.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardzoo.checkpoints.forms import quantized_leaves
from shardzoo.checkpoints.manifest import FileEntry, sha256
from shardzoo.checkpoints.orbax_layout import CHECKPOINT_METADATA, STAGING_SUFFIX
from shardzoo.checkpoints.pipeline import FILES, PARTIAL, PIPELINE, Component, Pipeline, is_pipeline, open_pipeline
from shardzoo.checkpoints.staging import check_destination
from shardzoo.checkpoints.store import storage_error, sync_folder, write_file
from shardzoo.convert import convert as conversion
from shardzoo.convert import export as exporting
from shardzoo.convert import verify as verification
from shardzoo.convert.families import rules_of
from shardzoo.convert.folder import TORCH_SUFFIXES
from shardzoo.convert.names import batched_names
from shardzoo.convert.pipeline_source import PipelineSource, diffusers_files
from shardzoo.convert.plan import Plan, make_plan
from shardzoo.convert.replacing import check_place, locked, replacing
from shardzoo.convert.source import open_source
from shardzoo.errors import InputError, fail_if
from shardzoo.progress import Progress
from shardzoo.strict_json import parse_object
from shardzoo.zoo.pipelines import family_problems

STATE = "export.state"  # what the parts of an unfinished export are of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was done with a pipeline: one report for each component, as the function of that name gives it."""

    source: str
    destination: str
    kind: str
    components: Mapping[str, Any]
    files: tuple[str, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own, "components": {name: report.to_json() for name, report in self.components.items()}}


@dataclasses.dataclass(frozen=True)
class Planned:
    """A component that can be converted; `identity` is that of its source and of everything that decides the result."""

    plan: Plan
    identity: str


def plan_components(
    source: PipelineSource,
    names: list[str],
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    variant: str | None = None,
) -> dict[str, Planned]:
    """The plan of each component; reads headers only.

    Raises:
        InputError: everything that stands in the way of any of them, in one message.
    """
    planned, problems = {}, []
    for name in names:
        try:
            with open_source(source.path(name), variant=variant) as opened:
                plan = make_plan(opened, dtype=dtype, quantize=quantize, **source.reading.get(name, {}))
                files = [(file.path, file.wrapper, file.size, file.mtime_ns) for file in opened.files]
        except InputError as error:
            problems.append(f"{name}: {error}")
            continue
        planned[name] = Planned(plan, hashlib.sha256(repr((plan.digest(), files)).encode()).hexdigest())
    problems += family_problems(source.kind, {name: one.plan.family for name, one in planned.items()})
    fail_if(problems, f"{source.root}: components cannot be converted")
    return planned


def convert(
    source: PipelineSource,
    dst: str | Path,
    *,
    components: tuple[str, ...] = (),
    dtype: str | None = None,
    quantize: str | None = None,
    variant: str | None = None,
    memory_budget: int | None = None,
    dry_run: bool = False,
    resume: bool = True,
    overwrite: bool = False,
    sync: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Converts the components of a pipeline to checkpoints below `dst`, and writes `pipeline.json` there.

    Stopped at any point it leaves nothing that looks like a whole pipeline; run again with the same arguments it
    carries on. Components that an earlier call left out are added to a pipeline of the same kind and layout.

    Args:
        source: what `find_pipeline` found.
        dst: the folder to write.
        components: names of those to convert; all of them if none is named.
        dtype, quantize, variant, memory_budget, dry_run, resume, overwrite, sync: as `convert.convert` takes them, for
            each.
        progress: told of each block.

    Raises:
        InputError: everything wrong with any component in one message, before anything is written; a destination that
            holds something else, or with `overwrite` more than is converted, is full or not writable.
    """
    began = time.perf_counter()
    names = source.pick(components)
    target = Path(os.path.abspath(dst))
    check_place(target, source.root)
    alike: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "variant": variant}
    planned = plan_components(source, names, **alike)
    told = _told(progress, {name: one.plan.bytes_written for name, one in planned.items()})
    options: dict[str, Any] = {**alike, "memory_budget": memory_budget, "sync": sync}

    def reading(name: str) -> dict[str, Any]:
        return dict(source.reading.get(name, {}))

    if overwrite and is_pipeline(target):
        _check_losses(target, names)
    else:
        _check_place(source, target, names)
    left = [one.plan.bytes_written for name, one in planned.items() if overwrite or not (target / name).exists()]
    _require_space(target, sum(left))
    if dry_run:
        reports = {
            name: conversion.convert(source.path(name), target / name, dry_run=True, **options | reading(name))
            for name in names
        }
        return _report(source, str(dst), reports, began)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(replacing(target, is_pipeline)) if overwrite else target
        try:
            place.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(place, target))
            done = _begin(place, planned, resume=resume)
            reports = {
                name: conversion.convert(
                    source.path(name), place / name, resume=resume, progress=told(name), **options | reading(name)
                )
                for name in names
                if name not in done
            }
            _publish(source, place, planned, sync=sync)
        except OSError as error:
            raise storage_error(str(target), error, target.parent) from error
    kept = tuple(f"{name}: was there from an interrupted run" for name in done)
    return _report(source, str(dst), reports, began, kept)


def _report(
    source: PipelineSource, dst: str, reports: Mapping[str, Any], began: float, notes: tuple[str, ...] = ()
) -> Report:
    remarks = tuple(f"{name}: {note}" for name, report in reports.items() for note in report.notes)
    return Report(
        source=str(source.root),
        destination=dst,
        kind=source.kind,
        components=dict(reports),
        files=source.files,
        seconds=time.perf_counter() - began,
        notes=(*source.notes, *notes, *remarks),
    )


def _told(progress: Progress | None, sizes: Mapping[str, int]) -> Callable[[str], Progress | None]:
    """For each component the callback that places its progress among the others'."""
    before, total = 0, sum(sizes.values())
    starts = {}
    for name, size in sizes.items():
        starts[name] = before
        before += size

    def of(name: str) -> Progress | None:
        if progress is None:
            return None
        return lambda done, _, what: progress(starts[name] + done, total, f"{name}: {what}")

    return of


def _check_place(source: PipelineSource, target: Path, names: list[str]) -> None:
    """Refuses a destination that exists, unless it is an unfinished pipeline or one that lacks these components."""
    if is_pipeline(target):
        there = open_pipeline(target)
        if (there.kind, there.layout) != (source.kind, source.layout):
            raise InputError(
                f"{target}: is a pipeline of kind {there.kind} from layout {there.layout}, and the source one of"
                f" {source.kind} in layout {source.layout}: choose another destination"
            )
        if _own(there.settings) != _own(source.settings):
            raise InputError(
                f"{target}: is of a pipeline with other settings than {source.root}: choose another destination"
            )
        twice = [name for name in names if name in there.components]
        if twice:
            raise InputError(
                f"{target}: exists already, with {', '.join(twice)}: remove it, pass --overwrite, or choose another"
                " destination"
            )
    elif not (target / PARTIAL).is_file():
        check_destination(target)


def _check_losses(target: Path, names: list[str]) -> None:
    """Refuses to replace a pipeline whose folder holds more than what is converted: other components, other files."""
    ours = {*names, FILES, *(name + end for name in (PIPELINE, PARTIAL) for end in ("", ".new"))}
    lost = sorted(name for name in os.listdir(target) if name.removesuffix(STAGING_SUFFIX) not in ours)
    if lost:
        raise InputError(
            f"{target}: holds {batched_names(lost)} besides {', '.join(names)}, which --overwrite would remove: convert"
            " all components, or one alone from its own place in the source to its own here, or move away what is to"
            " stay"
        )


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A pipeline's own settings, without where it was downloaded from."""
    return {name: value for name, value in settings.items() if name != "hub"}


def _require_space(target: Path, nbytes: int) -> None:
    """Refuses to begin with the first component where the last one will not fit."""
    place = next(parent for parent in (target, *target.parents) if os.path.lexists(parent))
    free, need = shutil.disk_usage(place).free, nbytes + nbytes // 50
    if free < need:
        raise InputError(
            f"{target}: needs {need:,} bytes for all components, {free:,} are free at {place}: free some, choose"
            " another destination, or convert fewer by component= (--component)"
        )


def _begin(place: Path, planned: Mapping[str, Planned], *, resume: bool) -> list[str]:
    """Notes what is to be converted; the components that an interrupted run of the same has finished.

    Raises:
        InputError: a component is there that another run left, or other options; what that run noted is damaged.
    """
    partial = place / PARTIAL
    noted = _noted(partial, resume=resume)
    there = [name for name in planned if (place / name / CHECKPOINT_METADATA).exists()]
    if not resume:
        for name in there:
            shutil.rmtree(place / name)
        there = []
    other = [name for name in there if noted.get(name) != planned[name].identity]
    fail_if(
        [f"{name}: was left by a run of another source or with other options" for name in other],
        f"{place}: is in use: pass --no-resume to start clean, or choose another destination",
    )
    _write_json(partial, noted | {name: one.identity for name, one in planned.items()})
    return there


def _noted(partial: Path, *, resume: bool) -> dict[str, Any]:
    """What earlier runs have noted; nothing where it cannot be read and is not wanted."""
    try:
        return parse_object(partial.read_bytes(), str(partial)) if partial.is_file() else {}
    except InputError as error:
        if not resume:
            return {}
        raise InputError(f"{error}: pass --no-resume to start clean, or choose another destination") from None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    write_file(new, json.dumps(content, sort_keys=True).encode())
    os.replace(new, path)
    sync_folder(path.parent)


def _publish(source: PipelineSource, place: Path, planned: Mapping[str, Planned], *, sync: bool) -> None:
    """Copies the small files and writes `pipeline.json`, with the components that were there before."""
    files = {}
    for name in source.files:
        data = (source.root / name).read_bytes()
        (place / FILES / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(place / FILES / name, data, sync=sync)
        files[name] = FileEntry(size=len(data), sha256=sha256(data))
    components = {
        name: Component(family=one.plan.family, place=source.components[name]) for name, one in planned.items()
    }
    before = open_pipeline(place).components if is_pipeline(place) else {}
    Pipeline(
        path=place,
        kind=source.kind,
        layout=source.layout,
        components={**before, **components},
        files=files,
        settings=source.settings,
    ).write(sync=sync)
    (place / PARTIAL).unlink()


def verify(
    pipeline: Pipeline,
    source: PipelineSource | None = None,
    *,
    components: tuple[str, ...] = (),
    level: str = "full",
    variant: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Checks each component against its manifest, or with `source` against what it was converted from.

    Raises:
        InputError: everything that is damaged or differs in any component, in one message.
    """
    began = time.perf_counter()
    names = _pick(pipeline, components)
    if source is not None:
        source.pick(tuple(names))
    sizes = {name: pipeline.checkpoint(name).manifest.total_bytes for name in names}
    told, reports, problems = _told(progress, sizes), {}, pipeline.damaged_files()
    for name in names:
        try:
            src = None if source is None else source.path(name)
            reports[name] = verification.verify(
                pipeline.path / name, src, level=level, variant=variant, progress=told(name)
            )
        except InputError as error:
            problems.append(f"{name}: {error}")
    fail_if(problems, f"{pipeline.path}: is not sound" + (f", or differs from {source.root}" if source else ""))
    return Report(
        source="" if source is None else str(source.root),
        destination=str(pipeline.path),
        kind=pipeline.kind,
        components=reports,
        files=tuple(pipeline.files),
        seconds=time.perf_counter() - began,
    )


def _pick(pipeline: Pipeline, names: tuple[str, ...]) -> list[str]:
    pipeline.require(list(names))
    return [name for name in pipeline.components if not names or name in names]


def _once(pipeline: Pipeline, names: list[str]) -> list[str]:
    """The components that a source is put together from: of those that came from one place the one with most of it."""
    skipped = {name: len(pipeline.checkpoint(name).manifest.header.skipped) for name in names}
    whole: dict[str, str] = {}
    for name in sorted(names, key=lambda name: skipped[name]):
        whole.setdefault(pipeline.components[name].place, name)
    return [name for name in names if name in whole.values()]


def export(
    pipeline: Pipeline,
    dst: str | Path,
    *,
    components: tuple[str, ...] = (),
    layout: str | None = None,
    dequantize: bool = False,
    overwrite: bool = False,
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Writes the folder that a pipeline came from, or the one of diffusers for a pipeline that came in another layout.

    Each component comes out as `convert.export` writes it. Stopped at any point it leaves nothing at `dst`; run again
    it carries on behind the components that are whole.

    Raises:
        InputError: a layout that is neither the pipeline's own nor "diffusers", and everything that `convert.export`
            refuses.
    """
    began = time.perf_counter()
    target = Path(os.path.abspath(dst))
    check_place(target, pipeline.path)
    names = _once(pipeline, _pick(pipeline, components))
    quantized = [name for name in names if quantized_leaves(pipeline.checkpoint(name).manifest.leaves)]
    if quantized and not dequantize:
        raise InputError(
            f"{pipeline.path}: weights of {', '.join(quantized)} are quantized: their full precision is lost; pass"
            " dequantize=True (--dequantize) to write them as they were rounded"
        )
    wanted = layout or pipeline.layout
    if wanted not in (pipeline.layout, "diffusers"):
        own = "" if pipeline.layout == "diffusers" else f", {pipeline.layout!r}"
        raise InputError(f"layout={layout!r} is not one that this pipeline is written in: use 'diffusers'{own}")
    sizes = {name: pipeline.checkpoint(name).manifest.total_bytes for name in names}
    told = _told(progress, sizes)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(replacing(target, _is_export)) if overwrite else target
        check_destination(place)
        parts = place.with_name(place.name + ".shardzoo-parts")
        try:
            done = stack.enter_context(_parts(parts, target, f"{wanted} {_digest(pipeline, names)}"))
            reports = {
                name: exporting.export(
                    pipeline.path / name,
                    parts / name,
                    layout=_layout_of(pipeline, name, wanted),
                    dequantize=name in quantized,
                    memory_budget=memory_budget,
                    progress=told(name),
                )
                for name in names
                if name not in done
            }
            files = _assemble(pipeline, parts, names, wanted)
            os.rename(parts / FILES, place)
            sync_folder(place.parent)
            shutil.rmtree(parts)
        except OSError as error:
            raise storage_error(str(target), error, target.parent) from error
    same = wanted == pipeline.layout
    reports = {
        name: dataclasses.replace(report, destination=str(Path(dst, pipeline.components[name].place if same else name)))
        for name, report in reports.items()
    }
    notes = [f"{name}: was there from an interrupted run" for name in names if name in done]
    notes += [f"{name}: {note}" for name, report in reports.items() for note in report.notes]
    return Report(
        source=str(pipeline.path),
        destination=str(dst),
        kind=pipeline.kind,
        components=reports,
        files=tuple(files),
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
    )


def _is_export(path: Path) -> bool:
    return path.is_dir() and any(path.rglob("*.safetensors"))


def _digest(pipeline: Pipeline, names: list[str]) -> str:
    """Of everything that an export of these components writes."""
    manifests = [sha256(pipeline.checkpoint(name).manifest.encode()) for name in names]
    return sha256(repr((manifests, sorted((name, e.sha256) for name, e in pipeline.files.items()))).encode())


@contextlib.contextmanager
def _parts(folder: Path, target: Path, identity: str) -> Iterator[set[str]]:
    """The folder in which components are exported one by one, and those that an earlier run of the same has finished.

    Once it is being put together it is of no use to a later run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, target):
        state = folder / STATE
        if not state.is_file() or state.read_text() != identity or (folder / FILES).exists():
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            write_file(state, identity.encode())
        yield {path.name for path in folder.iterdir() if path.is_dir() and not path.name.endswith(exporting.SUFFIX)}


def _layout_of(pipeline: Pipeline, name: str, wanted: str) -> str | None:
    """What a component's family calls its layout in a folder of the pipeline's; None for the one that it came in."""
    if wanted == pipeline.layout and "layout" in pipeline.checkpoint(name).manifest.header.detail:
        return None
    names = {layout.name.split(",")[0] for layout in rules_of(pipeline.components[name].family).layouts}
    return wanted if wanted in names else "transformers"


def _assemble(pipeline: Pipeline, parts: Path, names: list[str], layout: str) -> list[str]:
    """Moves exported components and small files to where the layout has them, below `parts / FILES`."""
    whole = parts / FILES
    for name in names:
        place = whole / (pipeline.components[name].place if layout == pipeline.layout else name)
        folder = place.parent if place.suffix in (".safetensors", *TORCH_SUFFIXES) else place
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted((parts / name).iterdir()):
            os.replace(path, folder / path.name)
    for name, data in _small_files(pipeline, layout).items():
        (whole / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(whole / name, data)
    for below, _, _ in os.walk(whole):
        sync_folder(Path(below))
    return sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())


def _small_files(pipeline: Pipeline, layout: str) -> dict[str, bytes]:
    came = {name: pipeline.read(name) for name in pipeline.files}
    if layout == pipeline.layout:
        return came
    tokenizer = {f"tokenizer/{Path(name).name}": data for name, data in came.items()}
    return tokenizer | diffusers_files(pipeline.kind, pipeline.components, pipeline.settings)
