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

Beside A and B a file may hold what is added to weights, biases and tables as it is, which the same rules place:

| name                                  | added                                                                        |
|---------------------------------------|------------------------------------------------------------------------------|
| `<path>.lora_B.bias`, `.lora_up.bias` | to the bias, times alpha / rank as B A is                                    |
| `<path>.diff`, `.w_norm`              | to the weight, also of norms and convolutions, or to the tensor of that name |
| `<path>.diff_b`, `.b_norm`            | to the bias                                                                  |
| `<path>.diff_m`                       | to Wan's table of modulation                                                 |

Of a linear layer's weight such a difference is a pair of which one factor is the identity. Factors of a convolution are
multiplied out. Scales of the norms of queries and keys by their full names, as control adapters of FLUX.1 hold them,
stand in place of the model's.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo.convert.adapter_keys import COMPONENTS, is_of, read_keys
from shardzoo.convert.adapter_settings import read_settings
from shardzoo.convert.adapter_targets import Addition, Targets, without_ones
from shardzoo.convert.families import FAMILIES, rules_of
from shardzoo.convert.names import batched_names
from shardzoo.convert.rules import Piece
from shardzoo.convert.source import open_source
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import families
from shardzoo.zoo.adapters import Adapter, Factors, declare_lora, lead_dims
from shardzoo.zoo.layers import Linear
from shardzoo.zoo.layout import LAYER
from shardzoo.zoo.linears import BLOCK, input_dims, linear_layers, plain
from shardzoo.zoo.weights import declared_base

FILES = tuple(f"{stem}.{end}" for end in ("safetensors", "bin") for stem in ("adapter_model", "pytorch_lora_weights"))


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
        ignore = (*ignore, *(start for start, named in COMPONENTS.items() if not is_of(named, component)))
    base = plain(declared)
    with open_source(file) as source:
        settings, problems = read_settings(source, file, component or rules.part)
        keys = read_keys(source, ignore, problems)
        targets = Targets(rules, base, keys, component or rules.part)
        added = targets.additions(source, settings, problems)
        fail_if(problems, f"{path}: not an adapter for this model (family {rules.family})")
        values = {key: np.array(source.read(key), np.float32) for one in added for key in one.keys}
        broken = [key for key, value in values.items() if not np.isfinite(value).all()]
        fail_if([f"{batched_names(broken, 3)}: NaN or infinite"] if broken else [], f"{path}: repair the adapter")
    layers = linear_layers(base)
    shares: dict[str, list[_Share]] = {}
    for one in (one for one in added if targets.is_linear(one)):
        a, b = _pair(one, values)
        for piece in one.pieces:
            share = _share(piece, layers[piece.target], a, b)
            shares.setdefault(piece.target, []).append(dataclasses.replace(share, ratio=one.ratio, module=one.name))
    others = [one for one in added if not targets.is_linear(one)]
    return Adapter(
        name=name or _name_of(file, Path(path)),
        strength=strength,
        factors={target: _factors(layers[target], found, dtype) for target, found in shares.items()},
        differences=_in_full([one for one in others if not one.instead], values, targets.shapes, 0.0),
        instead=_in_full([one for one in others if one.instead], values, targets.shapes, np.nan),
    )


def _pair(one: Addition, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A and B, as matrices; of a whole difference with the identity as the smaller one."""
    out, into = without_ones(one.shape)
    if one.a is not None:
        return values[one.a].reshape(-1, into), values[one.b].reshape(out, -1)
    b = values[one.b].reshape(out, into)
    return (np.eye(into, dtype=np.float32), b) if into <= out else (b, np.eye(out, dtype=np.float32))


def _in_full(
    added: list[Addition], values: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], empty: float
) -> dict[str, np.ndarray]:
    """Path of each leaf -> all that is added to it, in its shape."""
    found: dict[str, np.ndarray] = {}
    for one in added:
        value = values[one.b] if one.a is None else values[one.b].reshape(one.shape[0], -1) @ _rows(values[one.a])
        value = np.float32(one.ratio) * value.reshape(one.shape)
        for piece in one.pieces:
            leaf = found.setdefault(piece.target, np.full(shapes[piece.target], empty, np.float32))
            at, take = (tuple(slice(*ranges) for ranges in where) for where in (piece.at, piece.take))
            new = value[take].reshape(leaf[at].shape)
            leaf[at] = new if one.instead else leaf[at] + new
    return found


def _rows(a: np.ndarray) -> np.ndarray:
    return a.reshape(len(a), -1)


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
    rows, columns = (slice(*ranges) for ranges in piece.take[:2])
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
