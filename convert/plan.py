"""The check before any weight is read: what each tensor of a source becomes, or every reason why it cannot be.

Only headers are looked at, except for tied tensors, whose equality `check_ties` reads before anything is written.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardzoo.checkpoints.forms import quantized_leaves
from shardzoo.checkpoints.grid import SMALL_LEAF, LeafSpec
from shardzoo.checkpoints.manifest import CARRIED, canonical
from shardzoo.convert import bundle, recognise
from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.finding import best_match, find_family, find_layout, looks, whole_prefix, without_prefix
from shardzoo.convert.names import batched_names
from shardzoo.convert.rules import Expected, Piece, expand, expected, gaps, last_layer, unit
from shardzoo.convert.source import Source, TensorInfo, row_blocks
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import layout as zoo_layout
from shardzoo.zoo import quantize as quantization
from shardzoo.zoo.families import config_to_json
from shardzoo.zoo.layout import LAYER, Param

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for kind, names in {
        ml_dtypes.bfloat16: ("bf16", "bfloat16"),
        np.float16: ("f16", "fp16", "float16"),
        np.float32: ("f32", "fp32", "float32"),
        ml_dtypes.float8_e4m3fn: ("float8_e4m3fn",),
        ml_dtypes.float8_e5m2: ("float8_e5m2",),
    }.items()
    for name in names
}
_FLOATS = frozenset(
    np.dtype(kind)
    for kind in (
        np.float16,
        np.float32,
        np.float64,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
    )
)
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
MOST_LAYERS = 1000  # that a config is compared with whatever the source has
_TIE_BLOCK = 8 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafPlan:
    """One array to be written, and the pieces it is made of; `dtype` is that of the source's tensors.

    The values of a quantized weight name the leaf of its `scales`, which is made of no pieces but of these values.
    """

    spec: LeafSpec
    dtype: np.dtype
    pieces: tuple[Piece, ...]
    scales: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes that an element takes on its way, once read: what is written, and what it is quantized from."""
        return self.spec.dtype.itemsize + (self.dtype.itemsize if self.scales else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a conversion does; made from headers alone.

    Attributes:
        family, config, declared: the model, as the zoo knows it.
        layout, prefix: how the source names its tensors; what was taken off all its keys.
        leaves: path -> what is written there; tensors that are only carried are at "carried/<key>".
        aliases: key -> key whose equal values are stored (tied weights).
        carried: key -> why a tensor that the model does not run is stored.
        skipped: key -> why a tensor is not stored.
        cast: dtype that floating-point parameters are cast to, or None.
        quantized: what weights are quantized to ("int8", "fp8"), or None.
        tensors: the source's tensors.
        notes: remarks for the user.
    """

    family: str
    config: Any
    declared: Any
    layout: str
    prefix: str
    leaves: Mapping[str, LeafPlan]
    aliases: Mapping[str, str]
    carried: Mapping[str, str]
    skipped: Mapping[str, str]
    cast: np.dtype | None
    quantized: str | None
    tensors: Mapping[str, TensorInfo]
    notes: tuple[str, ...]

    @property
    def bytes_read(self) -> int:
        """Bytes of the tensors that are stored."""
        kept = (info for key, info in self.tensors.items() if key not in self.skipped and key not in self.aliases)
        return sum(info.nbytes for info in kept)

    @property
    def bytes_written(self) -> int:
        """Bytes of the values written, without checksums and metadata."""
        return sum(leaf.spec.nbytes for leaf in self.leaves.values())

    def digest(self) -> str:
        """Hex SHA-256 of everything that decides what is written; two runs with equal digests write the same."""
        content = {
            "family": self.family,
            "config": config_to_json(self.config),
            "layout": [self.layout, self.prefix],
            "leaves": {path: _leaf_json(leaf) for path, leaf in self.leaves.items()},
            "other": [dict(self.aliases), dict(self.carried), dict(self.skipped)],
        }
        return hashlib.sha256(canonical(content)).hexdigest()


def _leaf_json(leaf: LeafPlan) -> list[Any]:
    spec = leaf.spec
    pieces = [dataclasses.astuple(piece) for piece in leaf.pieces]
    return [spec.dims, spec.shape, spec.dtype.name, leaf.dtype.name, spec.unit, pieces]


def parse_dtype(name: str | np.dtype | None) -> np.dtype | None:
    """The dtype to cast to, from the names that users write.

    Raises:
        InputError: not a floating-point dtype that is cast to; the message lists those that are.
    """
    if name is None or name in DTYPES.values():
        return None if name is None else np.dtype(name)
    if str(name).lower() not in DTYPES:
        raise InputError(f"dtype={str(name)!r} is not one to cast to: use one of {', '.join(DTYPES)}, or leave it out")
    return DTYPES[str(name).lower()]


def make_plan(
    source: Source,
    *,
    family: str | None = None,
    component: str | None = None,
    dtype: str | np.dtype | None = None,
    config: str | Path | None = None,
    prefix: str | None = None,
    quantize: str | None = None,
) -> Plan:
    """Matches every tensor of `source` with the rules of its family.

    Args:
        source: an opened source; only its headers are used.
        family: name of the family, where the config does not tell.
        component: part of a multimodal source to convert; its other parts are left out instead of carried along. Of
            a file of several models (`convert.bundle`) the one to convert.
        dtype: what floating-point parameters are cast to; by default every tensor keeps its bits.
        config: a config.json to use instead of the one beside the weights.
        prefix: what to take off the front of every key.
        quantize: "int8" or "fp8" for the weights that `zoo.quantize` chooses.

    Raises:
        InputError: everything that does not fit, in one message, with what the source looks like instead.
    """
    cast = parse_dtype(dtype)
    if beside := recognise.adapters_beside(source.tensors):
        raise InputError(
            f"{source.root}: is a model that PEFT has wrapped, saved whole: {len(beside)} tensors of adapters"
            f" ({batched_names(beside, 3)}) stand beside the weights that they change: in PEFT, save the adapter by"
            " model.save_pretrained(), which --lora takes, and convert what model.unload() gives; or convert what"
            " model.merge_and_unload() gives"
        )
    if wrapped := recognise.without_inner_wrappers(source.tensors):
        bare = source.named(wrapped)
        plan = make_plan(
            bare, family=family, component=component, dtype=dtype, config=config, prefix=prefix, quantize=quantize
        )
        source.config, source.config_text = bare.config, bare.config_text  # it may have been set aside
        return _renamed(plan, source, wrapped)
    whole, (source, left) = source, bundle.choose(source, component)
    rules, given = find_family(source, family=family, config=config)
    try:
        zoo_config = rules.read_config(given, without_prefix(source, rules, prefix))
        declared = rules.declare(zoo_config)
    except InputError as error:
        raise InputError(f"{source.root}: {error}\n  its tensors look like: {looks(source)}") from None
    params = zoo_layout.named(declared)
    _check_counts(source, rules, params, prefix)
    layout, found_prefix = find_layout(source, rules, params, prefix)
    if left:
        component, whole.config, whole.config_text = None, source.config, source.config_text
    plan = _match(source, rules, zoo_config, declared, layout, found_prefix, component, cast)
    if left:
        plan = _without(plan, whole, left)
    return plan if quantize is None else quantized(plan, quantize)


def _renamed(plan: Plan, source: Source, key_of: Mapping[str, str]) -> Plan:
    """The plan of a source under other keys as one of the source itself."""

    def place(path: str) -> str:
        start, _, key = path.partition("/")
        return f"{CARRIED}/{key_of[key]}" if start == CARRIED and key in key_of else path

    def leaf(one: LeafPlan) -> LeafPlan:
        pieces = [dataclasses.replace(p, target=place(p.target), source=key_of[p.source]) for p in one.pieces]
        return dataclasses.replace(one, pieces=tuple(pieces))

    return dataclasses.replace(
        plan,
        leaves={place(path): leaf(one) for path, one in plan.leaves.items()},
        aliases={key_of[key]: key_of[of] for key, of in plan.aliases.items()},
        carried={key_of[key]: why for key, why in plan.carried.items()},
        skipped={key_of[key]: why for key, why in plan.skipped.items()},
        tensors=source.tensors,
        notes=(*plan.notes, "names of wrappers inside of keys (_orig_mod and the like) were taken off"),
    )


def _without(plan: Plan, whole: Source, left: Mapping[str, str]) -> Plan:
    """The plan of one model of a file, as one of the whole file with the other models left out."""
    reasons = ", ".join(dict.fromkeys(left.values()))
    note = f"{len(left)} tensors left out: {reasons}"
    return dataclasses.replace(plan, tensors=whole.tensors, skipped={**plan.skipped, **left}, notes=(*plan.notes, note))


def _check_counts(source: Source, rules: FamilyRules, params: Mapping[str, Param], prefix: str | None) -> None:
    """Refuses a config of a model so much larger than the source that even its pieces would be too many to compare.

    Raises:
        InputError: more layers than there are tensors, or leaves in more places than a tensor has rows.
    """
    title = f"{source.root}: its config.json is not of these weights"
    match = best_match(source, rules)
    most = max((param.size(LAYER) for param in params.values() if LAYER in param.names), default=0)
    if most > max(len(source.tensors), MOST_LAYERS):
        found = whole_prefix(prefix) if prefix is not None else match.prefix if match else ""
        there = _layers(source, rules, params, match.layout, found) if match else set()
        counts = [_layers_apart(*pair) for pair in sorted(there)]
        said = f"it says {most} layers, and there are {len(source.tensors)} tensors, which look like: {looks(source)}"
        fail_if(counts or [said], title)
    rows = max((info.shape[0] for info in source.tensors.values() if info.shape), default=0)
    for rule in rules.rules_in(match.layout) if match else ():
        if rule.each and rule.target in params and len([*itertools.islice(rule.each(params), rows + 1)]) > rows:
            raise InputError(f"{title}: {rule.target} would lie in more places than any tensor has rows ({rows})")


def _layers_apart(there: int, declared: int) -> str:
    return f"the file has layers 0 to {there - 1}, the config says {declared}: they are of different models"


@dataclasses.dataclass(frozen=True)
class _Sorting:
    """Where each tensor goes: to leaves (`wanted`), or aside."""

    wanted: dict[str, Expected]
    aliases: dict[str, str]
    carried: dict[str, str]
    skipped: dict[str, str]
    extra: list[str]


def _sort(
    source: Source,
    rules: FamilyRules,
    params: Mapping[str, Param],
    layout: Layout,
    prefix: str,
    component: str | None,
) -> _Sorting:
    kind, unused_keys = rules.rules_in(layout), rules.unused_in(layout)
    wanted = {prefix + key: value for key, value in expected(kind, params, layout.roots).items()}
    of_leaf = {rule.target: prefix + rule.source.format(layer="", **layout.roots) for rule in kind}
    ties = {prefix + key.format(**layout.roots): of_leaf[leaf] for key, leaf in rules.ties_in(layout).items()}
    sorting = _Sorting(wanted, {}, {}, {}, [])
    for key in source.tensors:
        part = next((p for start, p in layout.other.items() if key.startswith(prefix + start)), None)
        bare = key.removeprefix(prefix)
        unused = next((why for pattern, why in unused_keys.items() if re.fullmatch(pattern, bare)), None)
        if key in wanted:
            continue
        if key in ties and ties[key] in wanted:
            sorting.aliases[key] = ties[key]
        elif part is not None and component is None:
            sorting.carried[key] = f"part {part!r} is not run by family {rules.family}"
        elif part is not None:
            sorting.skipped[key] = f"part {part!r} was left out: component={component!r}"
        elif unused is not None:
            sorting.carried[key] = unused
        else:
            sorting.extra.append(key)
    return sorting


def _match(
    source: Source,
    rules: FamilyRules,
    config: Any,
    declared: Any,
    layout: Layout,
    prefix: str,
    component: str | None,
    cast: np.dtype | None,
) -> Plan:
    params = zoo_layout.named(declared)
    if component not in (None, rules.part):
        raise InputError(
            f"component={component!r} is not one that family {rules.family} runs: use {rules.part!r}, or leave it out"
        )
    sorting = _sort(source, rules, params, layout, prefix, component)
    pieces = [
        dataclasses.replace(p, source=prefix + p.source) for p in expand(rules.rules_in(layout), params, layout.roots)
    ]
    by_leaf: dict[str, list[Piece]] = {path: [] for path in params}
    for piece in pieces:
        by_leaf[piece.target].append(piece)
    homeless = {
        path: "none of its tensors is this, which the config declares" for path, own in by_leaf.items() if not own
    }
    problems = _misfits(source, sorting, config) + _dtype_problems(source, by_leaf, cast) + grouped(homeless)
    if problems:
        _refuse_quantized(source, sorting.extra)
        title = f"{source.root}: does not fit family {rules.family} in layout {layout.name!r}"
        fail_if(problems + _advice(source, sorting, rules, params, layout, prefix), title)
    wrong = gaps(pieces, params)
    if wrong:
        raise ValueError(f"rules of family {rules.family}: " + "; ".join(wrong))
    leaves = {path: _leaf_plan(source, params[path], by_leaf[path], cast) for path in params}
    leaves |= {f"{CARRIED}/{key}": _carried_plan(source.tensors[key]) for key in sorting.carried}
    return Plan(
        family=rules.family,
        config=config,
        declared=declared,
        layout=layout.name,
        prefix=prefix,
        leaves=leaves,
        aliases=sorting.aliases,
        carried=sorting.carried,
        skipped=sorting.skipped,
        cast=cast,
        quantized=None,
        tensors=source.tensors,
        notes=(*source.notes, *_remarks(sorting, prefix)),
    )


def _refuse_quantized(source: Source, extra: list[str]) -> None:
    """Names the format of weights that others have quantized, in place of each of its keys.

    Raises:
        InputError: they look like that.
    """
    seems = looks(source)
    if extra and seems.startswith("a quantized export"):
        raise InputError(
            f"{source.root}: holds {seems} ({batched_names(extra, 3)}), which is not read: give the weights that it was"
            " made from, and quantize those by quantize= (--quantize)"
        )


def _remarks(sorting: _Sorting, prefix: str) -> list[str]:
    notes = [f"all keys start with {prefix!r}, which was taken off"] if prefix else []
    for verb, table in (("stored but not run", sorting.carried), ("left out", sorting.skipped)):
        reasons = dict.fromkeys(table.values())
        notes += [f"{sum(r == why for r in table.values())} tensors {verb}: {why}" for why in reasons]
    return notes + [f"{key} is tied to {of} and stored once" for key, of in sorting.aliases.items()]


def _leaf_plan(source: Source, param: Param, pieces: list[Piece], cast: np.dtype | None) -> LeafPlan:
    dtype = source.tensors[pieces[0].source].dtype
    spec = LeafSpec.of(dataclasses.replace(param, dtype=cast or dtype))
    if spec.nbytes > SMALL_LEAF:
        # A file of a large leaf lies in one piece; small leaves are one file, put together in memory.
        spec = dataclasses.replace(spec, unit=unit(pieces, param.shape))
    return LeafPlan(spec=spec, dtype=dtype, pieces=tuple(pieces))


def _carried_plan(info: TensorInfo) -> LeafPlan:
    dims = tuple(f"d{i}" for i in range(len(info.shape)))
    whole = tuple((0, size) for size in info.shape)
    return LeafPlan(
        spec=LeafSpec(dims=dims, shape=info.shape, dtype=info.dtype),
        dtype=info.dtype,
        pieces=(Piece(f"{CARRIED}/{info.key}", whole, info.key, whole),),
    )


def quantized(plan: Plan, kind: str) -> Plan:
    """The plan with the weights that `zoo.quantize` chooses stored as values and scales; a note where it chooses none.

    Raises:
        InputError: an unknown kind.
    """
    if not quantization.quantizable(plan.declared, kind):
        note = f"nothing was quantized: family {plan.family} has no linear layers in stacked blocks"
        return dataclasses.replace(plan, notes=(*plan.notes, note))
    params = zoo_layout.named(plan.declared)
    typed = {path: dataclasses.replace(param, dtype=plan.leaves[path].spec.dtype) for path, param in params.items()}
    declared = quantization.declare(zoo_layout.fill(plan.declared, typed), kind)
    new = zoo_layout.named(declared)
    leaves = dict(plan.leaves)
    for root, (values, scales) in quantized_leaves(new).items():
        leaves[values] = _values_plan(leaves.pop(root), new[values], values, scales, new[scales].ndim)
        leaves[scales] = LeafPlan(spec=LeafSpec.of(new[scales]), dtype=new[scales].dtype, pieces=())
    ordered = {path: leaves[path] for path in dict.fromkeys((*new, *leaves))}
    return dataclasses.replace(plan, declared=declared, leaves=ordered, quantized=kind)


def _values_plan(whole: LeafPlan, param: Param, values: str, scales: str, outputs: int) -> LeafPlan:
    """The plan of the values: each of its files holds whole rows, for a scale is that of all inputs of an output."""
    pieces = tuple(dataclasses.replace(piece, target=values) for piece in whole.pieces)
    spec = dataclasses.replace(LeafSpec.of(param), rows=outputs)
    if spec.nbytes > SMALL_LEAF:
        spec = dataclasses.replace(spec, unit=(*unit(pieces, param.shape)[:outputs], *param.shape[outputs:]))
    return LeafPlan(spec=spec, dtype=whole.dtype, pieces=pieces, scales=scales)


def _misfits(source: Source, sorting: _Sorting, config: Any) -> list[str]:
    missing = {
        key: f"missing, of shape {want.made_of}" for key, want in sorting.wanted.items() if key not in source.tensors
    }
    extra = {key: f"not known, of shape {source.tensors[key].shape}" for key in sorting.extra}
    shapes = {
        key: f"shape {source.tensors[key].shape}, expected {want.shape} = {want.made_of}"
        for key, want in sorting.wanted.items()
        if key in source.tensors and source.tensors[key].shape != want.shape
    }
    ties = {
        key: f"shape {source.tensors[key].shape} or dtype differs from {of}, to which the config ties it"
        for key, of in sorting.aliases.items()
        if of in source.tensors and _kind(source.tensors[key]) != _kind(source.tensors[of])
    }
    return [line for table in (missing, shapes, ties, extra) for line in grouped(table)]


def _kind(info: TensorInfo) -> tuple[Any, ...]:
    return info.shape, info.dtype


def grouped(problems: Mapping[str, str]) -> list[str]:
    """One line for each kind of key and problem: keys that differ in their first number share a line."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for key, problem in problems.items():
        match = _NUMBER.search(key)
        before, after = (key[: match.start()], key[match.end() :]) if match else (key, "")
        lines.setdefault((before, after, problem), []).extend([int(match.group())] if match else [])
    return [f"{before}{_ranges(numbers)}{after}: {problem}" for (before, after, problem), numbers in lines.items()]


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if not runs or text.isdigit() else f"{{{text}}}"


def _dtype_problems(source: Source, by_leaf: Mapping[str, list[Piece]], cast: np.dtype | None) -> list[str]:
    problems: dict[str, str] = {}
    mixed = []
    for path, pieces in by_leaf.items():
        found = {p.source: source.tensors[p.source].dtype for p in pieces if p.source in source.tensors}
        problems |= {
            key: f"dtype {dtype.name} is not floating point of 8 or more bits"
            for key, dtype in found.items()
            if dtype not in _FLOATS
        }
        kinds = sorted({dtype.name for dtype in found.values() if dtype in _FLOATS})
        if len(kinds) > 1 and cast is None:
            rare = min(kinds, key=lambda name: sum(dtype.name == name for dtype in found.values()))
            few = grouped({key: f"dtype {rare}" for key, dtype in found.items() if dtype.name == rare})
            mixed.append(
                f"{path}: its tensors have the dtypes {' and '.join(kinds)} ({'; '.join(few)}): pass dtype= (--dtype)"
            )
    return grouped(problems) + mixed


def _advice(
    source: Source,
    sorting: _Sorting,
    rules: FamilyRules,
    params: Mapping[str, Param],
    layout: Layout,
    prefix: str,
) -> list[str]:
    """What the misfits together suggest."""
    lines = []
    for there, declared in sorted(_layers(source, rules, params, layout, prefix)):
        lines.append(_layers_apart(there, declared))
    for tie, leaf in rules.ties_in(layout).items():
        key = prefix + tie.format(**layout.roots)
        if key in sorting.wanted and key not in source.tensors:
            lines.append(
                f"{key}: the config does not tie it to {leaf}, so it must be there:"
                ' the file is of a base model, or "tie_word_embeddings": true is missing in its config.json'
            )
    if sorting.extra:
        lines.append(f"its tensors look like: {looks(source)}")
    return lines


def _layers(
    source: Source, rules: FamilyRules, params: Mapping[str, Param], layout: Layout, prefix: str
) -> set[tuple[int, int]]:
    """Numbers of layers that the source has of something, and that the config says, where they differ."""
    found: set[tuple[int, int]] = set()
    taking_turns: list[tuple[int, int]] = []
    for rule in rules.rules_in(layout):
        last = last_layer(rule, params) if rule.target in params else None
        if last is None:
            continue
        ends = (part.format(**layout.roots) for part in rule.source.split("{layer}"))
        pattern = re.compile(re.escape(prefix) + r"(\d+)".join(map(re.escape, ends)))
        numbers = [int(match[1]) for key in source.tensors if (match := pattern.fullmatch(key))]
        counts = (max(numbers, default=-1) + 1, last + 1)
        if rule.number is not None:
            taking_turns.append(counts)
        elif numbers:
            found.add(counts)
    if taking_turns:  # only all kinds of layers together tell how many there are
        found.add((max(there for there, _ in taking_turns), max(here for _, here in taking_turns)))
    return {(there, here) for there, here in found if there and there != here}


def check_ties(source: Source, plan: Plan) -> None:
    """Reads the tensors that the config ties and compares their bits.

    Raises:
        InputError: two differ; the message names them and the first row that differs.
    """
    problems = []
    for key, of in plan.aliases.items():
        if source.tensors[key].memory == source.tensors[of].memory:
            continue
        row = _first_difference(source, key, of)
        if row is not None:
            problems.append(
                f"{key}: differs from {of} in row {row}, but the config ties them (tie_word_embeddings):"
                ' set "tie_word_embeddings": false in config.json if both were trained'
            )
    fail_if(problems, f"{source.root}: tied tensors are not equal")


def _first_difference(source: Source, key: str, of: str) -> int | None:
    info = source.tensors[key]
    for rows in row_blocks(info, _TIE_BLOCK):
        one, other = (source.read(k, rows).reshape(-1).view(np.uint8) for k in (key, of))
        if not np.array_equal(one, other):
            start, count = (rows.start, rows.stop - rows.start) if rows else (0, 1)
            return start + int(np.argmax(one != other)) * count // one.size
        source.release(key, rows)
        source.release(of, rows)
    return None
