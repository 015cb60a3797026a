"""A model out of any Orbax checkpoint, someone else's too: patterns say which of its arrays goes where.

    model = restore_orbax("their/ckpt", mesh, declared, {"*": "params.*", "head.weight": "params.lm_head.kernel"})

Orbax reads it, whatever its layout, onto the declared splits. Arrays are taken as they are: one that would have to be
turned round or cut has another shape and is refused, or another file's rules are needed (`shardzoo convert`).
"""

import collections
import fnmatch
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array
from orbax.checkpoint import v1 as ocp

from shardzoo.checkpoints import distributed
from shardzoo.checkpoints.restore import check_wide
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.layout import Param, audit, fill, named


def restore_orbax(
    path: str | Path,
    mesh: Mesh,
    declared: Any,
    mapping: Mapping[str, str | None],
    *,
    item: str | None = None,
    dtype: Any = None,
    timeout: float | int = distributed.TIMEOUT,
) -> Any:
    """The live model of a declaration, out of an Orbax checkpoint that need not be of this project.

    Called by every process of the mesh.

    Args:
        path: the checkpoint: one item with a tree of arrays, or a folder of several (then `item` may name one).
        declared: what to fill, split as it says.
        mapping: pattern of declared paths -> pattern of stored ones, the first that matches; each `*` on the right
            takes what the `*` of the same place on the left stands for. None leaves these leaves `Param`, to be filled
            by someone else (a new head).
        item: the item to read; by default the only one that holds arrays.
        dtype: dtype of the restored floating-point leaves; without it, the stored ones have to be the declared.
        timeout: seconds to wait for the other processes at the end.

    Raises:
        InputError: no such checkpoint or item; leaves without a match, matches that are not stored, other shapes or
            dtypes, a mesh that does not fit, patterns that match nothing: all in one message, before a value is read.
        distributed.ProcessTimeout: another process did not finish in time.
    """
    root = Path(path).absolute()
    params: dict[str, Param] = named(declared)
    targets: dict[tuple[str, ...], list] = collections.defaultdict(list)
    with distributed.together("restore", root, timeout=timeout):
        dtype = float_dtype("restore_orbax", dtype)
        item, tree = _stored(root, item)
        stored = _leaves(tree)
        chosen, problems = _matches(params, mapping, stored)
        problems += _misfits(params, chosen, stored, cast=dtype is not None)
        try:
            audit(declared, mesh)
        except InputError as error:
            problems.append(str(error))
        fail_if(problems, f"{root}: does not hold the declared model")
        for leaf, source in chosen.items():
            param = params[leaf]
            wanted = dtype if dtype is not None and _is_float(param.dtype) else param.dtype
            target = jax.ShapeDtypeStruct(param.shape, wanted, sharding=param.sharding(mesh))
            targets[source].append((leaf, target))
        check_wide({leaf: target.dtype for wanted in targets.values() for leaf, target in wanted})
    live: dict[str, Array] = {}
    with jax.set_mesh(None), distributed.together("restore", root, timeout=timeout):  # refused under the caller's mesh
        try:
            live = _read(root, item, tree, targets)
        except (ValueError, OSError, KeyError) as error:
            if isinstance(error, InputError):
                raise
            text = str(error).splitlines()[0][:400]
            raise InputError(f"cannot be read ({text}): get the checkpoint again") from error
    return fill(declared, {**named(declared), **live})


def _is_float(dtype: np.dtype) -> bool:
    return jax.numpy.issubdtype(dtype, np.floating)


def _stored(root: Path, item: str | None) -> tuple[str | None, Any]:
    """The item, and its tree with what Orbax says of each array.

    Raises:
        InputError: no Orbax checkpoint; no such item, or several that could be meant.
    """
    try:
        items = ocp.checkpointables_metadata(root).metadata
    except (ValueError, OSError, KeyError) as error:
        raise InputError(f"{root}: is not an Orbax checkpoint ({str(error).splitlines()[0][:300]})") from error
    trees = {name: tree for name, tree in items.items() if _leaves(tree)}
    if item is None and len(trees) == 1:
        item = next(iter(trees))
    if item not in trees:
        raise InputError(f"{root}: item={item!r} holds no arrays: use item= with one of {', '.join(map(str, trees))}")
    return item, trees[item]


def _leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    found = jax.tree.leaves_with_path(tree)
    return {tuple(map(_key, p)): leaf for p, leaf in found if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}


def _key(entry: Any) -> str:
    return jax.tree_util.keystr((entry,), simple=True)


def _matches(
    params: Mapping[str, Param], mapping: Mapping[str, str | None], stored: Mapping[tuple[str, ...], Any]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Declared path -> stored keys, and every leaf and pattern that finds nothing."""
    by_name = {".".join(keys): keys for keys in stored}
    unused = [p for p in mapping if not fnmatch.filter(params, p)]
    problems = [f"mapping: {pattern!r} matches no declared leaf" for pattern in unused]
    chosen: dict[str, tuple[str, ...]] = {}
    for path in params:
        pattern = next((p for p in mapping if fnmatch.fnmatchcase(path, p)), None)
        if pattern is None:
            problems.append(f"{path}: declared, and no pattern of the mapping matches it")
            continue
        target = mapping[pattern]
        if target is None:
            continue
        source = _renamed(path, pattern, target)
        if source in by_name:
            chosen[path] = by_name[source]
        else:
            problems.append(f"{path}: is {source!r} by the mapping, which is not stored ({_near(source, by_name)})")
    return chosen, problems


def _renamed(path: str, pattern: str, target: str) -> str:
    found = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), path)
    parts = list(found.groups()) if found else []
    return re.sub(r"\*", lambda _: parts.pop(0) if parts else "*", target)


def _near(name: str, names: Iterable[str]) -> str:
    last = name.rpartition(".")[2]
    near = [n for n in names if n.rpartition(".")[2] == last] or list(names)
    return f"there are {', '.join(near[:3])}" + (", ..." if len(near) > 3 else "")


def _misfits(
    params: Mapping[str, Param], chosen: Mapping[str, tuple[str, ...]], stored: Mapping[Any, Any], *, cast: bool
) -> list[str]:
    problems = []
    for path, keys in chosen.items():
        param, there, name = params[path], stored[keys], ".".join(keys)
        if tuple(there.shape) != param.shape:
            problems.append(f"{path}: {name} is stored with shape {list(there.shape)}, declared {list(param.shape)}")
        dtype = np.dtype(there.dtype)
        if dtype != param.dtype and not (cast and _is_float(dtype) and _is_float(param.dtype)):
            problems.append(
                f"{path}: {name} is stored as {dtype.name}, declared {param.dtype.name}: pass dtype= to cast"
            )
    return problems


def _read(root: Path, item: str | None, tree: Any, targets: Mapping[tuple[str, ...], list]) -> dict[str, Array]:
    """The leaves by declared path; a stored array that several leaves take is read once for each."""
    live = {}
    for turn in range(max(map(len, targets.values()), default=0)):
        wanted = {keys: found[turn] for keys, found in targets.items() if turn < len(found)}

        def target(path: tuple, _: Any, wanted: Mapping = wanted) -> Any:
            keys = tuple(map(_key, path))
            return wanted[keys][1] if keys in wanted else ocp.PLACEHOLDER

        read = _leaves(ocp.load(root, jax.tree_util.tree_map_with_path(target, tree), checkpointable_name=item))
        live.update({leaf: read[keys] for keys, (leaf, _) in wanted.items()})
    return live
