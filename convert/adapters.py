"""LoRA adapters out of the files that trainers write, divided over a model's weights.

    style = adapters.read("style.safetensors", declared, strength=0.8)
    declared, model = zoo.adapters.attach(declared, model, mesh, [style])

Layouts, told apart by the names of the tensors:

| layout    | name of A (that of B likewise)                            | alpha                                   |
|-----------|-----------------------------------------------------------|-----------------------------------------|
| PEFT      | `base_model.model.<path>.lora_A.weight`                   | adapter_config.json beside it           |
| diffusers | `transformer.<path>.lora_A.weight` or `.lora.down.weight` | `<path>.alpha`, or the file's metadata  |
|           | `text_encoder.<path>.lora_linear_layer.down.weight`       | the same                                |
| kohya     | `lora_unet_<path with underscores>.lora_down.weight`      | `<path>.alpha`                          |
| ComfyUI   | `diffusion_model.<original path>.lora_down.weight`        | `<path>.alpha`                          |
| DiffSynth | `pipe.dit.<original path>.lora_A.default.weight`          | none                                    |
| XLabs     | `double_blocks.<number>.processor.qkv_lora1.down.weight`  | none                                    |

`<path>` may be that of any layout which the family converts. The family's own rules say which rows and columns of the
source's weight become which leaf; the same rows of B and columns of A then belong to that leaf. So an adapter of a
packed projection divides over the leaves that it was converted to, and several of one leaf come together in it.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo.convert.families import FAMILIES, FamilyRules, Layout, rules_of
from shardzoo.convert.names import batched_names
from shardzoo.convert.plan import grouped
from shardzoo.convert.recognise import WRAPPERS
from shardzoo.convert.rules import Piece, expand, expected
from shardzoo.convert.source import Source, open_source
from shardzoo.errors import InputError, fail_if
from shardzoo.strict_json import parse_object
from shardzoo.zoo import families, layout
from shardzoo.zoo.adapters import Adapter, Factors, declare_lora, lead_dims
from shardzoo.zoo.layers import Linear
from shardzoo.zoo.layout import LAYER
from shardzoo.zoo.linears import BLOCK, input_dims, linear_layers, plain
from shardzoo.zoo.weights import declared_base

CONFIG = "adapter_config.json"
METADATA = "lora_adapter_metadata"  # of diffusers, in the header of a safetensors file
MOST_NAMED = 40
FILES = tuple(f"{stem}.{end}" for end in ("safetensors", "bin") for stem in ("adapter_model", "pytorch_lora_weights"))
_PART = re.compile(
    r"(?P<module>.+?)\.(?:(?P<a>lora_A(?:\.[\w-]+)?\.weight|lora_down\.weight|lora(?:_linear_layer)?\.down\.weight"
    r"|(?:(?<=_lora\.)|(?<=_lora[12]\.))down\.weight)"
    r"|(?P<b>lora_B(?:\.[\w-]+)?\.weight|lora_up\.weight|lora(?:_linear_layer)?\.up\.weight"
    r"|(?:(?<=_lora\.)|(?<=_lora[12]\.))up\.weight)|(?P<alpha>alpha))"
)
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
_OTHER_KINDS = {  # what a key ends in -> what it is of
    r"dora_scale|lora_magnitude_vector(\.[\w-]+)?(\.weight)?": "DoRA",
    r"hada_\w+(\.[\w-]+)?": "LoHa",
    r"lokr_\w+(\.[\w-]+)?": "LoKr",
    r"b?oft_\w+(\.[\w-]+)?(\.weight)?": "OFT",
    r"ia3_\w+(\.[\w-]+)?": "IA3",
    r"vera_\w+(\.[\w-]+)?": "VeRA",
    r"lora_mid\.weight": "LoRA of a convolution in three parts",
    r"lora_embedding_[AB](\.[\w-]+)?": "LoRA of an embedding",
    r"lora_(B(\.[\w-]+)?|up)\.bias": "LoRA with biases",
    r"diff(_b)?": "a difference of whole weights",
    r"set_weight": "a weight in place of the model's",
}
_ADDED = ("LoRA with biases", "a difference of whole weights")  # what changes nothing where it is zero
_UNSUPPORTED = (  # by these fields of PEFT's config, where they are true
    *("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "trainable_token_indices", "use_qalora"),
)
_UNDERSCORED = ("lora_unet_", "lora_transformer_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_te_", "lycoris_")
_PREFIXES = (*WRAPPERS, "unet.", "text_encoder.", "text_encoder_2.", "vae.", "pipe.dit.", "pipe.dit2.")
_COMPONENTS = {  # prefix of a key -> the component of a pipeline that the adapter is for, where it says so
    "text_encoder.": "text_encoder", "lora_te_": "text_encoder", "lora_te1_": "text_encoder",
    "text_encoder_2.": "text_encoder_2", "lora_te2_": "text_encoder_2",
    "lora_te3_": "text_encoder_2",  # kohya's T5, also of FLUX.1, where there is no other encoder between
    "vae.": "vae", "transformer.": "transformer", "lora_unet_": "transformer", "lora_transformer_": "transformer",
    "diffusion_model.": "transformer", "model.diffusion_model.": "transformer", "unet.": "transformer",
    "pipe.dit.": "transformer", "pipe.dit2.": "transformer_2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What is said of ranks and alphas beside the tensors."""

    alpha: float | None = None
    alphas: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rank: int | None = None
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rooted: bool = False  # alpha / sqrt(rank) in place of alpha / rank

    def ratio(self, module: str, rank: int, own: float | None) -> float:
        """What B A is multiplied by; without any alpha it is 1."""
        alpha = own if own is not None else _of_module(self.alphas, module, self.alpha)
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self.rooted else rank)


