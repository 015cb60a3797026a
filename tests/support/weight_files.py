"""Weights as safetensors folders: written, read back, converted and exported, compared bit for bit."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from shardzoo import checkpoints
from shardzoo.convert.convert import convert
from shardzoo.convert.export import export
from shardzoo.convert.plan import Plan
from shardzoo.convert.rules import gaps
from shardzoo.convert.verify import verify
from shardzoo.zoo import layout

Tensors = Mapping[str, np.ndarray]


def write(folder: Path, named: Tensors, config: Mapping | None = None) -> Path:
    """A folder as diffusers writes it or, without a config, one of a single file."""
    folder.mkdir(parents=True)
    save_file(dict(named), folder / ("diffusion_pytorch_model.safetensors" if config else "single.safetensors"))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype == other[key].dtype and value.tobytes() == other[key].tobytes(), key


def holds(checkpoint: Path, want: Tensors) -> None:
    """That a checkpoint's leaves are these, whatever the dtype they are stored in."""
    opened = checkpoints.open(checkpoint)
    for path, value in want.items():
        assert np.array_equal(opened.read(path).astype(np.float32), value), path


def comes_back(source: Path, checkpoint: Path, **options) -> Path:
    """Converts, verifies, and exports beside the checkpoint: the same tensors and the same config."""
    convert(source, checkpoint, sync=False, **options)
    verify(checkpoint, source)
    out = checkpoint.with_name(f"{checkpoint.name}-out")
    export(checkpoint, out)
    same(loaded(out), loaded(source))
    config = source / "config.json"
    if config.exists():
        assert json.loads((out / "config.json").read_text()) == json.loads(config.read_text())
    return out


def both_layouts_come_back(folder: Path, diffusers: Path, original: Tensors, want: Tensors, config: object) -> None:
    """That a folder of diffusers and a single file of the original names are one model, each exported as it came."""
    comes_back(diffusers, folder / "a")
    comes_back(write(folder / "original", original), folder / "b", config=diffusers / "config.json")
    for name in "ab":
        assert checkpoints.open(folder / name).config == config
        holds(folder / name, want)


def each_is_written_from_the_other(folder: Path, diffusers: Path, original: Tensors, name: str, **options) -> Path:
    """Diffusers' folder to layout `name` and back again; `options` are for converting that. The last folder."""
    convert(diffusers, folder / "first", sync=False)
    export(folder / "first", folder / name, layout=name)
    same(loaded(folder / name), original)
    convert(folder / name, folder / "second", sync=False, **options)
    export(folder / "second", folder / "again", layout="diffusers")
    same(loaded(folder / "again"), loaded(diffusers))
    return folder / "again"


def taken_once(plan: Plan, keys: Mapping[str, tuple[int, ...]], prefix: str = "") -> None:
    """That the plan reads every number of these tensors once, and fills every parameter."""
    pieces = [piece for path, leaf in plan.leaves.items() if "carried" not in path for piece in leaf.pieces]
    taken = {prefix + key: 0 for key in keys}
    for piece in pieces:
        taken[piece.source] += math.prod(b - a for a, b in piece.take)
    assert taken == {prefix + key: math.prod(shape) for key, shape in keys.items()}
    assert gaps(pieces, layout.named(plan.declared)) == []
