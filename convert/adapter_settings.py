"""Ranks and alphas that are said beside an adapter's tensors: PEFT's adapter_config.json, or diffusers' metadata."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardzoo.convert.adapter_keys import COMPONENTS, is_of
from shardzoo.convert.source import Source
from shardzoo.strict_json import parse_object

CONFIG = "adapter_config.json"
METADATA = "lora_adapter_metadata"  # of diffusers, in the header of a safetensors file
_UNSUPPORTED = (  # by these fields of PEFT's config, where they are true
    *("use_dora", "fan_in_fan_out", "modules_to_save", "trainable_token_indices", "use_qalora"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is said of ranks and alphas beside the tensors."""

    alpha: float | None = None
    alphas: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rank: int | None = None
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rooted: bool = False  # alpha / sqrt(rank) in place of alpha / rank

    def ratio(self, module: str, rank: int, own: float | None) -> float:
        """What B A is multiplied by; without any alpha it is 1."""
        alpha = own if own is not None else of_module(self.alphas, module, self.alpha)
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.rooted else rank)


def of_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the module's path ends in, as PEFT looks them up."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern.removeprefix('^')})", module):
            return value
    return default


def read_settings(source: Source, file: Path, component: str) -> tuple[Settings, list[str]]:
    """Ranks and alphas from adapter_config.json, or from the metadata of diffusers; and what is not supported.

    The metadata has them for each component of a pipeline.
    """
    config = file.with_name(CONFIG)
    if file.name.startswith("adapter_model") and config.is_file():
        return _from_config(parse_object(config.read_bytes(), str(config)), CONFIG)
    header = source.files[0].header
    metadata = json.loads(header).get("__metadata__", {}) if header else {}
    if METADATA not in metadata:
        return Settings(), []
    packed = parse_object(metadata[METADATA].encode(), f"{file}: metadata {METADATA}")
    named = {key: next((c for c in set(COMPONENTS.values()) if key.startswith(f"{c}.")), None) for key in packed}
    own = {
        key if of is None else key.removeprefix(f"{of}."): packed[key]
        for key, of in named.items()
        if of is None or is_of(of, component)
    }
    return _from_config(own, METADATA)


def _from_config(config: Mapping[str, Any], where: str) -> tuple[Settings, list[str]]:
    problems = []
    if config.get("peft_type", "LORA") != "LORA":
        problems.append(f"{where}: peft_type={config['peft_type']!r} is not LORA")
    problems += [f"{where}: {name}={config[name]!r} is not supported" for name in _UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        problems.append(f"{where}: bias={config['bias']!r} is not supported: only 'none' is")
    alpha, rank = config.get("lora_alpha"), config.get("r")
    patterns = {name: config.get(name) or {} for name in ("alpha_pattern", "rank_pattern")}
    odd = {name: value for name, value in patterns.items() if not isinstance(value, Mapping)}
    problems += [f"{where}: {name}={value!r} is not an object" for name, value in odd.items()]
    alphas, ranks = ({} if name in odd else value for name, value in patterns.items())
    for name in (*alphas, *ranks):
        try:
            re.compile(name)
        except re.error as error:
            problems.append(f"{where}: pattern {name!r} is no regular expression ({error})")
    for name, value in (("lora_alpha", alpha), ("r", rank), *alphas.items(), *ranks.items()):
        if value is not None and not _is_number(value):
            problems.append(f"{where}: {name}={str(value)[:40]!r} is not a finite number")
    if problems:
        return Settings(), problems
    return Settings(
        alpha=None if alpha is None else float(alpha),
        alphas={name: float(value) for name, value in alphas.items()},
        rank=rank,
        ranks=ranks,
        rooted=bool(config.get("use_rslora")),
    ), []


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(float(value))
    except OverflowError:
        return False
