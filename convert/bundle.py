"""Single files of several models, as ComfyUI writes them: which models lie in one, by the beginnings of its keys.

| component                | beginning of its keys                                       |
|--------------------------|-------------------------------------------------------------|
| `transformer`            | `model.diffusion_model.`                                    |
| `vae`                    | `vae.` or `first_stage_model.`                              |
| as the file names it     | `text_encoders.<name>.transformer.`                         |
| `text_encoder`           | `cond_stage_model.`                                         |
| `clip_vision`            | `clip_vision.`                                              |

A text encoder has numbers of its own beside it, such as the `logit_scale` of CLIP, which no model reads.
"""

import re
from collections.abc import Iterable, Mapping

from shardzoo.convert import recognise
from shardzoo.convert.source import Source
from shardzoo.errors import fail_if

_STARTS = (  # what keys begin with, and the component that they are of
    (re.compile(r"model\.diffusion_model\."), "transformer"),
    (re.compile(r"(?:vae|first_stage_model)\."), "vae"),
    (re.compile(r"cond_stage_model\."), "text_encoder"),
    (re.compile(r"clip_vision\."), "clip_vision"),
)
_ENCODER = re.compile(r"text_encoders\.(?P<name>[^.]+)\.(?P<inner>transformer\.)?")


def components(keys: Iterable[str]) -> dict[str, list[str]]:
    """Component -> its keys; {} where all keys are of one model, or not those of such a file.

    Where an encoder's weights lie in `transformer.`, what is beside them is of no component.
    """
    found: dict[str, list[str]] = {}
    for key in keys:
        encoder = _ENCODER.match(key)
        name = encoder["name"] if encoder else next((name for start, name in _STARTS if start.match(key)), "")
        found.setdefault(name, []).append(key)
    other = found.pop("", [])
    for name, own in found.items():
        inner = [key for key in own if (match := _ENCODER.match(key)) and match["inner"]]
        if inner and len(inner) < len(own):
            other, found[name] = other + own, inner
    return found if len(found) > 1 or (other and any(_ENCODER.match(own[0]) for own in found.values())) else {}


def choose(source: Source, component: str | None) -> tuple[Source, Mapping[str, str]]:
    """The source with the tensors of one component alone, and why each of the others is left out.

    A source that is no such file comes back as it is; one that holds a single model needs no choice.

    Raises:
        InputError: several models and none chosen, or one that is not there; the message lists them.
    """
    found = components(source.tensors)
    if not found:
        return source, {}
    name = next(iter(found)) if component is None and len(found) == 1 else component
    if name not in found:
        listed = [f"{name}: {len(keys)} tensors, which look like: {_looks(keys)}" for name, keys in found.items()]
        wrong = "" if name is None else f"component={name!r} is none of them: "
        fail_if(listed, f"{source.root}: holds several models: {wrong}choose one by component= (--component)")
    assert name is not None  # it is one of those found
    own = set(found[name])
    left = {key: f"not of component {name!r}" for key in source.tensors if key not in own}
    return source.part(own), left


def _looks(keys: list[str]) -> str:
    first = keys[0]
    starts = (match.end() for pattern in (_ENCODER, *dict(_STARTS)) if (match := pattern.match(first)))
    begin = next(starts)
    return recognise.looks_like(key[begin:] for key in keys)