def _of_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the module's path ends in, as PEFT looks them up."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern.removeprefix('^')})", module):
            return value
    return default


@dataclasses.dataclass
class _Module:
    """One adapted module of the file: keys of A and B, and its alpha."""

    a: str | None = None
    b: str | None = None
    alpha: str | None = None


def read(
    path: str | Path,
    declared: Any,
    *,
    strength: float = 1.0,
    name: str | None = None,
    family: str | None = None,
    ignore: Sequence[str] = (),
    component: str | None = None,
    dtype: Any = None,
) -> Adapter:
    """The adapter in a file or folder, for a model of this declaration.

    Args:
        path: a file of weights, or a folder as PEFT or diffusers write it.
        declared: the model, as declared for running: of any split, quantized or not, with adapters or without.
        strength: how much of it is wanted; `zoo.adapters.set_strengths` changes it.
        name: what it is called beside the model's weights; by default after the file.
        family: the model's family, where several have configs of its type.
        ignore: keys to leave out, by their beginnings or by patterns with `*`: parts of the file that are of another
            model ("lora_te1_"), or what is not supported ("*.diff_b").
        component: what the model is called in its pipeline ("text_encoder_2"): keys that say by their usual beginnings
            that they are of another are left out.
        dtype: of A and B; by default that of the weights.

    Raises:
        InputError: everything that does not fit, in one message: unknown modules, wrong shapes, halves of pairs,
            adapters of another kind (DoRA, LoHa, LoKr, ...), each by name.
    """
    file = _find(Path(path))
    rules = rules_of(family or _family_of(declared))
    if component is not None:
        ignore = (*ignore, *(start for start, named in _COMPONENTS.items() if not _is_of(named, component)))
    base = plain(declared)
    with open_source(file) as source:
        settings, problems = _settings(source, file, component or rules.part)
        modules = _modules(source, ignore, problems)
        targets = _Targets(rules, base, modules, component or rules.part)
        pairs = targets.pairs(source, modules, settings, problems)
        fail_if(problems, f"{path}: not an adapter for this model (family {rules.family})")
        values = {m: (_read(source, p.a), _read(source, p.b)) for m, p in modules.items() if p.a and p.b}
        keys = {key: value for m, both in values.items() for key, value in zip(_keys(modules[m]), both, strict=True)}
        broken = [key for key, value in keys.items() if not np.isfinite(value).all()]
        fail_if([f"{batched_names(broken, 3)}: NaN or infinite"] if broken else [], f"{path}: repair the adapter")
    layers = linear_layers(base)
    found: dict[str, list[_Share]] = {}
    for module, pieces, ratio in pairs:
        a, b = values[module]
        for piece in pieces:
            share = _share(piece, layers[piece.target], a, b)
            found.setdefault(piece.target, []).append(dataclasses.replace(share, ratio=ratio, module=module))
    factors = {target: _factors(layers[target], shares, dtype) for target, shares in found.items()}
    return Adapter(name=name or _name_of(file, Path(path)), strength=strength, factors=factors)


