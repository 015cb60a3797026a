"""What the converter knows of each family: its published layouts, its rules, and how its configs read.

One file a family, named in `FAMILIES`, with the family's rules as `FAMILY`; it is imported when a source may be of it.
The model itself is declared by the family of the same name in the zoo, which that file imports. A source is of the
family that its config names, by `_class_name`, `architectures` or `model_type`; without a config, of the family whose
rules know most of its tensors.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from shardzoo.convert.rules import Rule
from shardzoo.convert.source import TensorInfo
from shardzoo.zoo.families import find_family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One way in which a family's tensors are named and packed in published files.

    Attributes:
        name: "transformers", "diffusers", "original".
        roots: what the braces other than `{layer}` in the rules' source keys stand for.
        other: prefix of keys -> name of the part they belong to: parts that the zoo does not run.
        rules, ties, unused: its own, where it differs from the family's other layouts by more than roots; None for
            those of the `FamilyRules`.
        stem: what its files of weights are called, without part numbers and suffix.
        fits: whether a model of this config is named so: names may say how many levels there are, or blocks.
    """

    name: str
    roots: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rules: tuple[Rule, ...] | None = None
    ties: Mapping[str, str] | None = None
    unused: Mapping[str, str] | None = None
    stem: str = "model"
    fits: Callable[[Any], bool] = lambda config: True


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyRules:
    """How one family is converted.

    Attributes:
        family: name in `shardzoo.zoo.families`.
        part: name of what the family runs, among the parts of a source that holds several.
        layouts: the layouts it reads, the commonest first.
        rules: source tensors to leaves; rules whose leaf a config does not declare are left out.
        ties: key of a tensor -> leaf that it must equal where the config ties the two.
        unused: pattern of keys that the model computes for itself -> why they are not read.
        read_config: parsed config.json and the source's tensors, whose keys have the wrapper's prefix taken off ->
            config of the zoo; raises `InputError` with every reason it cannot.
        config_optional: whether `read_config` can do with {} for a config, from the tensors alone.
        write_config: config of the zoo and the name of a layout -> config.json as that layout has it, or None where
            the layout has none. Without it, config.json stays as it came whatever layout is written.
    """

    family: str
    part: str
    layouts: tuple[Layout, ...]
    rules: tuple[Rule, ...] = ()
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read_config: Callable[[Mapping[str, Any], Mapping[str, TensorInfo]], Any]
    config_optional: bool = False
    write_config: Callable[[Any, str], Mapping[str, Any] | None] | None = None

    def layouts_of(self, config: Any) -> tuple[Layout, ...]:
        """The layouts that name a model of this config; all where none does."""
        return tuple(one for one in self.layouts if one.fits(config)) or self.layouts

    def rules_in(self, layout: Layout) -> tuple[Rule, ...]:
        return self.rules if layout.rules is None else layout.rules

    def ties_in(self, layout: Layout) -> Mapping[str, str]:
        return self.ties if layout.ties is None else layout.ties

    def unused_in(self, layout: Layout) -> Mapping[str, str]:
        return self.unused if layout.unused is None else layout.unused

    def declare(self, config: Any) -> Any:
        """The declared module of a config."""
        return find_family(self.family).declare(config)


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a family before its file is imported.

    Attributes:
        module: where its rules are.
        kinds: values of `_class_name`, `architectures` or `model_type` in config.json that it reads.
    """

    module: str
    kinds: frozenset[str]


def _known(module: str, *kinds: str) -> Known:
    return Known(f"{__name__}.{module}", frozenset(kinds))


FAMILIES = {
    "decoder": _known(
        "decoder",
        *("llama", "mistral", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
        *("mistral3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    ),
    "wan": _known("wan", "WanTransformer3DModel", "WanModel", "t2v", "i2v", "flf2v", "ti2v"),
    "flux": _known("flux", "FluxTransformer2DModel"),
    "flux2": _known("flux2", "Flux2Transformer2DModel"),
    "qwen-image": _known("qwen_image", "QwenImageTransformer2DModel"),
    "qwen2.5-vl-vision": _known("qwen_vision", "qwen2_5_vl_vision"),
    "qwen3-5": _known("qwen3_5", "qwen3_5", "qwen3_5_text", "qwen3_next"),
    "qwen3-5-vision": _known("qwen3_5_vision", "qwen3_5_vision"),
    "t5": _known("t5", "umt5", "t5", "mt5"),
    "wan-vae": _known("wan_vae", "AutoencoderKLWan", "AutoencoderKLQwenImage"),
    "image-vae": _known("image_vae", "AutoencoderKL", "AutoencoderKLFlux2"),
    "clip-text": _known("clip_text", "CLIPTextModel", "CLIPTextModelWithProjection", "clip_text_model"),
    "clip-vision": _known("clip_vision", "clip_vision_model", "clip"),
}


@functools.cache
def rules_of(family: str) -> FamilyRules:
    """The rules of the family with this name, imported when first asked for.

    Raises:
        KeyError: there are none (callers check `FAMILIES`).
    """
    return importlib.import_module(FAMILIES[family].module).FAMILY
