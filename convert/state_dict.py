"""Which dict inside a PyTorch file holds the weights.

The rule: a dict that holds tensors under its own keys is the state dict. A dict that only holds other containers is
a wrapper: those of its children that hold tensors, what optimizers and the like keep aside, are the candidates; a
single one is entered (and the rule applied to it again), several are listed and the user selects one. Single numbers
and generators' states beside a wrapper are no state dict.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardzoo.convert.names import batched_names, name_problem, shown
from shardzoo.convert.pickle_calls import Opaque, RebuiltTensor
from shardzoo.errors import InputError

# State of training, never weights to convert.
TRAINING_STATE = frozenset(
    [
        "optim",
        "opt",
        "lr_scheduler",
        "lr_schedulers",
        "scheduler",
        "sched",
        "scaler",
        "grad_scaler",
        "amp",
        "rng",
        "callbacks",
        "loops",
        "hparams",
        "hyper_parameters",
        "args",
        "config",
    ]
)
# Names under which a file may hold several versions of the weights side by side.
WRAPPERS = frozenset(
    [
        "state_dict",
        "model_state_dict",
        "model",
        "module",
        "net",
        "network",
        "generator",
        "params",
        "weights",
        "ema",
        "ema_state_dict",
        "model_ema",
        "ema_model",
        "params_ema",
        "g_ema",
        "student",
        "teacher",
    ]
)
MAX_NODES = 2_000_000
MAX_DEPTH = 64
MAX_TENSORS = 250_000
MAX_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The tensors of the state dict, the keys that lead to it, and remarks on what was left out."""

    tensors: Mapping[str, RebuiltTensor]
    wrapper: tuple[str, ...]
    notes: list[str]


def select_tensors(root: Any, where: str, select: str | None = None) -> Selected:
    """The state dict inside an unpickled value.

    Args:
        select: path of keys joined by "/"; "/" alone takes the whole file. Nested names are joined by ".".

    Raises:
        InputError: no tensors, several candidates, or a selection that is not there.
    """
    counts = _TensorCounts(where)
    if isinstance(root, RebuiltTensor):
        raise InputError(f"{where}: holds a single tensor without a name: save a dict of names to tensors")
    if not counts.of(root):
        raise InputError(f"{where}: holds no tensors (its top level is a {_kind(root)})")
    path = _enter(root, where, counts) if select is None else _follow(root, where, select)
    value = root
    for key in path:
        value = _children(value, where)[key]
    if not isinstance(value, dict | list | tuple):
        raise InputError(f"{where}: {'/'.join(path)} is a {_kind(value)}, not a dict of tensors")
    tensors, left_out, count = _flatten(value, where)
    if not tensors:
        raise InputError(f"{where}: {'/'.join(path) or '/'} holds no tensors")
    notes = [f"{where}: read from the wrapper {'/'.join(path)}"] if path else []
    beside = _beside(root, path, where, counts)
    if beside:
        notes.append(f"{where}: not read: {batched_names(beside, 10)}")
    if left_out:
        notes.append(f"{where}: no tensors, left out: {batched_names(left_out, MAX_LISTED, count)}")
    return Selected(tensors=tensors, wrapper=path, notes=notes)


def _children(value: Any, where: str) -> Mapping[str, Any]:
    """The parts of a container by name; empty for anything else."""
    if isinstance(value, dict):
        named = {key if isinstance(key, str) else shown(str(key)): part for key, part in value.items()}
        if len(named) != len(value):
            raise InputError(f"{where}: two keys of a dict differ only in type")
        return named
    if isinstance(value, list | tuple):
        return {str(number): part for number, part in enumerate(value)}
    return {}


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


class _TensorCounts:
    """How many tensors lie inside each container, each container visited once however often it is shared."""

    def __init__(self, where: str):
        self._where = where
        self._counts: dict[int, int] = {}

    def of(self, value: Any) -> int:
        if isinstance(value, RebuiltTensor):
            return 1
        if id(value) not in self._counts and isinstance(value, dict | list | tuple):
            self._count(value)
        return self._counts.get(id(value), 0)

    def _count(self, root: Any) -> None:
        """Post-order over containers with a stack of our own; a container met inside itself counts as empty there."""
        stack: list[tuple[Any, Iterator[Any]]] = [(root, _parts(root))]
        self._start(root)
        nodes = 0
        while stack:
            value, parts = stack[-1]
            for part in parts:
                nodes += 1
                if isinstance(part, RebuiltTensor):
                    self._add(value, 1)
                elif isinstance(part, dict | list | tuple):
                    if id(part) in self._counts:
                        self._add(value, self._counts[id(part)])
                    else:
                        self._start(part)
                        stack.append((part, _parts(part)))
                        break
            else:
                stack.pop()
                if stack:
                    self._add(stack[-1][0], self._counts[id(value)])
            if nodes > MAX_NODES or len(stack) > MAX_DEPTH:
                raise InputError(
                    f"{self._where}: holds more than {MAX_NODES} values, or nests deeper than {MAX_DEPTH}:"
                    " this is no state dict"
                )

    def _start(self, value: Any) -> None:
        self._counts[id(value)] = 0

    def _add(self, value: Any, count: int) -> None:
        # Parts shared level upon level would make the sum a number of millions of digits.
        self._counts[id(value)] = min(self._counts[id(value)] + count, 10**9)


