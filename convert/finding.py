"""Which family a source is of: by what its config says, or without one by the names of its tensors."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardzoo.convert import families, recognise
from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.folder import read_config
from shardzoo.convert.rules import expected, knows
from shardzoo.convert.source import Source, TensorInfo
from shardzoo.errors import InputError
from shardzoo.zoo.layout import Param


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """How well the keys of a source, without `prefix`, fit a family in one layout.

    Attributes:
        known: how many its rules know.
        strange: how many are neither known, nor of another part, nor unused.
    """

    rules: FamilyRules
    layout: Layout
    prefix: str
    known: int
    strange: int


def find_family(
    source: Source, *, family: str | None = None, config: str | Path | None = None
) -> tuple[FamilyRules, Mapping[str, Any]]:
    """The rules of the source's family, and the config to read: {} where the family does without.

    A config.json that lies beside the weights and is of another model than they are is set aside (`Source.notes`).

    Args:
        source: an opened source.
        family: its name, where it cannot be told.
        config: a config.json to use instead of the one beside the weights.

    Raises:
        InputError: no family reads it, or several may; a config.json is needed and there is none.
    """
    given = source.config if config is None else read_config(Path(config))[1]
    rules = _named(family) if family is not None else None if given is None else _by_config(source, given)
    if config is None and given is not None and (other := _other_model(source, given, rules)):
        said = " and ".join(map(repr, _kinds(given)))
        source.set_config_aside(f"config.json beside the weights is of {said}: not read for family {other.family}")
        return other, {}
    rules = rules or _by_keys(source)
    if given is None and not (rules and rules.config_optional):
        raise InputError(
            f"{source.root}: there is no config.json beside the weights, which look like: {looks(source)}:"
            " put it there, or name one by config= (--config)"
        )
    assert rules is not None  # without a config it was refused above
    return rules, given or {}


def looks(source: Source) -> str:
    return recognise.looks_like(source.tensors)


def _all() -> dict[str, FamilyRules]:
    return {name: families.rules_of(name) for name in families.FAMILIES}


def _named(family: str) -> FamilyRules:
    if family not in families.FAMILIES:
        listed = ", ".join(families.FAMILIES)
        raise InputError(f"family={family!r} is not one that is converted: use one of {listed}")
    return families.rules_of(family)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """What a config says that it is of, the more telling first."""
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    return [kind for kind in (config.get("_class_name"), *listed, config.get("model_type")) if isinstance(kind, str)]


def _of_kind(config: Mapping[str, Any]) -> FamilyRules | None:
    known = families.FAMILIES.items()
    name = next((name for kind in _kinds(config) for name, one in known if kind in one.kinds), None)
    return None if name is None else families.rules_of(name)


def _by_config(source: Source, config: Mapping[str, Any]) -> FamilyRules:
    rules = _of_kind(config)
    if rules is not None:
        return rules
    listed = "; ".join(f"{name} ({', '.join(sorted(one.kinds))})" for name, one in families.FAMILIES.items())
    said = " and ".join(map(repr, _kinds(config))) or repr(config.get("model_type"))
    raise InputError(
        f"{source.root}: no family of this zoo reads it: its config says {said}, its tensors look like:"
        f" {looks(source)}.\n  families and what they read: {listed}"
    )


def _matches(source: Source, rules: FamilyRules) -> Iterator[Match]:
    for prefix in recognise.common_prefixes(source.tensors):
        keys = [key.removeprefix(prefix) for key in source.tensors]
        for layout in rules.layouts:
            known = knows(rules.rules_in(layout), layout.roots)
            rest = [key for key in keys if not known(key)]
            other, unused = tuple(layout.other), rules.unused_in(layout)
            strange = sum(not key.startswith(other) and not any(re.fullmatch(p, key) for p in unused) for key in rest)
            yield Match(rules=rules, layout=layout, prefix=prefix, known=len(keys) - len(rest), strange=strange)


def best_match(source: Source, rules: FamilyRules) -> Match | None:
    """The layout and prefix under which the family knows most keys, if it knows any; the first of several."""
    best = max(_matches(source, rules), key=lambda match: match.known, default=None)
    return best if best and best.known else None


def _by_keys(source: Source) -> FamilyRules | None:
    """The family that knows most keys, if it knows most of those that are not of parts that it does not run.

    Raises:
        InputError: two know as many.
    """
    found = [match for rules in _all().values() if (match := best_match(source, rules)) and match.known > match.strange]
    most = max((match.known for match in found), default=0)
    best = [match for match in found if match.known == most]
    if len(best) > 1:
        listed = " or ".join(f"{m.rules.family} (layout {m.layout.name!r}, knows {m.known} of them)" for m in best)
        raise InputError(
            f"{source.root}: its {len(source.tensors)} tensors may be of family {listed}: choose one by family="
            " (--family), or name a config.json by config= (--config)"
        )
    return best[0].rules if best else None


def _other_model(source: Source, config: Mapping[str, Any], rules: FamilyRules | None) -> FamilyRules | None:
    """The family of tensors that are not of the model which the config beside them is of, or None."""
    by_config = _of_kind(config)
    if by_config is None or ((match := best_match(source, by_config)) and match.known > match.strange):
        return None
    other = _by_keys(source) if rules in (None, by_config) else rules
    return other if other is not None and other is not by_config and other.config_optional else None


def without_prefix(source: Source, rules: FamilyRules, prefix: str | None) -> Mapping[str, TensorInfo]:
    """The source's tensors by their keys without the prefix under which the family knows most of them."""
    best = best_match(source, rules)
    found = (best.prefix if best else "") if prefix is None else whole_prefix(prefix)
    return {key.removeprefix(found): info for key, info in source.tensors.items()}


def whole_prefix(prefix: str) -> str:
    """A prefix as users write it, with its dot."""
    return prefix.rstrip(".") + "." if prefix else ""


def find_layout(
    source: Source, rules: FamilyRules, params: Mapping[str, Param], prefix: str | None
) -> tuple[Layout, str]:
    """The layout, and the prefix on all keys, under which most tensors are those of a model of these parameters.

    Raises:
        InputError: none is known; the prefix is not on all keys, or is no usual one and was not given.
    """
    shared = recognise.common_prefixes(source.tensors)
    if prefix and prefix not in (p for s in shared for p in (s, s.rstrip("."))):
        raise InputError(
            f"{source.root}: prefix={prefix!r} is not on all keys: those all share {shared[-1]!r}: leave it out"
        )
    prefixes = shared if prefix is None else [whole_prefix(prefix)]
    keys = set(source.tensors)
    best: tuple[int, Layout, str] | None = None
    for candidate in prefixes:
        for layout in rules.layouts:
            known = sum(candidate + key in keys for key in expected(rules.rules_in(layout), params, layout.roots))
            if known and (best is None or known > best[0]):
                best = known, layout, candidate
    if best is None:
        raise InputError(
            f"{source.root}: none of its {len(keys)} tensors has a name of family {rules.family}; they look like:"
            f" {looks(source)}"
        )
    _, layout, found = best
    if found and prefix is None and not recognise.is_wrapper(found):
        raise InputError(
            f"{source.root}: all keys start with {found!r}; without it they are of family {rules.family} in layout"
            f" {layout.name!r}: pass prefix={found!r} (--prefix {found}) to take it off"
        )
    return layout, found
