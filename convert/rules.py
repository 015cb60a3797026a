"""Conversion rules as data: which block of which source tensor becomes which block of which leaf.

A rule only slices and reshapes (row-major, never a transpose), so the same pieces, run backwards, give the source back
bit for bit. A family writes one `Rule` for each kind of tensor; `expand` makes the pieces of a model of given sizes.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from shardzoo.zoo.layout import LAYER, Param

Ranges = tuple[tuple[int, int], ...]
_ANY_LAYER = "\0"  # in no key
_GROUP = re.compile(r"\(([^)]*)\)|(\S+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of source tensor and the place of its values in the model.

    Attributes:
        target: path of the leaf.
        source: key of the tensor; `{layer}` counts the leaf's `layer` dim, other braces are roots of the layout.
        dims: what the source's dims are made of, in the leaf's names: "(heads head_dim) embed"; "()" is a dim of
            size 1 that the leaf does not have.
        at: index or (start, stop) in the leaf for dims that the source does not hold whole, such as `block`.
        start: source dim -> where in it the block begins, for tensors that pack several leaves: a number, or a product
            of numbers and dims of the model that are of one size in all leaves ("3 embed").
        each: leaves -> (at, start) of every place, in place of these two, for tensors that hold one leaf in as many
            places as it has heads.
        number: (index in the leaf's `layer` dim, all leaves) -> the number that `{layer}` stands for, where layers of
            several kinds take turns; None where it is the index.
    """

    target: str
    source: str
    dims: str
    at: Mapping[str, int | tuple[int, int]] = dataclasses.field(default_factory=dict)
    start: Mapping[int, int | str] = dataclasses.field(default_factory=dict)
    each: Callable[[Mapping[str, Param]], Iterable[tuple[Mapping, Mapping]]] | None = None
    number: Callable[[int, Mapping[str, Param]], int] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """One block on its way: `source[take]`, reshaped row-major, is `target[at]`."""

    target: str
    at: Ranges
    source: str
    take: Ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What the rules ask of one source tensor: its shape, and how that came about, for messages."""

    shape: tuple[int, ...]
    made_of: str


def groups(dims: str) -> list[list[str]]:
    """The names in each source dim: "(heads head_dim) embed" is [["heads", "head_dim"], ["embed"]]."""
    return [(grouped or single).split() for grouped, single in _GROUP.findall(dims)]


def expand(rules: Iterable[Rule], params: Mapping[str, Param], roots: Mapping[str, str]) -> list[Piece]:
    """The pieces of a model with these declared leaves, in the order of the rules, layer by layer.

    Rules whose leaf is not declared (an optional bias) give none.
    """
    sizes = _dim_sizes(params)
    return [piece for rule in _single(rules, params) for piece in _pieces(rule, params, roots, sizes)]


def _single(rules: Iterable[Rule], params: Mapping[str, Param]) -> Iterator[Rule]:
    """The rules whose leaf is declared, those of several places as one for each."""
    for rule in rules:
        if rule.target not in params:
            continue
        if rule.each is None:
            yield rule
            continue
        for at, start in rule.each(params):
            yield dataclasses.replace(rule, at=at, start=start, each=None)


def _layer_numbers(rule: Rule, params: Mapping[str, Param]) -> Iterator[int]:
    """What `{layer}` stands for in the source, for each index of the leaf's `layer` dim; none without that dim."""
    param = params[rule.target]
    indices = range(param.size(LAYER) if LAYER in param.names else 0)
    return (_layer_number(rule, index, params) for index in indices)


def _layer_number(rule: Rule, index: int, params: Mapping[str, Param]) -> int:
    return index if rule.number is None else rule.number(index, params)


def last_layer(rule: Rule, params: Mapping[str, Param]) -> int | None:
    """The last number that `{layer}` stands for in the source; None without a `layer` dim."""
    param = params[rule.target]
    size = param.size(LAYER) if LAYER in param.names else 0
    return _layer_number(rule, size - 1, params) if size else None


def _dim_sizes(params: Mapping[str, Param]) -> dict[str, int]:
    """Dims that are of one size in all leaves."""
    found: dict[str, set[int]] = {}
    for param in params.values():
        for dim, size in zip(param.names, param.shape, strict=True):
            found.setdefault(dim, set()).add(size)
    return {dim: min(sizes) for dim, sizes in found.items() if len(sizes) == 1}


def _pieces(
    rule: Rule, params: Mapping[str, Param], roots: Mapping[str, str], sizes: Mapping[str, int]
) -> Iterator[Piece]:
    param = params[rule.target]
    take = _take(rule, param, sizes)
    if LAYER not in param.names:
        yield Piece(rule.target, _at(param, rule.at), rule.source.format(layer=None, **roots), take)
    for index, number in enumerate(_layer_numbers(rule, params)):
        at = _at(param, {LAYER: index, **rule.at})
        yield Piece(rule.target, at, rule.source.format(layer=number, **roots), take)


def _at(param: Param, fixed: Mapping[str, int | tuple[int, int]]) -> Ranges:
    ranges = {dim: (value, value + 1) if isinstance(value, int) else value for dim, value in fixed.items()}
    return tuple(ranges.get(dim, (0, size)) for dim, size in zip(param.names, param.shape, strict=True))


def _sizes(rule: Rule, param: Param) -> list[list[int]]:
    ranges = {dim: value for dim, value in rule.at.items() if not isinstance(value, int)}
    spans = {dim: stop - start for dim, (start, stop) in ranges.items()}
    return [[spans.get(dim, param.size(dim)) for dim in group] for group in groups(rule.dims)]


