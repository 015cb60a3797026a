"""Every family quantized and with adapters, on a mesh: the result of the rounded, merged weights on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import harsh

from shardzoo.zoo import (
    adapters,
    clip_text,
    clip_vision,
    decoder,
    flux2,
    image_vae,
    layout,
    qwen3_5,
    qwen3_5_generate,
    qwen_image,
    t5,
    wan,
)
from shardzoo.zoo.adapters import Adapter, Factors
from shardzoo.zoo.families import TraceSizes, find_family
from shardzoo.zoo.generate import DECODER, generate
from shardzoo.zoo.linears import linear_layers
from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.quantize import declare, dequantize, quantize

TOLERANCE = 5e-5
FLUX2 = dict(in_channels=6, out_channels=5, heads=4, head_dim=16, double_layers=2, single_layers=2, mlp=40, text=12,
             axes=(4, 4, 4, 4))  # fmt: skip
FAMILIES = {
    "decoder": decoder.Config(vocab=56, embed=24, layers=3, heads=8, kv_heads=2, head_dim=6, mlp=40, qkv_bias=True),
    "wan": wan.Config(in_channels=4, out_channels=4, heads=4, head_dim=12, layers=2, mlp=40, text=10, image=14),
    "flux2": flux2.Config(**FLUX2),
    "qwen-image": qwen_image.Config(
        in_channels=16, out_channels=4, heads=4, head_dim=16, layers=2, mlp=40, text=12, axes=(4, 6, 6)
    ),
    "qwen3-5": qwen3_5.Config(
        vocab=56,
        embed=24,
        layers=4,
        mlp=40,
        interval=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rotary_dim=4,
        sections=(1, 1, 0),
        key_heads=2,
        value_heads=4,
        key_dim=6,
        value_dim=5,
    ),
    "t5": t5.Config(vocab=56, embed=24, layers=2, heads=4, head_dim=6, mlp=40),
    "clip-text": clip_text.Config(vocab=56, embed=24, layers=2, heads=4, mlp=40, end_token=55),
    "clip-vision": clip_vision.Config(embed=24, layers=2, heads=4, mlp=40, image=16, patch=4),
}
WIDE = dict(embed=32, mlp=64)  # widths whose products by one row are in parts
SIZES = TraceSizes(batch=2, tokens=11, frames=5, height=48, width=80)
SLOW = ("wan", "qwen-image", "clip-vision")


def style(declared):
    rng = np.random.default_rng(3)
    factors = {}
    for path, layer in linear_layers(declared).items():
        lora = adapters.declare_lora(layer, 3)
        a, b = (np.asarray(0.2 * rng.normal(size=s), np.float32) for s in (lora.a.shape, lora.b.shape))
        factors[path] = Factors(a=a, b=b, ratio=np.full(lora.ratio.shape, 0.6, np.float32))
    return Adapter(name="style", strength=0.5, factors=factors)


def rounded(declared, values, kind):
    """The quantized declaration with its values, and the values of the plain one that they stand for."""
    new, host = declare(declared, kind), layout.named(values)
    params = layout.named(new)
    made, plain = {p: v for p, v in host.items() if p in params}, dict(host)
    for path in (p for p in params if p.endswith(".values")):
        root, scale = path.removesuffix(".values"), path.removesuffix("values") + "scale"
        inputs = params[path].ndim - params[scale].ndim
        made[path], made[scale] = quantize(host[root], inputs, kind, params[scale].dtype)
        plain[root] = dequantize(made[path], made[scale], host[root].dtype)
    return new, layout.fill(new, made), layout.fill(declared, plain)


def inputs(abstract):
    rng = np.random.default_rng(1)
    return [
        jnp.asarray(rng.integers(1, 56, x.shape) if x.dtype == jnp.int32 else rng.uniform(0, 1, x.shape), x.dtype)
        for x in abstract
    ]


def run(family, declared, mesh, model):
    f, abstract = find_family(family).trace(declared, mesh, SIZES)
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(f)(model, *inputs(abstract)))]


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in FAMILIES])
def test_quantized_with_adapters_on_a_mesh(family):
    declared = find_family(family).declare(FAMILIES[family])
    new, made, plain = rounded(declared, harsh(declared), "int8")
    one = make_mesh()
    both = adapters.attach(declared, layout.place(declared, one, plain), one, [style(declared)])
    _, whole = adapters.merge(*both)
    want = run(family, declared, one, whole)
    mesh = make_mesh(tensor=2, context=2, kv_heads=2 if family in ("decoder", "qwen3-5") else None)
    apart = adapters.attach(new, layout.place(new, mesh, made), mesh, [style(new)])
    bare = run(family, new, mesh, adapters.detach(*apart)[1])
    for got, expected, without in zip(run(family, apart[0], mesh, apart[1]), want, bare, strict=True):
        assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()
        assert np.abs(without - expected).max() > 0.01 * np.abs(expected).max()
    full, merged = adapters.merge(*apart, dequantize=True)
    assert full == declared
    for path, leaf in layout.named(merged).items():
        expected = np.asarray(layout.named(whole)[path])
        assert np.abs(leaf - expected).max() <= TOLERANCE * np.abs(expected).max(), path


@pytest.mark.parametrize("family", ["decoder", pytest.param("qwen3-5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_of_quantized_weights_with_adapters(family, rows):
    """Decoding reads both where they lie with other layers: its tokens are the likeliest of the forward pass."""
    module = {"decoder": decoder, "qwen3-5": qwen3_5}[family]
    plain = module.declare(dataclasses.replace(FAMILIES[family], **WIDE))
    new, made, _ = rounded(plain, harsh(plain), "int8")
    mesh = make_mesh(tensor=2, kv_heads=2)
    declared, model = adapters.attach(new, layout.place(new, mesh, made), mesh, [style(new)])
    prompts, new_tokens = np.random.default_rng(2).integers(0, 56, (rows, 5)), 4
    engine = {"decoder": DECODER, "qwen3-5": qwen3_5_generate.ENGINE}[family]
    run = generate(declared, mesh, engine=engine)
    tokens, _ = run(model, prompts, np.full(rows, 5), max_new_tokens=new_tokens)
    ids = np.concatenate([prompts, tokens], axis=1)
    for live, holds in ((model, True), (adapters.detach(declared, model)[1], False)):
        logits = np.asarray(jax.jit(module.forward(declared if holds else new, mesh))(live, ids))[:, 4:-1]
        chosen = np.take_along_axis(logits, np.asarray(tokens)[..., None], axis=2)[..., 0]
        assert (logits.max(-1) - chosen <= 1e-4 * np.abs(logits).max()).all() == holds


def test_adapters_of_an_autoencoder_whose_attention_takes_its_weights_in_parts():
    """Queries of a device's own rows, keys and values of all of them: out of one packed weight."""
    config = image_vae.Config(latent_channels=3, widths=(4, 6), decoder_widths=(4, 6), blocks=1, groups=2)
    declared = image_vae.declare(config)
    values, latents = harsh(declared), np.random.default_rng(1).normal(size=(1, 3, 6, 4)).astype(np.float32)
    images = []
    for degrees, merged in ((dict(), True), (dict(), False), (dict(context=2, tensor=2), False)):
        mesh = make_mesh(**degrees)
        both = adapters.attach(declared, layout.place(declared, mesh, values), mesh, [style(declared)])
        new, model = adapters.merge(*both) if merged else both
        images.append(np.asarray(jax.jit(image_vae.decode(new, mesh))(model, latents)))
    for image in images[1:]:
        assert np.abs(image - images[0]).max() <= TOLERANCE * np.abs(images[0]).max()
    bare = jax.jit(image_vae.decode(declared, mesh))(layout.place(declared, mesh, values), latents)
    assert np.abs(bare - images[0]).max() > 0.01 * np.abs(images[0]).max()
