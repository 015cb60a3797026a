"""What a command is pointed at: a preset of the zoo, a checkpoint of ours, or a PyTorch source."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardzoo.convert.hub import is_hub_address
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import layout
from shardzoo.zoo.families import family_names, find_preset


@dataclasses.dataclass(frozen=True)
class Target:
    """A model before any weight is read.

    Attributes:
        kind: "preset", "checkpoint" or "source".
        declared: the declaration, with the dtypes in which the weights are stored.
    """

    name: str
    kind: str
    family: str
    declared: Any


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint folder of Orbax, ours or not (which `checkpoints.open` then says).

    The folder of a training run is one too: it stands for its last step.
    """
    from shardzoo.checkpoints.checkpoint import finished_steps

    markers = ("_CHECKPOINT_METADATA", "_METADATA")
    return any((path / name).is_file() for name in markers) or bool(finished_steps(path))


def one(component: list[str] | None) -> str | None:
    """The one component that a source of a single model may be read for.

    Raises:
        InputError: several were named.
    """
    if component is not None and len(component) > 1:
        raise InputError(f"--component: {len(component)} were named, and this is no pipeline: name one")
    return component[0] if component else None


def find_pipeline_source(name: str, *, variant: str | None = None, **of_one: Any) -> Any:
    """The pipeline that a PyTorch folder holds (`PipelineSource`), or None where it is a source of one model.

    Raises:
        InputError: it is one, and an option that is for one model only was given (`of_one`).
    """
    from shardzoo.convert.pipeline_source import find_pipeline

    found = find_pipeline(name, variant=variant)
    given = [f"--{option}" for option, value in of_one.items() if value is not None]
    if found is not None and given:
        raise InputError(
            f"{name}: is a pipeline, and {', '.join(given)} would be for one model: leave them out, or give the folder"
            f" or file of one component ({', '.join(found.components)})"
        )
    return found


def find_pipeline(path: Path, component: list[str] | None) -> Any:
    """The pipeline in a folder that convert wrote (`Pipeline`), or None where it is one checkpoint.

    Raises:
        InputError: an unfinished one; components were named and it has not all of them, or is no pipeline.
    """
    from shardzoo.checkpoints.pipeline import is_pipeline, is_unfinished, open_pipeline

    if not is_pipeline(path) and not is_unfinished(path):
        if component:
            raise InputError(f"{path}: is no pipeline, which --component would be for: leave it out")
        return None
    pipeline = open_pipeline(path)
    pipeline.require(component or [])
    return pipeline


def find_targets(name: str, component: list[str] | None, **reading: Any) -> list[Target]:
    """The models that `name` means: of a pipeline, or a source of one, its components; else `find_target`.

    Raises:
        InputError: as `find_target`, a component that is not there, or one of a family that the pipeline cannot use.
    """
    from shardzoo.checkpoints.pipeline import is_pipeline, is_unfinished
    from shardzoo.convert.pipeline import plan_components
    from shardzoo.zoo.pipelines import family_problems

    if is_pipeline(name) or is_unfinished(name):
        pipeline = find_pipeline(Path(name), component)
        families = {part: one.family for part, one in pipeline.components.items()}
        fail_if(family_problems(pipeline.kind, families), f"{name}: its components are not of one pipeline")
        return [_opened(f"{name}/{part}", pipeline.checkpoint(part)) for part in component or pipeline.components]
    variant = reading.pop("variant", None)
    found = find_pipeline_source(name, variant=variant, **reading)
    if found is None:
        return [find_target(name, component=one(component), variant=variant, **reading)]
    planned = plan_components(found, found.pick(tuple(component or ())), variant=variant)
    return [_planned(f"{name}: {part}", it.plan) for part, it in planned.items()]


def find_target(name: str, **reading: Any) -> Target:
    """The model that `name` means; `reading` is how to read a PyTorch source, as `plan_conversion` takes it.

    Raises:
        InputError: neither a path that is there nor a preset; what is there cannot be used, or is no PyTorch source
            and `reading` is given.
    """
    path = Path(name).expanduser()
    if is_hub_address(name) or (path.exists() and not is_checkpoint(path)):
        return _source(name, reading)
    given = [f"--{option}" for option, value in reading.items() if value is not None]
    if given and (path.exists() or name.partition("/")[0] in family_names()):
        raise InputError(f"{name}: is no PyTorch source, which {', '.join(given)} would be for: leave them out")
    if path.exists():
        return _checkpoint(name, path)
    if name.partition("/")[0] not in family_names():
        raise InputError(
            f"{name}: there is no such file or folder, and no preset of that name: check the path, or choose a preset"
            f" from `shardzoo presets` (families: {', '.join(family_names())})"
        )
    family, config = find_preset(name)
    return Target(name, "preset", family.name, family.declare(config))


def _checkpoint(name: str, path: Path) -> Target:
    from shardzoo import checkpoints

    return _opened(name, checkpoints.open(path))


def _opened(name: str, found: Any) -> Target:
    """An open `Checkpoint`."""
    return Target(name, "checkpoint", found.manifest.header.family, found.declared)


def _source(name: str, reading: Mapping[str, Any]) -> Target:
    from shardzoo.convert.convert import plan_conversion

    return _planned(name, plan_conversion(name, **reading))


def _planned(name: str, plan: Any) -> Target:
    """A source, with the dtypes of its tensors."""
    params = layout.named(plan.declared)
    typed = {path: dataclasses.replace(param, dtype=plan.leaves[path].spec.dtype) for path, param in params.items()}
    return Target(name, "source", plan.family, layout.fill(plan.declared, typed))