def _take(rule: Rule, param: Param, sizes: Mapping[str, int]) -> Ranges:
    starts = [_product(rule.start.get(dim, 0), sizes) for dim in range(len(groups(rule.dims)))]
    return tuple((start, start + math.prod(span)) for start, span in zip(starts, _sizes(rule, param), strict=True))


def _product(factors: int | str, sizes: Mapping[str, int]) -> int:
    return math.prod(int(part) if part.isdigit() else sizes[part] for part in str(factors).split())


def expected(rules: Iterable[Rule], params: Mapping[str, Param], roots: Mapping[str, str]) -> dict[str, Expected]:
    """Key to what the source must hold there: shapes reach as far as the furthest piece taken from them."""
    found: dict[str, Expected] = {}
    sizes = _dim_sizes(params)
    for rule in _single(rules, params):
        mine = _made_of(rule, params[rule.target])
        for piece in _pieces(rule, params, roots, sizes):
            shape, made_of = tuple(stop for _, stop in piece.take), mine
            before = found.get(piece.source)
            if before:
                shape = tuple(map(max, before.shape, shape))
                made_of = before.made_of if mine in before.made_of else f"{before.made_of} and {mine}"
            found[piece.source] = Expected(shape=shape, made_of=made_of)
    return found


def knows(rules: Iterable[Rule], roots: Mapping[str, str]) -> Callable[[str], bool]:
    """Whether a key is one that the rules may ask for, in a model of any sizes."""
    made = {rule.source.format(layer=_ANY_LAYER, **roots) for rule in rules}
    patterns = [re.escape(key).replace(re.escape(_ANY_LAYER), r"\d+") for key in made if _ANY_LAYER in key]
    layered = re.compile("|".join(patterns) or r"(?!)")
    return lambda key: key in made or layered.fullmatch(key) is not None


def _made_of(rule: Rule, param: Param) -> str:
    parts = []
    for names, sizes in zip(groups(rule.dims), _sizes(rule, param), strict=True):
        parts.append(" x ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True)) or "1")
    return "(" + ", ".join(parts) + ")"


def gaps(pieces: Iterable[Piece], params: Mapping[str, Param]) -> list[str]:
    """What is wrong with a family's rules: leaves that the pieces leave open or fill twice, blocks that do not fit."""
    by_leaf: dict[str, list[Piece]] = {path: [] for path in params}
    for piece in pieces:
        by_leaf[piece.target].append(piece)
    problems = []
    for path, param in params.items():
        mine = by_leaf[path]
        if sum(volume(piece.at) for piece in mine) != math.prod(param.shape):
            problems.append(f"{path}: the rules do not fill its {param.shape} exactly")
        problems += [
            f"{path}: {p.source} overlaps {q.source}" for p, q in itertools.combinations(mine, 2) if overlap(p, q)
        ]
        problems += [f"{path}: {p.source} has another volume" for p in mine if volume(p.at) != volume(p.take)]
    return problems


def overlap(one: Piece, other: Piece) -> bool:
    """Whether two pieces of the same leaf share an element."""
    return all(a < d and c < b for (a, b), (c, d) in zip(one.at, other.at, strict=True))


def volume(ranges: Ranges) -> int:
    """Number of elements."""
    return math.prod(stop - start for start, stop in ranges)


def unit(pieces: Iterable[Piece], shape: tuple[int, ...]) -> tuple[int, ...]:
    """For each dim the largest size whose multiples include every border between pieces: what files must not cross."""
    sizes = list(shape)
    for piece in pieces:
        for dim, (start, stop) in enumerate(piece.at):
            sizes[dim] = math.gcd(sizes[dim], start, 0 if stop == shape[dim] else stop)
    return tuple(sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The share of one piece in one block of its leaf.

    `source[rows]`, flattened, `[first:first + prod(cover)]`, reshaped to `cover`, `[cut]` is the block's range `at`.
    `columns` are the source ranges in the dims after the rows.
    """

    at: Ranges
    rows: tuple[int, int]
    columns: Ranges
    first: int
    cover: tuple[int, ...]
    cut: tuple[slice, ...]


def part(piece: Piece, block: Ranges) -> Part | None:
    """What of `piece` lies in `block` of its leaf, and which source rows hold it; None if nothing does."""
    at = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.at, block, strict=True))
    if any(start >= stop for start, stop in at):
        return None
    shape = [stop - start for start, stop in piece.at]
    inside = [(a - o, b - o) for (a, b), (o, _) in zip(at, piece.at, strict=True)]
    pivot = next((dim for dim, (a, b) in enumerate(inside) if b - a > 1), max(len(inside) - 1, 0))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = sum(a * stride for (a, _), stride in zip(inside[: pivot + 1], strides, strict=False))
    span = inside[pivot][1] - inside[pivot][0] if inside else 1
    count = span * (strides[pivot] if strides else 1)
    row = math.prod(stop - start for start, stop in piece.take[1:])
    first, last = begin // row, -(-(begin + count) // row)
    origin = piece.take[0][0] if piece.take else 0
    return Part(
        at=at,
        rows=(origin + first, origin + last),
        columns=piece.take[1:],
        first=begin - first * row,
        cover=(*[1] * pivot, span, *shape[pivot + 1 :])[: len(shape)],
        cut=tuple(slice(a, b) if dim > pivot else slice(None) for dim, (a, b) in enumerate(inside)),
    )
