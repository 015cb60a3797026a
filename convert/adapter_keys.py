"""What the keys of adapter files mean: which module of a model a tensor is for, and what of it."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np

from shardzoo.convert.names import batched_names
from shardzoo.convert.recognise import WRAPPERS
from shardzoo.convert.source import Source

_PART = re.compile(
    r"(?P<module>.+?)\.(?:(?P<a>lora_A(?:\.[\w-]+)?\.weight|lora_down\.weight|lora(?:_linear_layer)?\.down\.weight"
    r"|(?:(?<=_lora\.)|(?<=_lora[12]\.))down\.weight)"
    r"|(?P<b>lora_B(?:\.[\w-]+)?\.weight|lora_up\.weight|lora(?:_linear_layer)?\.up\.weight"
    r"|(?:(?<=_lora\.)|(?<=_lora[12]\.))up\.weight)|(?P<alpha>alpha)|(?P<b_bias>lora_B(?:\.[\w-]+)?\.bias|lora_up\.bias)"
    r"|(?P<diff>diff|w_norm)|(?P<diff_b>diff_b|b_norm)|(?P<diff_m>diff_m))"
)
_PARTS = tuple(_PART.groupindex)[1:]
ADDED = {  # what changes nothing where it is zero -> which tensor of its module it is a difference of
    "b_bias": ("bias",),
    "diff": ("weight", "scale", ""),
    "diff_b": ("bias",),
    "diff_m": ("modulation",),
}
_OTHER_KINDS = {  # what a key ends in -> what it is of
    r"dora_scale|lora_magnitude_vector(\.[\w-]+)?(\.weight)?": "DoRA",
    r"hada_\w+(\.[\w-]+)?": "LoHa",
    r"lokr_\w+(\.[\w-]+)?": "LoKr",
    r"b?oft_\w+(\.[\w-]+)?(\.weight)?": "OFT",
    r"ia3_\w+(\.[\w-]+)?": "IA3",
    r"vera_\w+(\.[\w-]+)?": "VeRA",
    r"lora_mid\.weight": "LoRA of a convolution in three parts",
    r"lora_embedding_[AB](\.[\w-]+)?": "LoRA of an embedding",
    r"set_weight": "a weight in place of the model's",
}
_QK_NORM = re.compile(r".*\.(?:(?:query|key)_norm\.scale|norm_(?:added_)?[qk]\.weight)")  # control adapters of FLUX.1
_UNDERSCORED = ("lora_unet_", "lora_transformer_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_te_", "lycoris_")
_PREFIXES = (*WRAPPERS, "unet.", "text_encoder.", "text_encoder_2.", "vae.", "pipe.dit.", "pipe.dit2.")
COMPONENTS = {  # prefix of a key -> the component of a pipeline that the adapter is for, where it says so
    "text_encoder.": "text_encoder", "lora_te_": "text_encoder", "lora_te1_": "text_encoder",
    "text_encoder_2.": "text_encoder_2", "lora_te2_": "text_encoder_2",
    "lora_te3_": "text_encoder_2",  # kohya's T5, also of FLUX.1, where there is no other encoder between
    "vae.": "vae", "transformer.": "transformer", "lora_unet_": "transformer", "lora_transformer_": "transformer",
    "diffusion_model.": "transformer", "model.diffusion_model.": "transformer", "unet.": "transformer",
    "pipe.dit.": "transformer", "pipe.dit2.": "transformer_2",
}  # fmt: skip


@dataclasses.dataclass
class Module:
    """One adapted module of the file: the keys of its tensors.

    Attributes:
        a, b, alpha: of a product of two factors.
        b_bias: what B adds, multiplied like the product.
        diff, diff_b, diff_m: differences of its weight, its bias and its table of modulation.
    """

    a: str | None = None
    b: str | None = None
    alpha: str | None = None
    b_bias: str | None = None
    diff: str | None = None
    diff_b: str | None = None
    diff_m: str | None = None

    @property
    def has_factors(self) -> bool:
        return any((self.a, self.b, self.b_bias)) or not any((self.diff, self.diff_b, self.diff_m))

    def differences(self) -> Iterator[tuple[str, str]]:
        """Part and key of everything that is added in full."""
        for part in ADDED:
            key = getattr(self, part)
            if key is not None:
                yield part, key


@dataclasses.dataclass
class Keys:
    """A file's tensors: by module, and those that stand in place of the model's."""

    modules: dict[str, Module] = dataclasses.field(default_factory=dict)
    instead: list[str] = dataclasses.field(default_factory=list)


def read_keys(source: Source, ignore: Sequence[str], problems: list[str]) -> Keys:
    """The file's tensors; those that have no place in an adapter that is supported are problems."""
    found, other = Keys(), dict[str, list[str]]()
    for key in source.tensors:
        if any(fnmatchcase(key, named) if "*" in named else key.startswith(named) for named in ignore):
            continue
        match = _PART.fullmatch(key)
        kind = next((kind for end, kind in _OTHER_KINDS.items() if re.search(rf"\.(?:{end})$", key)), None)
        if kind is None and match is None and _QK_NORM.fullmatch(key):
            found.instead.append(key)
        elif kind is not None or match is None:
            other.setdefault(kind or "no A, B or alpha of a LoRA", []).append(key)
        else:
            part = next(part for part in _PARTS if match[part])
            if part in ADDED and not np.any(source.read(key)):
                continue
            module = found.modules.setdefault(match["module"], Module())
            if getattr(module, part) is not None:
                problems.append(f"{key}: {getattr(module, part)} says the same of {match['module']}")
            setattr(module, part, key)
    for kind, keys in other.items():
        problems.append(f"{len(keys)} tensors are {kind}, which is not supported: {batched_names(keys, 3)}")
    if not found.modules and not found.instead and not other:
        problems.append("holds no tensors" + (" but those to ignore and zeros" if source.tensors else ""))
    return found


def is_of(named: str, component: str) -> bool:
    """Whether keys of the component `named` are those of `component`: files name one transformer, also of two."""
    return named == component or (named == "transformer" and component.startswith("transformer_"))


def without_prefix(name: str) -> Iterator[str]:
    """The name, and what is left of it as prefixes that trainers put before it are taken off."""
    yield name
    while start := next((start for start in _PREFIXES if name.startswith(start)), None):
        name = name.removeprefix(start)
        yield name


def without_underscores(name: str) -> str:
    """A name in which underscores stand for points, without the prefix that its trainer puts before it."""
    return next((name.removeprefix(start) for start in _UNDERSCORED if name.startswith(start)), name)
