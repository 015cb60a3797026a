"""What export writes in a layout that a checkpoint did not come in: the family's rules for it, run backwards."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.checkpoints.manifest import CARRIED
from shardzoo.convert.backwards import OutFile, Placed, Tensor, new_file
from shardzoo.convert.families import FamilyRules, Layout
from shardzoo.convert.rules import Piece, expand, expected, gaps, volume
from shardzoo.errors import fail_if
from shardzoo.zoo.layout import Param, named

SHARD_BYTES = 5_000_000_000  # of tensors in one file, as the libraries of PyTorch's world cut them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relayout:
    """The files of a checkpoint in a layout that it did not come in; `notes` say what is left out."""

    files: list[OutFile]
    notes: tuple[str, ...]


def relayout(checkpoint: Checkpoint, rules: FamilyRules, layout: Layout) -> Relayout:
    """The weight files of `checkpoint` in `layout`.

    Raises:
        InputError: leaves and tensors that the layout has no place for, all by name.
    """
    fail_if(misfits(checkpoint, rules, layout), f"{checkpoint.path}: cannot be written in layout {layout.name!r}")
    params = named(checkpoint.declared)
    shapes, by_key = _tensors(params, rules, layout)
    tensors = {key: Tensor(params[found[0].target].dtype, shapes[key]) for key, found in by_key.items()}
    placed: dict[str, list[Placed]] = {key: [_placed(piece) for piece in found] for key, found in by_key.items()}
    notes = _add_parts(checkpoint, rules, layout, tensors, placed)
    order = sorted(tensors, key=_natural)
    return Relayout(files=list(_files(checkpoint, layout, {key: tensors[key] for key in order}, placed)), notes=notes)


def misfits(checkpoint: Checkpoint, rules: FamilyRules, layout: Layout) -> list[str]:
    """Leaves that the layout has no place for, and its tensors that the leaves do not make up."""
    params = named(checkpoint.declared)
    shapes, by_key = _tensors(params, rules, layout)
    pieces = [piece for found in by_key.values() for piece in found]
    housed = {piece.target for piece in pieces}
    problems = [f"{path}: has no place in it" for path in params if path not in housed]
    problems += gaps(pieces, {path: param for path, param in params.items() if path in housed})
    dtypes = {key: sorted({params[p.target].dtype.name for p in found}) for key, found in by_key.items()}
    return problems + list(_lacking(shapes, by_key, dtypes))


def _tensors(
    params: Mapping[str, Param], rules: FamilyRules, layout: Layout
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[Piece]]]:
    """The layout's tensors of a model of these parameters: their shapes, and the pieces that make up each."""
    kind = rules.rules_in(layout)
    shapes = {key: want.shape for key, want in expected(kind, params, layout.roots).items()}
    by_key: dict[str, list[Piece]] = {key: [] for key in shapes}
    for piece in expand(kind, params, layout.roots):
        by_key[piece.source].append(piece)
    return shapes, by_key


def _lacking(
    shapes: Mapping[str, tuple[int, ...]], by_key: Mapping[str, list[Piece]], dtypes: Mapping[str, list[str]]
) -> Iterator[str]:
    """Tensors of the layout that the leaves do not make up."""
    for key, found in by_key.items():
        if sum(volume(piece.take) for piece in found) != math.prod(shapes[key]):
            yield f"{key}: the leaves {', '.join(sorted({p.target for p in found}))} do not fill its {shapes[key]}"
        if len(dtypes[key]) > 1:
            leaves = ", ".join(sorted({piece.target for piece in found}))
            yield f"{key}: is made of {leaves}, which have the dtypes {' and '.join(dtypes[key])}: convert with dtype="


def _placed(piece: Piece) -> Placed:
    return piece.target, {"at": piece.at, "take": piece.take}


def _add_parts(
    checkpoint: Checkpoint,
    rules: FamilyRules,
    layout: Layout,
    tensors: dict[str, Tensor],
    placed: dict[str, list[Placed]],
) -> tuple[str, ...]:
    """Adds carried tensors that the layout names as the source did but for a prefix; says what is left out.

    Layouts with one set of rules differ in prefixes alone; between others, what other parts call theirs is not known.
    """
    detail = checkpoint.manifest.header.detail
    came = next((one for one in rules.layouts if one.name == detail.get("layout")), None)
    alike = came is not None and came.rules is layout.rules
    left_out = 0
    for key, leaf in checkpoint.manifest.carried.items():
        bare = key.removeprefix(detail.get("prefix", ""))
        new = _renamed(bare, came, layout) if came is not None and alike else None
        new = bare if re.escape(bare) in rules.unused_in(layout) else new  # a pattern that is a name: the same in both
        if new is None:
            left_out += 1
            continue
        whole = [(0, size) for size in leaf.spec.shape]
        tensors[new] = Tensor(leaf.spec.dtype, leaf.spec.shape)
        placed[new] = [(f"{CARRIED}/{key}", {"at": whole, "take": whole})]
    return (f"{left_out} tensors that are stored but not run have no name in it and were left out",) if left_out else ()


def _renamed(key: str, came: Layout, layout: Layout) -> str | None:
    """A key of another part in the other layout, or None where that has no such part."""
    for start, part in came.other.items():
        if key.startswith(start):
            return next((new + key.removeprefix(start) for new, name in layout.other.items() if name == part), None)
    return None


def _natural(key: str) -> list[tuple[int, str]]:
    """Sorts keys with their numbers as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]


def _files(
    checkpoint: Checkpoint, layout: Layout, tensors: Mapping[str, Tensor], placed: Mapping[str, list[Placed]]
) -> Iterator[OutFile]:
    came = checkpoint.manifest.header.detail.get("layout")
    why = f"written in layout {layout.name!r}" + (f", it came in {came!r}" if came else "")
    groups: list[dict[str, Tensor]] = [{}]
    for key, tensor in tensors.items():
        if groups[-1] and sum(t.nbytes for t in groups[-1].values()) + tensor.nbytes > SHARD_BYTES:
            groups.append({})
        groups[-1][key] = tensor
    for number, group in enumerate(groups, 1):
        part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        yield new_file(f"{layout.stem}{part}.safetensors", group, {key: placed[key] for key in group}, why)
