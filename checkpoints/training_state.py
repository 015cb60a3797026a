"""The state of a training run: what makes two runs the same from here on, and what the manifest says of it."""

import dataclasses as dc
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from shardzoo.checkpoints.manifest import OPT_STATE, Json
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo.layout import named
from shardzoo.zoo.mesh import Degrees
from shardzoo.zoo.optimizer_state import trainable_part


@jax.tree_util.register_dataclass
@dc.dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything that a run needs to go on as if it had not stopped; a pytree.

    Attributes:
        model: the live module.
        opt_state: the optimizer's state of it, split like its parameters (`zoo.optimizer_state`).
        step: how many steps have been taken, an int32 scalar.
        key: the PRNG key of the next step, typed or raw.
        data: where the data stream goes on, JSON (a number of examples, a file and an offset): the first example that
            no step has seen. None where the step tells it.
    """

    model: Any
    opt_state: Any
    step: Any
    key: Any
    data: Any = None


def step_of(state: TrainingState) -> int:
    """The number of steps taken; waits until the state's last step is computed."""
    return int(_on_host(state.step))


def checked_step(step: Any) -> int:
    """A number of steps as a plain number.

    Raises:
        InputError: not a whole number from 0.
    """
    if isinstance(step, bool) or not isinstance(step, numbers.Integral) or step < 0:
        raise InputError(f"training state: step={step!r} is not a whole number from 0: give the steps taken")
    return int(step)


def _on_host(value: Any) -> Shaped[np.ndarray, "..."]:
    """A small array that every device holds whole, also one of a mesh of several processes."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return np.asarray(value.addressable_data(0))
    return np.asarray(value)


def json_position(data: Any) -> Any:
    """The data position as JSON; arrays without dims, as a jitted step returns them, become numbers.

    Raises:
        InputError: something in it is not JSON.
    """
    if isinstance(data, Mapping):
        wrong = [key for key in data if not isinstance(key, str)]
        if not wrong:
            return {key: json_position(value) for key, value in data.items()}
        raise InputError(f"training state: data has the key {wrong[0]!r}, which is not JSON: use strings")
    if isinstance(data, list | tuple):
        return [json_position(value) for value in data]
    if isinstance(data, jax.Array | np.ndarray | np.generic) and data.ndim == 0:
        data = _on_host(data).item()
    if data is None or isinstance(data, str | bool | int) or (isinstance(data, float) and math.isfinite(data)):
        return data
    raise InputError(
        f"training state: data holds a {type(data).__name__}, which is not JSON: give the position as numbers and text"
    )


def json_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics as JSON; None stands for what is not finite.

    Raises:
        InputError: names that are not text, values that are not single numbers.
    """
    numbers, problems = {}, []
    for name, value in (metrics or {}).items():
        number = _number(value)
        if number is None or not isinstance(name, str):
            problems.append(f"metrics: {name!r}: {value!r} is not a number under a name of text: change it")
        else:
            numbers[name] = number
    fail_if(problems, "training state")
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _number(value: Any) -> float | None:
    """A Python float, of a number or an array of one; None if it is none."""
    host = _on_host(value)
    real = jnp.issubdtype(host.dtype, jnp.floating) or host.dtype.kind in "biu"
    return float(host.item()) if real and host.size == 1 else None


def json_key(key: Any) -> Json:
    """A PRNG key as JSON: its words, and of a typed key the name of its generator.

    Raises:
        InputError: not a key.
    """
    if not isinstance(key, jax.Array | np.ndarray):
        raise InputError(f"training state: key is a {type(key).__name__}: give the PRNG key of the next step")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = _on_host(jax.random.key_data(key) if typed else key)
    return {
        "generator": str(jax.random.key_impl(key)) if typed else None,
        "dtype": words.dtype.name,
        "shape": list(words.shape),
        "words": [int(w) for w in words.ravel()],
    }


def key_from_json(record: Json, mesh: Mesh) -> Array:
    """The PRNG key, whole on every device of `mesh`."""
    words = replicated(np.array(record["words"], record["dtype"]).reshape(record["shape"]), mesh)
    if record["generator"] is None:
        return words
    wrap = jax.jit(lambda w: jax.random.wrap_key_data(w, impl=record["generator"]), out_shardings=words.sharding)
    return wrap(words)


def replicated(value: Shaped[np.ndarray, "..."], mesh: Mesh) -> Array:
    """A small host array, whole on every device of `mesh`."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, PartitionSpec()), lambda at: value[at])


def structure(opt_state: Any) -> str:
    """The kinds of an optimizer's state, with no shapes and no parameters: what tells optimizers apart.

    "[ScaleByAdamState(count, mu, nu), EmptyState()]"; the trees of the parameters' own structure are left out, so that
    it is the same whichever parameters are trained.
    """
    if isinstance(opt_state, tuple) and hasattr(opt_state, "_fields"):
        parts = [_field(name, value) for name, value in zip(opt_state._fields, opt_state, strict=True)]
        return f"{type(opt_state).__name__}({', '.join(parts)})"
    if isinstance(opt_state, tuple | list):
        return f"[{', '.join(map(structure, opt_state))}]"
    if isinstance(opt_state, dict):
        return "{" + ", ".join(_field(name, value) for name, value in opt_state.items()) + "}"
    return ""


def _field(name: str, value: Any) -> str:
    inner = structure(value)
    return f"{name}={inner}" if inner else name


def trained_paths(declared: Any, trainable: str | Iterable[str] | None) -> list[str]:
    """The parameters that the optimizer is given, by path."""
    return list(named(trainable_part(declared, trainable)))


def about(
    *,
    step: int,
    data: Any,
    key: Any,
    mesh: Mesh,
    declared: Any,
    declared_state: Any,
    trained: list[str],
    metrics: dict[str, float | None],
    seconds: float,
) -> Json:
    """What a manifest says of a training run beside its leaves (`Manifest.training`)."""
    params = named(declared)
    splits = {**params, **{f"{OPT_STATE}/{path}": q for path, q in named(declared_state).items()}}
    return {
        "step": step,
        "data": data,
        "key": json_key(key),
        "mesh": str(Degrees.of(mesh)),
        "devices": mesh.size,
        "processes": len({d.process_index for d in mesh.devices.flat}),
        "rest": {path: dict(p.rest) for path, p in splits.items() if p.rest},
        "optimizer": structure(declared_state),
        "frozen": [path for path in params if path not in set(trained)],
        "metrics": metrics,
        "time": round(seconds, 3),
    }