def _find(path: Path) -> Path:
    """The file of weights that `path` is or holds."""
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
        return path
    there = [path / name for name in FILES if (path / name).is_file()]
    others = sorted(path.glob("*.safetensors"))
    if not there and len(others) == 1:
        return others[0]
    if not there:
        raise InputError(f"{path}: holds none of {', '.join(FILES)}: give the file itself")
    return there[0]


def _name_of(file: Path, given: Path) -> str:
    stem = given.resolve().name if file.name in FILES and given.is_dir() else file.stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", stem)[:60] or "lora"


def _family_of(declared: Any) -> str:
    config = type(getattr(declared, "config", None))
    found = [name for name, one in families.FAMILIES.items() if one.config is config and name in FAMILIES]
    if len(found) != 1:
        raise InputError(f"adapters: the family of a model with config {config.__name__} is not clear: pass family=")
    return found[0]


def _is_of(named: str, component: str) -> bool:
    """Whether keys of the component `named` are those of `component`: files name one transformer, also of two."""
    return named == component or (named == "transformer" and component.startswith("transformer_"))


def _keys(module: _Module) -> tuple[str, str]:
    assert module.a is not None and module.b is not None  # of whole pairs only
    return module.a, module.b


def _read(source: Source, key: str) -> np.ndarray:
    return np.array(source.read(key), np.float32)


def _settings(source: Source, file: Path, component: str) -> tuple[_Settings, list[str]]:
    """Ranks and alphas from adapter_config.json, or from the metadata of diffusers; and what is not supported.

    The metadata has them for each component of a pipeline.
    """
    config = file.with_name(CONFIG)
    if file.name.startswith("adapter_model") and config.is_file():
        return _from_config(parse_object(config.read_bytes(), str(config)), CONFIG)
    header = source.files[0].header
    metadata = json.loads(header).get("__metadata__", {}) if header else {}
    if METADATA not in metadata:
        return _Settings(), []
    packed = parse_object(metadata[METADATA].encode(), f"{file}: metadata {METADATA}")
    named = {key: next((c for c in set(_COMPONENTS.values()) if key.startswith(f"{c}.")), None) for key in packed}
    own = {
        key if of is None else key.removeprefix(f"{of}."): packed[key]
        for key, of in named.items()
        if of is None or _is_of(of, component)
    }
    return _from_config(own, METADATA)


