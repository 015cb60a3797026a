"""The families of the zoo by name: what a manifest's `family` and `config` turn into.

To add a family: write `zoo/<family>.py`, which registers it, and name it in `MODULES` here; for conversion write
`convert/families/<family>.py` and name it in `convert/families/__init__.py`. Everything else, the command line
included, takes what it needs from `Family` and `FamilyRules`.

A config is a frozen dataclass of numbers, strings, booleans, None, tuples of those, and nested dataclasses of the same
kind, so that it goes to JSON and back unchanged.
"""

import dataclasses
import difflib
import importlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardzoo.errors import InputError, fail_if


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceSizes:
    """Sizes of the inputs that a forward pass is traced with; a family takes those that its inputs have.

    Attributes:
        batch: rows.
        tokens: length of each row of text.
        frames, height, width: of each video, in frames and pixels; of an image the last two.
    """

    batch: int = 1
    tokens: int = 4096
    frames: int = 81
    height: int = 480
    width: int = 832

    def cells(self, pixels: int) -> tuple[int, int]:
        """Rows and columns of cells of so many pixels a side; what is left over is cut off.

        Raises:
            InputError: not even one.
        """
        fail_if(
            [f"{n}={getattr(self, n)} is below {pixels}" for n in ("height", "width") if getattr(self, n) < pixels],
            "sizes to trace: give more pixels",
        )
        return self.height // pixels, self.width // pixels


@dataclasses.dataclass(frozen=True)
class Family:
    """A family: its name, and what is made of a config of it.

    Attributes:
        config: type of its configs.
        declare: config -> declared model.
        presets: published sizes by name.
        trace: (declared, mesh, sizes, **run) -> the forward pass as a function of the model and arrays, and those
            arrays, abstract: what is compiled ahead of time. `run` are options of the family's `forward`, such as
            `remat`. None where there is nothing to compile.
        text: module with `complete` and `check_prompts` as `zoo.generate` has them, where the family continues text.
    """

    name: str
    config: type
    declare: Callable[[Any], Any]
    presets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trace: Callable[..., tuple[Callable, tuple]] | None = None
    text: str | None = None


# The zoo's own families and their modules, imported when a family is asked for: a program pays for those that it uses.
MODULES = {
    "clip-text": "clip_text",
    "clip-vision": "clip_vision",
    "decoder": "decoder",
    "flux": "flux",
    "flux2": "flux2",
    "image-vae": "image_vae",
    "qwen-image": "qwen_image",
    "qwen2.5-vl-vision": "qwen2_5_vl",
    "qwen3-5": "qwen3_5",
    "qwen3-5-vision": "qwen3_5_vision",
    "t5": "t5",
    "wan": "wan",
    "wan-vae": "wan_vae",
}
FAMILIES: dict[str, Family] = {}  # those registered so far


def register(family: Family) -> Family:
    """Adds a family; research code may add its own.

    Raises:
        ValueError: another family has this name.
    """
    if FAMILIES.get(family.name, family) != family:
        raise ValueError(f"families.register: there is a family {family.name!r} already: choose another name")
    FAMILIES[family.name] = family
    return family


def find_family(name: str) -> Family:
    """The family called `name`.

    Raises:
        InputError: there is none; the message lists those there are.
    """
    if name not in FAMILIES and name in MODULES:
        importlib.import_module(f"{__package__}.{MODULES[name]}")
    if name not in FAMILIES:
        raise InputError(f"family={name!r} is not in this zoo: {_choices(name, family_names())}")
    return FAMILIES[name]


def family_names() -> list[str]:
    """The families that `find_family` finds, in alphabetical order."""
    return sorted({*MODULES, *FAMILIES})


def find_preset(name: str) -> tuple[Family, Any]:
    """Family and config of a preset, named "family/preset".

    Raises:
        InputError: no such family or preset; the message lists those there are.
    """
    family_name, _, preset = name.partition("/")
    family = find_family(family_name)
    if preset not in family.presets:
        raise InputError(f"preset={name!r} is not in this zoo: {_choices(preset, family.presets)}")
    return family, family.presets[preset]


def _choices(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}There are {', '.join(sorted(known)) or 'none'}"


def config_to_json(config: Any) -> dict[str, Any]:
    """The config as JSON types (tuples become lists, nested dataclasses become objects)."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def config_changes(was: Any, now: Any) -> list[str]:
    """Every field in which a config differs from another of its type, as "rope.theta=5.0 (was 10000.0)"."""
    return _changes(config_to_json(was), config_to_json(now), "")


def _changes(was: Any, now: Any, name: str) -> list[str]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        dot = f"{name}." if name else ""
        return [line for field in now for line in _changes(was.get(field), now[field], f"{dot}{field}")]
    return [] if was == now else [f"{name}={now!r} (was {was!r})"]


def config_from_json(cls: type, fields: Mapping[str, Any]) -> Any:
    """The config of type `cls` that `config_to_json` wrote.

    Raises:
        InputError: unknown or missing fields, or values of other types, all in one message; values that the config
            itself refuses.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(fields) - set(known))
    missing = sorted(
        n
        for n, f in known.items()
        if n not in fields and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    problems = [f"unknown fields {unknown}, missing fields {missing}"] if unknown or missing else []
    values = {name: _typed(hints[name], value) for name, value in fields.items() if name in known}
    problems += [
        f"{n}={fields[n]!r} is not {_shown(hints[n])}" for n, value in values.items() if not _fits(hints[n], value)
    ]
    if problems:
        raise InputError(
            f"{cls.__module__}.{cls.__name__}: {'; '.join(problems)}:"
            " the config was written by another version of shardzoo"
        )
    return cls(**values)


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _typed(hint: Any, value: Any) -> Any:
    nested = [option for option in _options(hint) if dataclasses.is_dataclass(option)]
    if nested and isinstance(value, Mapping):
        return config_from_json(nested[0], value)
    return tuple(value) if isinstance(value, list) else value


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is of the type that a field is declared with; a whole number will do for a float."""
    if isinstance(hint, types.UnionType):
        return any(_fits(option, value) for option in _options(hint))
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return value in args
    if typing.get_origin(hint) is tuple:
        items = args[:1] * len(value) if args[1:] == (...,) and isinstance(value, tuple) else args
        return isinstance(value, tuple) and len(items) == len(value) and all(map(_fits, items, value))
    return type(value) is hint or (hint is float and type(value) is int)
