"""`model_index.json` of diffusers: the components of a pipeline, which are folders beside it, and its options."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardzoo.checkpoints.pipeline import is_component_name
from shardzoo.convert.folder import read_config
from shardzoo.errors import fail_if

MODEL_INDEX = "model_index.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelIndex:
    """What a `model_index.json` says.

    Attributes:
        pipeline: the class of the pipeline, as it stands: perhaps no string.
        classes: component, which is that of its folder -> its class.
        left_out: components that the class may have and this pipeline has not.
        options: everything else, but for what starts with "_".
    """

    pipeline: Any
    classes: Mapping[str, str]
    left_out: tuple[str, ...]
    options: Mapping[str, Any]


def read_model_index(path: Path, has_weights: Callable[[str], bool]) -> ModelIndex:
    """Reads a `model_index.json`; `has_weights` tells of a name whether a folder of it, beside the file, holds any.

    Raises:
        InputError: names that are no folder's, and entries that should name a class and do not; all in one message.
    """
    content = read_config(path)[1]
    found = {name: value for name, value in content.items() if not name.startswith("_")}
    none = [name for name, value in found.items() if value == [None, None]]
    classes = {name: value[1] for name, value in found.items() if _is_class(value)}
    options = {name: value for name, value in found.items() if name not in none and name not in classes}
    wrong = [
        f"{name!r}: is not the name of a folder in that of the pipeline: rename it"
        for name in (*classes, *none)
        if not is_component_name(name)
    ]
    wrong += [
        f"{name!r}: {value!r:.100} is not [library, class]: correct it, or write [null, null] to leave it out"
        for name, value in options.items()
        if (isinstance(value, list) and value) or (is_component_name(name) and has_weights(name))
    ]
    fail_if(wrong, f"{path}: components are not as they should be")
    return ModelIndex(pipeline=content.get("_class_name"), classes=classes, left_out=tuple(none), options=options)


def _is_class(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) and part for part in value)
