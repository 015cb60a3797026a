"""Which pieces of a model's leaves the tensors of an adapter file are for, and whether they fit."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shardzoo.convert.adapter_keys import (
    ADDED,
    COMPONENTS,
    Keys,
    Module,
    is_of,
    without_prefix,
    without_underscores,
)
from shardzoo.convert.adapter_settings import Settings, of_module
from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.plan import grouped
from shardzoo.convert.rules import Piece, expand, expected
from shardzoo.convert.source import Source
from shardzoo.zoo import layout
from shardzoo.zoo.linears import input_dims, linear_layers, missing_biases
from shardzoo.zoo.weights import declared_base

MOST_NAMED = 40
_ENDS = tuple({end for ends in ADDED.values() for end in ends})
_LEFT_OUT = " (ignore= (--lora-ignore) leaves it out)"
_XLABS = tuple(  # a module's original name, XLabs' name for it, and for which of the leaves in it that is
    (re.compile(rf"({blocks}\.\d+)\.{name}"), rf"\1.processor.{theirs}", leaves)
    for blocks, name, theirs, leaves in (
        ("double_blocks", r"img_attn\.qkv", "qkv_lora1", ""),
        ("double_blocks", r"txt_attn\.qkv", "qkv_lora2", ""),
        ("double_blocks", r"img_attn\.proj", "proj_lora1", ""),
        ("double_blocks", r"txt_attn\.proj", "proj_lora2", ""),
        ("single_blocks", "linear1", "qkv_lora", ".attn.qkv."),
        ("single_blocks", "linear2", "proj_lora", ""),
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Addition:
    """What a file adds to the pieces of one tensor of the source: `ratio` times B A, or times one tensor.

    Attributes:
        name: the module's, or for what is added in full the tensor's.
        shape: of the tensor that it is added to.
        a, b: keys of the factors; without an A, B is the whole difference.
        instead: whether it stands in place of the model's.
    """

    name: str
    pieces: list[Piece]
    shape: tuple[int, ...]
    b: str
    a: str | None = None
    ratio: float = 1.0
    instead: bool = False

    @property
    def keys(self) -> list[str]:
        return [key for key in (self.a, self.b) if key is not None]


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones at its end, of two dims at least: that of a convolution of one pixel is a matrix's."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class Targets:
    """Which pieces of the model's leaves each module of the file is, in the layout that knows most of them."""

    def __init__(self, rules: FamilyRules, declared: Any, keys: Keys, component: str):
        params = layout.named(declared)
        self.shapes = {path: param.shape for path, param in {**missing_biases(declared), **params}.items()}
        self._keys, self._component = keys, component
        self._layers = linear_layers(declared)
        candidates = [_Known(rules, one, declared) for one in rules.layouts_of(declared.config)]
        self._known = max(candidates, key=lambda known: sum(map(known.knows, [*keys.modules, *keys.instead])))
        self._others = [known for known in candidates if known is not self._known]

    def is_linear(self, addition: Addition) -> bool:
        """Whether it is for weights of linear layers, which take factors."""
        return all(piece.target in self._layers for piece in addition.pieces)

    def additions(self, source: Source, settings: Settings, problems: list[str]) -> list[Addition]:
        """All that is sound; what is wrong with the rest is added to `problems`."""
        found: list[Addition] = []
        wrong: dict[str, str] = {}
        seen: dict[tuple[str, str], str] = {}
        for name, part, made in self._each(source, settings):
            if isinstance(made, str):
                wrong[name] = made
                continue
            first = seen.setdefault((made.pieces[0].source, part), name)
            if first != name:
                wrong[name] = f"is {made.pieces[0].source}, as {first} is"
            found.append(made)
        lines = grouped(wrong)
        problems += lines[:MOST_NAMED] + ([f"and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else [])
        return found

    def _each(self, source: Source, settings: Settings) -> Iterator[tuple[str, str, Addition | str]]:
        """Name, part and addition, or in its place what is wrong, of all that the file holds."""
        for name, module in self._keys.modules.items():
            ratio = 1.0
            if module.has_factors:
                made = self._factors(source, name, module, settings)
                ratio = made.ratio if isinstance(made, Addition) else 1.0
                yield name, "factors", made
                if isinstance(made, str):
                    continue
            for part, key in module.differences():
                yield key, part, self._difference(source, name, part, key, ratio if part == "b_bias" else 1.0)
        for key in self._keys.instead:
            made = self._in_full(source, key, self._known.source(key, ("",)), key)
            yield key, "instead", made if isinstance(made, str) else dataclasses.replace(made, instead=True)

    def _factors(self, source: Source, name: str, module: Module, settings: Settings) -> Addition | str:
        key = self._known.module(name)
        if key is None:
            return self._unknown(name)
        if module.a is None or module.b is None:
            return f"has no {'A (down)' if module.a is None else 'B (up)'}"
        pieces, shape = self._known.pieces[key], self._known.shapes[key]
        problem = self._unfit(source, module.a, module.b, pieces, shape)
        if problem is not None:
            return problem
        if module.alpha is not None and math.prod(source.tensors[module.alpha].shape) != 1:
            return f"alpha has the shape {source.tensors[module.alpha].shape}: it must be one number"
        rank, said = source.tensors[module.a].shape[0], of_module(settings.ranks, name, settings.rank)
        if said not in (None, rank):
            return f"is of rank {rank}, and its config says {said}"
        own = None if module.alpha is None else float(np.asarray(source.read(module.alpha), np.float32).reshape(()))
        ratio = settings.ratio(name, rank, own)
        if not math.isfinite(ratio):
            return f"alpha={own} is not a finite number"
        return Addition(name=name, pieces=pieces, shape=shape, a=module.a, b=module.b, ratio=ratio)

    def _unfit(self, source: Source, a_key: str, b_key: str, pieces: list[Piece], shape: tuple[int, ...]) -> str | None:
        """What is wrong with the shapes and dtypes of factors for these pieces of a tensor of this shape."""
        a, b = source.tensors[a_key], source.tensors[b_key]
        lacking = [piece.target for piece in pieces if piece.target not in self._layers]
        if lacking and (len(shape) < 2 or len(lacking) < len(pieces)):
            return f"is {lacking[0]}, which is not the weight of a linear layer: adapters go on those alone"
        into, out, whole = (without_ones(one) for one in (a.shape, b.shape, shape))
        if not lacking and (len(into) != 2 or len(out) != 2 or len(whole) != 2):
            return f"A and B have the shapes {a.shape} and {b.shape} for a weight of {shape}: only matrices are read"
        rank, width = into[:1], (math.prod(whole[1:]),)
        if rank in ((), (0,)) or out != whole[:1] + rank or into[1:] not in (whole[1:], width):
            wider = not lacking and into[0] == out[1] and out[0] == whole[0] and into[1] > whole[1]
            control = ": its model takes wider inputs, as control adapters do that widen its first layer"
            inputs = ", ".join(map(str, shape[1:]))
            return f"A and B have the shapes {a.shape} and {b.shape}, expected (r, {inputs}) and ({shape[0]}, r)" + (
                control if wider else ""
            )
        if a.dtype.kind in "iub" or b.dtype.kind in "iub":
            return f"A and B are of {a.dtype.name} and {b.dtype.name}, not floating point"
        return None

    def _difference(self, source: Source, name: str, part: str, key: str, ratio: float) -> Addition | str:
        """What one tensor adds to a weight, a bias or a table of a module."""
        target = self._known.source(name, ADDED[part])
        module = self._known.module(name)
        if target is None and module is not None and ADDED[part] == ("bias",):
            pieces = self._known.bias_pieces(module)
            if not pieces:
                return "is for a bias that this model has not"
            made = self._fitting(source, key, pieces, self._known.shapes[module][:1])
        else:
            made = self._in_full(source, key, target, name)
        return made if isinstance(made, str) else dataclasses.replace(made, ratio=ratio)

    def _in_full(self, source: Source, key: str, target: str | None, name: str) -> Addition | str:
        if target is None:
            return self._unknown(name)
        return self._fitting(source, key, self._known.sources[target], self._known.source_shapes[target])

    def _fitting(self, source: Source, key: str, pieces: list[Piece], shape: tuple[int, ...]) -> Addition | str:
        given, made = source.tensors[key], Addition(name=key, pieces=pieces, shape=shape, b=key)
        if [size for size in given.shape if size != 1] != [size for size in shape if size != 1]:
            return f"has the shape {given.shape}, expected {shape}"
        if given.dtype.kind in "iub":
            return f"is of {given.dtype.name}, not floating point"
        linear = [piece.target for piece in pieces if piece.target in self._layers]
        if linear and (len(without_ones(shape)) != 2 or not self.is_linear(made)):
            return f"is a difference of {linear[0]}, of the shape {shape} in the source: only matrices are read"
        return made

    def _unknown(self, name: str) -> str:
        for known in self._others:
            if known.knows(name):
                mixed = f"is named as in layout {known.name!r}, and most of the file as in {self._known.name!r}"
                return f"{mixed}: give each a file of its own"
        named = next((c for start, c in COMPONENTS.items() if name.startswith(start)), self._component)
        other = f" (it is for {named}, and this is {self._component}: component= (--lora PART:FILE) leaves it out)"
        return "no module of this model" + (_LEFT_OUT if is_of(named, self._component) else other)


class _Known:
    """The tensors of a layout, and its modules: path -> pieces and shape of the weight, also with underscores."""

    def __init__(self, rules: FamilyRules, layout_: Layout, declared: Any):
        params, kind, end = layout.named(declared), rules.rules_in(layout_), ".weight"
        self.name = layout_.name
        self._layers, self._missing = linear_layers(declared), missing_biases(declared)
        self.sources: dict[str, list[Piece]] = {}
        for piece in expand(kind, params, layout_.roots):
            self.sources.setdefault(piece.source, []).append(piece)
        self.source_shapes = {key: want.shape for key, want in expected(kind, params, layout_.roots).items()}
        self.pieces = {key.removesuffix(end): found for key, found in self.sources.items() if key.endswith(end)}
        self.shapes = {key: self.source_shapes[key + end] for key in self.pieces}
        self._add_xlabs()
        tensors = [name for key in self.sources for name in (key, key.rpartition(".")[0])]
        self._underscored: Mapping[str, str] = {name.replace(".", "_"): name for name in (*tensors, *self.pieces)}

    def _add_xlabs(self) -> None:
        """XLabs' names beside the original ones, some of which are of the first rows of a module alone."""
        for key, (name, theirs, leaves) in itertools.product(list(self.pieces), _XLABS):
            if match := name.fullmatch(key):
                own = [piece for piece in self.pieces[key] if leaves in piece.target]
                rows = max(piece.take[0][1] for piece in own)
                self.pieces[match.expand(theirs)] = own
                self.shapes[match.expand(theirs)] = (rows, *self.shapes[key][1:])

    def knows(self, name: str) -> bool:
        return self.module(name) is not None or self.source(name, _ENDS) is not None

    def module(self, name: str) -> str | None:
        """The module that a name of the file means, without the prefixes that trainers put before it."""
        return next((bare for bare in self._names(name) if bare in self.pieces), None)

    def source(self, name: str, ends: tuple[str, ...]) -> str | None:
        """The tensor of the module of this name that ends so; with the end "" the tensor of this name."""
        keys = (f"{bare}.{end}" if end else bare for end in ends for bare in self._names(name))
        return next((key for key in keys if key in self.sources), None)

    def _names(self, name: str) -> list[str]:
        """What a name of the file may mean here."""
        if "." in name:
            return [*without_prefix(name)]
        return [self._underscored[bare] for bare in [without_underscores(name)] if bare in self._underscored]

    def bias_pieces(self, module: str) -> list[Piece]:
        """What the bias of a module would be that the layout has without one: the rows of its weight."""
        found: dict[tuple[int, int], Piece] = {}
        for piece in self.pieces[module]:
            path = piece.target.removesuffix("weight") + "bias"
            if path not in self._missing:
                continue
            layer = self._layers[piece.target]
            dims = zip(declared_base(layer.weight).names, piece.at, strict=True)
            at = tuple(ranges for dim, ranges in dims if dim not in input_dims(layer))
            rows = piece.take[0]  # once, of a weight whose columns are of several leaves
            found.setdefault(rows, Piece(path, at, f"{module}.bias", (rows,)))
        return list(found.values())