def _is_training_state(key: str) -> bool:
    lowered = key.lower()
    return lowered in TRAINING_STATE or lowered.startswith(("optim", "lr_sched", "rng_", "random_"))


def _enter(root: Any, where: str, counts: _TensorCounts) -> tuple[str, ...]:
    path: list[str] = []
    value = root
    while True:
        children = {key: part for key, part in _children(value, where).items() if counts.of(part)}
        direct = {key for key, part in children.items() if isinstance(part, RebuiltTensor)}
        nested = [key for key in children if key not in direct and not _is_training_state(key)]
        if direct and not isinstance(value, dict):
            raise InputError(f"{where}: holds {len(direct)} tensors in a {_kind(value)}, without names: save a dict")
        if direct:
            wrappers = [key for key in nested if key in WRAPPERS]
            if not wrappers:
                return tuple(path)
            if nested != wrappers or len(nested) > 1 or not all(_is_aside(key, children[key]) for key in direct):
                _refuse(where, path, children, wrappers, counts, f"beside {len(direct)} tensors of its own")
        if len(nested) != 1:
            _refuse(where, path, children, nested, counts, "")
        path.append(nested[0])
        if problem := name_problem("/".join(path)):
            raise InputError(f"{where}: {problem}")
        value = children[nested[0]]


def _is_aside(key: str, tensor: RebuiltTensor) -> bool:
    """Whether this is a step, a loss or a generator's state: no model is made of such tensors alone."""
    return not tensor.size or _is_training_state(key) or "rng" in key.lower().split("_")


def _refuse(
    where: str, path: list[str], children: Mapping[str, Any], names: list[str], counts: _TensorCounts, beside: str
) -> None:
    found = names or list(children)
    listed = [f"{'/'.join([*path, key])} ({counts.of(children[key])} tensors)" for key in found]
    inside = f" under {'/'.join(path)}" if path else ""
    what = "several things that may be the weights" if names else "tensors only where training state is kept"
    raise InputError(
        f"{where}: holds {what}{inside}{' ' + beside if beside else ''}: {batched_names(listed, 12)}:"
        f" choose one by select= (--select), such as select={'/'.join([*path, found[0]])!r}"
        " (select='/' is the whole file)"
    )


def _follow(root: Any, where: str, select: str) -> tuple[str, ...]:
    """Splits a selection into keys; a key may itself hold "/", so the longest that fits is taken."""
    path: list[str] = []
    value, rest = root, [part for part in select.split("/") if part]
    while rest:
        children = _children(value, where)
        taken = next((n for n in range(len(rest), 0, -1) if "/".join(rest[:n]) in children), 0)
        if not taken:
            names = batched_names([key for key, part in children.items() if isinstance(part, dict | list | tuple)], 12)
            at = "/".join(path) or "/"
            raise InputError(f"{where}: select={select!r}: {at} holds no {rest[0]!r} (it holds {names or 'no dicts'})")
        path.append("/".join(rest[:taken]))
        value, rest = children[path[-1]], rest[taken:]
    return tuple(path)


def _flatten(value: Any, where: str) -> tuple[dict[str, RebuiltTensor], list[str], int]:
    """Tensors by their names joined with "."; the first names of what else there is, and how many."""
    tensors: dict[str, RebuiltTensor] = {}
    left_out: list[str] = []
    count, nodes = 0, len(value)
    stack = [("", iter(_children(value, where).items()))]
    while stack:
        prefix, parts = stack[-1]
        for key, part in parts:
            name = prefix + key
            if problem := name_problem(name):
                raise InputError(f"{where}: {problem}")
            if isinstance(part, dict | list | tuple):
                nodes += 1 + len(part)
                if nodes > MAX_NODES or len(stack) > MAX_DEPTH:
                    raise InputError(f"{where}: holds the same parts over and over, {MAX_NODES} values and more")
                stack.append((name + ".", iter(_children(part, where).items())))
                break
            if not isinstance(part, RebuiltTensor):
                count += 1
                left_out += [f"{name} ({_kind(part)})"] if count <= MAX_LISTED else []
            elif name in tensors:
                raise InputError(f"{where}: two tensors are named {name!r} once their keys are joined by '.'")
            else:
                tensors[name] = part
                if len(tensors) > MAX_TENSORS:
                    raise InputError(f"{where}: holds more than {MAX_TENSORS} tensors")
        else:
            stack.pop()
    return tensors, left_out, count


def _kind(value: Any) -> str:
    if isinstance(value, RebuiltTensor):
        return "tensor"
    return value.name if isinstance(value, Opaque) else type(value).__name__


def _beside(root: Any, path: tuple[str, ...], where: str, counts: _TensorCounts) -> list[str]:
    """Other containers with tensors on the way to the chosen one."""
    found = []
    value = root
    for depth, key in enumerate(path):
        children = _children(value, where)
        found += [
            f"{'/'.join([*path[:depth], other])} ({counts.of(part)} tensors)"
            for other, part in children.items()
            if other != key and counts.of(part)
        ]
        value = children[key]
    return found