def _from_config(config: Mapping[str, Any], where: str) -> tuple[_Settings, list[str]]:
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
        return _Settings(), problems
    return _Settings(
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


def _modules(source: Source, ignore: Sequence[str], problems: list[str]) -> dict[str, _Module]:
    """The file's tensors by module; those that are no A, B or alpha are problems."""
    modules: dict[str, _Module] = {}
    other: dict[str, list[str]] = {}
    for key in source.tensors:
        if any(fnmatchcase(key, named) if "*" in named else key.startswith(named) for named in ignore):
            continue
        kind = next((kind for end, kind in _OTHER_KINDS.items() if re.search(rf"\.(?:{end})$", key)), None)
        if kind in _ADDED and not np.any(source.read(key)):
            continue
        match = _PART.fullmatch(key)
        if kind is not None or match is None:
            other.setdefault(kind or "no A, B or alpha of a LoRA", []).append(key)
            continue
        module = modules.setdefault(match["module"], _Module())
        part = next(part for part in ("a", "b", "alpha") if match[part])
        if getattr(module, part) is not None:
            problems.append(f"{key}: {getattr(module, part)} says the same of {match['module']}")
        setattr(module, part, key)
    for kind, keys in other.items():
        out = f' (ignore=("*.{keys[0].rpartition(".")[2]}",) goes without)' if kind in _ADDED else ""
        problems.append(f"{len(keys)} tensors are {kind}, which is not supported: {batched_names(keys, 3)}{out}")
    if not modules and not other:
        problems.append("holds no tensors" + (" but those to ignore and zeros" if source.tensors else ""))
    return modules


class _Targets:
    """Which pieces of the model's leaves each module of the file is, in the layout that knows most of them."""

    def __init__(self, rules: FamilyRules, declared: Any, modules: Iterable[str], component: str):
        self._layers, self._params, self._component = linear_layers(declared), layout.named(declared), component
        names = list(modules)
        candidates = [_Known(rules, one, self._params) for one in rules.layouts]
        self._known = max(candidates, key=lambda known: sum(known.find(name) is not None for name in names))

    def pairs(
        self, source: Source, modules: Mapping[str, _Module], settings: _Settings, problems: list[str]
    ) -> list[tuple[str, list[Piece], float]]:
        """Module, pieces and ratio of every sound pair; what is wrong with the others is added to `problems`."""
        pairs: list[tuple[str, list[Piece], float]] = []
        wrong: dict[str, str] = {}
        seen: dict[str, str] = {}
        for name, module in modules.items():
            key = self._known.find(name)
            problem = self._problem(source, name, module, key, settings)
            if key is not None and seen.setdefault(key, name) != name:
                problem = f"is {key}, as {seen[key]} is"
            if problem is not None:
                wrong[name] = problem
                continue
            assert key is not None and module.a is not None  # there was no problem
            rank = source.tensors[module.a].shape[0]
            own = None if module.alpha is None else float(np.asarray(source.read(module.alpha), np.float32).reshape(()))
            ratio = settings.ratio(name, rank, own)
            if not math.isfinite(ratio):
                wrong[name] = f"alpha={own} is not a finite number"
            pairs.append((name, self._known.pieces[key], ratio))
        lines = grouped(wrong)
        problems += lines[:MOST_NAMED] + ([f"and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else [])
        return pairs

    def _problem(self, source: Source, name: str, module: _Module, key: str | None, settings: _Settings) -> str | None:
        if key is None:
            named = next((c for start, c in _COMPONENTS.items() if name.startswith(start)), self._component)
            other = f" (it is for {named}, and this is {self._component}: component= (--lora PART:FILE) leaves it out)"
            return "no module of this model" + ("" if _is_of(named, self._component) else other)
        if module.a is None or module.b is None:
            return f"has no {'A (down)' if module.a is None else 'B (up)'}"
        lacking = [piece.target for piece in self._known.pieces[key] if piece.target not in self._layers]
        if lacking:
            return f"is {lacking[0]}, which is not the weight of a linear layer: adapters go on those alone"
        a, b = source.tensors[module.a], source.tensors[module.b]
        shape = self._known.shapes[key]
        if len(a.shape) != 2 or len(b.shape) != 2 or len(shape) != 2:
            return f"A and B have the shapes {a.shape} and {b.shape} for a weight of {shape}: only matrices are read"
        if (b.shape[0], a.shape[1]) != shape or a.shape[0] != b.shape[1] or a.shape[0] == 0:
            return f"A and B have the shapes {a.shape} and {b.shape}, expected (r, {shape[1]}) and ({shape[0]}, r)"
        if a.dtype.kind in "iub" or b.dtype.kind in "iub":
            return f"A and B are of {a.dtype.name} and {b.dtype.name}, not floating point"
        if module.alpha is not None and math.prod(source.tensors[module.alpha].shape) != 1:
            return f"alpha has the shape {source.tensors[module.alpha].shape}: it must be one number"
        rank = _of_module(settings.ranks, name, settings.rank)
        return None if rank in (None, a.shape[0]) else f"is of rank {a.shape[0]}, and its config says {rank}"


class _Known:
    """The modules of a layout: path -> pieces and shape of its weight, also by the path with underscores."""

    def __init__(self, rules: FamilyRules, layout: Layout, params: Mapping[str, Any]):
        end = ".weight"
        kind = rules.rules_in(layout)
        self.pieces: dict[str, list[Piece]] = {}
        for piece in expand(kind, params, layout.roots):
            if piece.source.endswith(end):
                self.pieces.setdefault(piece.source.removesuffix(end), []).append(piece)
        shapes = {key.removesuffix(end): want.shape for key, want in expected(kind, params, layout.roots).items()}
        self.shapes = {key: shapes[key] for key in self.pieces}
        self._add_xlabs()
        self._underscored: dict[str, str] = {key.replace(".", "_"): key for key in self.pieces}

    def _add_xlabs(self) -> None:
        """XLabs' names beside the original ones, some of which are of the first rows of a module alone."""
        for key, (name, theirs, leaves) in itertools.product(list(self.pieces), _XLABS):
            if match := name.fullmatch(key):
                own = [piece for piece in self.pieces[key] if leaves in piece.target]
                rows = max(piece.take[0][1] for piece in own)
                self.pieces[match.expand(theirs)] = own
                self.shapes[match.expand(theirs)] = (rows, *self.shapes[key][1:])

    def find(self, name: str) -> str | None:
        """The module that a name of the file means, without the prefixes that trainers put before it."""
        if "." not in name:
            bare = next((name.removeprefix(start) for start in _UNDERSCORED if name.startswith(start)), name)
            return self._underscored.get(bare)
        while name not in self.pieces:
            start = next((start for start in _PREFIXES if name.startswith(start)), None)
            if start is None:
                return None
            name = name.removeprefix(start)
        return name


@dataclasses.dataclass(frozen=True)
class _Share:
    """One module's factors in one leaf: A (rank, *in) and B (*out, rank) of some ranges of it, and their ratio.

    `columns` are those of the module's A.
    """

    at: Mapping[str, tuple[int, int]]
    a: np.ndarray
    b: np.ndarray
    columns: tuple[int, int]
    ratio: float = 1.0
    module: str = ""


def _share(piece: Piece, layer: Linear, a: np.ndarray, b: np.ndarray) -> _Share:
    """The columns of A and rows of B that belong to a piece, in the dims of its leaf."""
    at = dict(zip(declared_base(layer.weight).names, piece.at, strict=True))
    inputs = input_dims(layer)
    into = [at[dim][1] - at[dim][0] for dim in inputs]
    out = [stop - start for dim, (start, stop) in at.items() if dim not in (LAYER, *inputs)]
    rows, columns = (slice(*ranges) for ranges in piece.take)
    assert b[rows].shape[0] == math.prod(out) and a[:, columns].shape[1] == math.prod(into), piece
    rank = len(a)
    return _Share(at, a[:, columns].reshape(rank, *into), b[rows].reshape(*out, rank), piece.take[1])


def _factors(layer: Linear, shares: list[_Share], dtype: Any) -> Factors:
    """The factors of all of one leaf's modules, each in its layer and block.

    Modules that share a layer and block take ranks of their own, one after another; places of one module, such as its
    heads, have one A.
    """
    param, lead, inputs = declared_base(layer.weight), lead_dims(declared_base(layer.weight)), input_dims(layer)
    placed = [(slot, share, sub) for share in shares for slot, sub in _slots(lead, share)]
    ranks: dict[tuple[int, ...], int] = {}
    starts: dict[tuple[Any, ...], int] = {}
    for slot, share, _ in placed:
        if (slot, share.module, share.columns) not in starts:
            starts[slot, share.module, share.columns] = ranks.get(slot, 0)
            ranks[slot] = ranks.get(slot, 0) + len(share.a)
    declared = declare_lora(layer, max(ranks.values()), dtype)
    a, b = np.zeros(declared.a.shape, declared.a.dtype), np.zeros(declared.b.shape, declared.b.dtype)
    ratio = np.zeros(declared.ratio.shape, np.float32)
    outputs = [dim for dim in param.names if dim not in (*lead, *inputs)]
    for slot, share, _ in placed:  # the others of a slot are scaled to the first that is not 0
        ratio[slot] = ratio[slot] or share.ratio
    for slot, share, sub in placed:
        start = starts[slot, share.module, share.columns]
        part = slice(start, start + len(share.a))
        into: Any = (*slot, part, *(slice(*share.at[dim]) for dim in inputs))
        out: Any = (*slot, *(slice(*share.at[dim]) for dim in outputs), part)
        a[into] = share.a
        b[out] = sub * (share.ratio / ratio[slot] if share.ratio else 0.0)
    return Factors(a=a, b=b, ratio=ratio)


def _slots(lead: tuple[str, ...], share: _Share) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Each layer and block of a share, and its rows of B; one A serves all blocks that a module packs."""
    layers = [share.at[LAYER][0]] if LAYER in lead else []
    if BLOCK not in lead:
        yield tuple(layers), share.b
        return
    start, stop = share.at[BLOCK]
    for block in range(start, stop):
        yield (*layers, block), share.b[block - start]
