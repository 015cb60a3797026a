"""Restoring the state of a training run onto any mesh: what was saved is held against what the run is now, first."""

import dataclasses as dc
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from shardzoo.checkpoints import distributed
from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.manifest import OPT_STATE, Json, Leaf
from shardzoo.checkpoints.restore import check_wide, read_leaves, tree_problems
from shardzoo.checkpoints.training_state import TrainingState, key_from_json, replicated, structure
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import optimizer_state
from shardzoo.zoo.families import FAMILIES, config_changes
from shardzoo.zoo.layout import Param, audit, fill, named

CHANGES = {
    "dtype": "cast floating-point leaves to what is declared now",
    "optimizer": "begin the optimizer's state anew where it is another's",
    "trainable": "keep the optimizer's state of what was trained before, begin the rest anew",
    "config": "compute with what is declared now",
}
PREFIX = OPT_STATE + "/"


@dc.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run is: its model, its optimizer, what the optimizer is given, and the mesh.

    Attributes:
        declared: the declaration of the model.
        declared_state: that of the optimizer's state (`zoo.optimizer_state.declare`).
        trained: the parameters that the optimizer is given.
    """

    declared: Any
    declared_state: Any
    optimizer: Any
    trainable: str | Iterable[str] | None
    trained: list[str]
    mesh: Mesh


def restore_state(
    ckpt: Checkpoint, run: Run, changes: Iterable[str], *, budget: int, timeout: float | int = distributed.TIMEOUT
) -> TrainingState:
    """The state of a checkpoint on the run's mesh; each process reads the bytes that its devices hold.

    Raises:
        InputError: whatever does not fit and is not among `changes`, all in one message, before a value is read;
            missing or damaged files.
        distributed.ProcessTimeout: another process did not finish in time.
    """
    allowed = set(changes)
    with distributed.together("restore", ckpt.path, timeout=timeout):
        training = training_of(ckpt)
        fail_if(_problems(ckpt, run, allowed), f"{ckpt.path}: does not hold this run's state")
        kept = _kept_state(ckpt.manifest.opt_state, run, training, allowed)
        wanted = {**named(run.declared), **{PREFIX + path: param for path, param in kept.items()}}
        check_wide({path: param.dtype for path, param in wanted.items()})
    live = _read(ckpt, run.mesh, wanted, budget, timeout)
    model = fill(run.declared, {path: live[path] for path in named(run.declared)})
    return TrainingState(
        model=model,
        opt_state=_state(run, model, {path: live[PREFIX + path] for path in kept}),
        step=replicated(np.asarray(training["step"], np.int32), run.mesh),
        key=key_from_json(training["key"], run.mesh),
        data=training["data"],
    )


def training_of(ckpt: Checkpoint) -> Json:
    """What the manifest says of the run.

    Raises:
        InputError: the checkpoint is of a model alone.
    """
    if ckpt.manifest.training is None:
        raise InputError(f"{ckpt.path}: holds a model and no training state: begin a run from it with restore()")
    return ckpt.manifest.training


def _problems(ckpt: Checkpoint, run: Run, allowed: set[str]) -> list[str]:
    """Everything in which the saved run is not this one, but for what is `allowed` to change."""
    training, manifest = training_of(ckpt), ckpt.manifest
    problems = [f"changes={name!r} is not one of {', '.join(CHANGES)}" for name in sorted(allowed - set(CHANGES))]
    of_tree = tree_problems(run.declared, manifest.leaves, dtypes="dtype" not in allowed, cast=_hint("dtype"))
    if ckpt.path.name != str(training["step"]):
        problems.append(f"it holds step {training['step']}: its folder was renamed or copied, undo that")
    problems += of_tree or ([] if "config" in allowed else _config_problems(ckpt, run.declared))
    try:
        audit(run.declared, run.mesh)
    except InputError as error:
        problems.append(str(error))
    if "trainable" not in allowed:
        problems += _trainable_problems(manifest.leaves, training, run)
    was, now = training["optimizer"], structure(run.declared_state)
    if was != now and "optimizer" not in allowed:
        problems.append(f"optimizer: its state was {was}, is now {now}: {_hint('optimizer')}")
    if was != now:
        return problems
    kept = _kept_state(manifest.opt_state, run, training, allowed)
    found = tree_problems(kept, manifest.opt_state, dtypes="dtype" not in allowed, part=True, cast=_hint("dtype"))
    return problems + [f"{PREFIX}{text}" for text in found]


def _hint(change: str) -> str:
    return f"undo that, or pass changes=[{change!r}] to {CHANGES[change]}"


def _config_problems(ckpt: Checkpoint, declared: Any) -> list[str]:
    """What changed in the model that no shape tells, such as the base of the rotation."""
    config, family = getattr(declared, "config", None), FAMILIES.get(ckpt.manifest.header.family)
    if family is None or type(config) is not family.config:
        return []
    return [f"config: {change}: {_hint('config')}" for change in config_changes(ckpt.config, config)]


def _trainable_problems(leaves: Mapping[str, Leaf], training: Json, run: Run) -> list[str]:
    before = set(leaves) - set(training["frozen"])
    now = set(run.trained)
    lines = []
    for verb, paths in (("trained before, not now", before - now), ("trained now, not before", now - before)):
        shown = sorted(paths & set(leaves))
        if shown:
            more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
            lines.append(f"trainable: {', '.join(shown[:3])}{more}: {verb}: {_hint('trainable')}")
    return lines


def _kept_state(leaves: Mapping[str, Leaf], run: Run, training: Json, allowed: set[str]) -> dict[str, Param]:
    """The leaves of the optimizer's state that are read: all, or those that the changes leave."""
    params = named(run.declared_state)
    if training["optimizer"] != structure(run.declared_state):
        return {}
    if "trainable" in allowed:
        return {p: q for p, q in params.items() if p in leaves and leaves[p].spec.shape == q.shape}
    return params


def _read(
    ckpt: Checkpoint, mesh: Mesh, wanted: Mapping[str, Param], budget: int, timeout: float | int
) -> dict[str, Array]:
    """The leaves in their declared dtypes, on every process or on none."""
    live: dict[str, Array] = {}
    # Work on single devices is refused under the caller's mesh.
    with jax.set_mesh(None), distributed.together("restore", ckpt.path, timeout=timeout):
        shapes = {path: param.shape for path, param in wanted.items()}
        shardings = {path: param.sharding(mesh) for path, param in wanted.items()}
        dtypes = {path: param.dtype for path, param in wanted.items()}
        live = read_leaves(ckpt, shapes, shardings, dtypes, budget, {})
    return live


def _state(run: Run, model: Any, kept: Mapping[str, Array]) -> Any:
    """The optimizer's state: what was kept, and the first state of all else."""
    params = named(run.declared_state)
    if set(kept) == set(params):
        return fill(run.declared_state, kept)
    fresh = optimizer_state.init(run.optimizer, model, run.declared, run.mesh, trainable=run.trainable)
    return fill(run.declared_state, {**named(fresh), **kept})
