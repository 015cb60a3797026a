"""Adapters of every module of every layout: what they add to the leaves is what conversion makes of the sum B A."""

import numpy as np
import pytest
from lora_files import product
from safetensors.numpy import save_file

from shardzoo.convert import adapters as files
from shardzoo.convert.families import rules_of
from shardzoo.convert.rules import expand, expected
from shardzoo.zoo import clip_text, clip_vision, decoder, flux, flux2, layout, qwen3_5, qwen_image, t5, wan
from shardzoo.zoo.families import find_family
from shardzoo.zoo.linears import linear_layers

HEADS = dict(heads=4, head_dim=16, mlp=40)
CONFIGS = {
    "decoder": decoder.Config(vocab=56, embed=24, layers=3, kv_heads=2, **HEADS),
    "wan": wan.Config(in_channels=4, out_channels=4, layers=2, text=10, image=14, **HEADS),
    "flux": flux.Config(in_channels=6, double_layers=2, single_layers=3, text=10, pooled=7, axes=(4, 6, 6), **HEADS),
    "flux2": flux2.Config(in_channels=6, double_layers=2, single_layers=3, text=12, axes=(4, 4, 4, 4), **HEADS),
    "qwen-image": qwen_image.Config(in_channels=16, out_channels=4, layers=2, text=12, axes=(4, 6, 6), **HEADS),
    "qwen3-5": qwen3_5.Config(
        vocab=56,
        embed=24,
        layers=4,
        interval=2,
        kv_heads=2,
        rotary_dim=8,
        sections=(2, 1, 1),
        key_heads=2,
        value_heads=4,
        key_dim=8,
        value_dim=8,
        **HEADS,
    ),
    "t5": t5.Config(vocab=56, embed=24, layers=2, **HEADS),
    "clip-text": clip_text.Config(vocab=56, embed=24, layers=2, heads=4, mlp=40, end_token=55),
    "clip-vision": clip_vision.Config(embed=24, layers=2, heads=4, mlp=40, image=16, patch=4),
}
LAYOUTS = [(family, one.name) for family in CONFIGS for one in rules_of(family).layouts]


def source(family, name):
    """The declaration of a family's config, and the pieces and shapes of its tensors in one of its layouts."""
    rules, declared = rules_of(family), find_family(family).declare(CONFIGS[family])
    chosen = next(one for one in rules.layouts if one.name == name)
    of = (rules.rules_in(chosen), layout.named(declared), chosen.roots)
    return declared, expand(*of), {key: want.shape for key, want in expected(*of).items()}


def placed(pieces, sums, shapes):
    """Leaf -> what its pieces take of what is added to each source, zeros elsewhere."""
    want = {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}
    for piece in (p for p in pieces if p.source in sums):
        at, take = (tuple(slice(*r) for r in ranges) for ranges in (piece.at, piece.take))
        want[piece.target][at] = sums[piece.source][take].reshape(want[piece.target][at].shape)
    return want


@pytest.mark.parametrize("family, name", LAYOUTS)
def test_what_is_added_is_converted_as_the_weights_are(tmp_path, family, name):
    declared, pieces, shapes = source(family, name)
    layers, params = linear_layers(declared), layout.named(declared)
    barred = {p.source for p in pieces if p.target not in layers or len(shapes[p.source]) != 2}
    rng, tensors, sums = np.random.default_rng(0), {}, {}
    for i, key in enumerate(sorted({p.source for p in pieces} - barred)):
        module, rank = key.removesuffix(".weight"), 2 + i % 2
        a, b = (rng.normal(size=s).astype(np.float32) for s in ((rank, shapes[key][1]), (shapes[key][0], rank)))
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        tensors[f"base_model.model.{module}.alpha"] = np.asarray(1 + i % 5, np.float32)
        sums[key] = (1 + i % 5) / rank * (b @ a)
    assert len(sums) > 5
    save_file(tensors, tmp_path / "x.safetensors")
    found = files.read(tmp_path / "x.safetensors", declared, family=family)
    want = placed(pieces, sums, {path: params[path].shape for path in found.factors})
    for path, factors in found.factors.items():
        got = product(layers[path], factors)
        assert np.abs(got - want[path]).max() <= 1e-5 * np.abs(want[path]).max(), path
        assert factors.a.dtype == np.float32
    assert set(found.factors) == {p.target for p in pieces if p.source in sums}


@pytest.mark.parametrize("family, name", LAYOUTS)
def test_differences_are_converted_as_the_tensors_are(tmp_path, family, name):
    """Of every tensor: weights of linear layers as factors, all others in full."""
    declared, pieces, shapes = source(family, name)
    layers, params = linear_layers(declared), layout.named(declared)
    rng, tensors, sums = np.random.default_rng(0), {}, {}
    for key in sorted({p.source for p in pieces if p.target not in layers or len(shapes[p.source]) == 2}):
        sums[key] = rng.normal(size=shapes[key]).astype(np.float32)
        module, _, end = key.rpartition(".")
        to = {"weight": f"{module}.diff", "bias": f"{module}.diff_b"}.get(end, f"{key}.diff")
        tensors[f"diffusion_model.{to}"] = sums[key]
    save_file(tensors, tmp_path / "x.safetensors")
    found = files.read(tmp_path / "x.safetensors", declared, family=family)
    got = found.differences | {path: product(layers[path], factors) for path, factors in found.factors.items()}
    want = placed(pieces, sums, {path: params[path].shape for path in got})
    for path, value in got.items():
        np.testing.assert_array_equal(value, want[path], err_msg=path)
    assert set(got) == {p.target for p in pieces if p.source in sums}
