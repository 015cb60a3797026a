"""What the converter knows of each family: its published layouts, its rules, and how its configs read.

One file a family. A family is found by the `model_type` of the source's config; `FAMILIES` is the whole list.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shardzoo.convert.rules import Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One way in which a family's tensors are named in published files.

    Attributes:
        name: "transformers", "diffusers", "original".
        roots: what the braces other than `{layer}` in the rules' source keys stand for.
        other: prefix of keys -> name of the part they belong to: parts that the zoo does not run.
    """

    name: str
    roots: Mapping[str, str]
    other: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyRules:
    """How one family is converted.

    Attributes:
        family: name in `shardzoo.zoo.families`.
        part: name of what the family runs, among the parts of a source that holds several.
        model_types: values of `model_type` in config.json that it reads.
        layouts: the layouts it reads, the commonest first.
        rules: source tensors to leaves; rules whose leaf a config does not declare are left out.
        ties: key of a tensor -> leaf that it must equal where the config ties the two.
        unused: pattern of keys that the model computes for itself -> why they are not read.
        read_config: parsed config.json and the source's keys -> config of the zoo; raises `InputError` with every
            reason it cannot.
        declare: config -> declared module.
    """

    family: str
    part: str
    model_types: frozenset[str]
    layouts: tuple[Layout, ...]
    rules: tuple[Rule, ...]
    ties: Mapping[str, str]
    unused: Mapping[str, str]
    read_config: Callable[[Mapping[str, Any], Collection[str]], Any]
    declare: Callable[[Any], Any]


FAMILIES = {"decoder": "shardzoo.convert.families.decoder"}


@functools.cache
def rules_of(family: str) -> FamilyRules:
    """The rules of the family with this name, imported when first asked for.

    Raises:
        KeyError: there are none (callers check `FAMILIES`).
    """
    return importlib.import_module(FAMILIES[family]).FAMILY
