"""Adapters on FLUX.1 and a decoder, held against torch with `W + s B A` in the weights: files of every layout."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_decoders
from diffusers.loaders.lora_conversion_utils import _convert_xlabs_flux_lora_to_diffusers
from lora_files import ALPHA, added, diffusers_pairs, original_pairs, write_file, write_peft
from safetensors.numpy import save_file
from torch_flux import build, values
from torch_values import arrays, error

from shardzoo.convert import adapters as files
from shardzoo.zoo import adapters, decoder, flux, layout
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 5e-5
rng = np.random.default_rng(4)
GIVEN = [rng.normal(size=s).astype(np.float32) for s in ((2, 12, 16), (2, 6, 32), (2, 24))]
TIMES, GUIDANCE = rng.uniform(0, 1, 2).astype(np.float32), rng.uniform(0, 1, 2).astype(np.float32)
IDS = flux.image_ids(3, 4)
COTANGENT = rng.normal(size=(2, 12, 16)).astype(np.float32)


def reference(model):
    return model(*_arguments()).sample


def ours(declared, mesh, model, **options):
    f = flux.forward(declared, mesh, **options)
    return jax.jit(lambda m: f(m, *GIVEN, TIMES, image_ids=IDS, guidance=GUIDANCE))(model)


class Tiny:
    def __init__(self, mesh=None):
        self.model, _, config = build()
        self.weights = arrays(self.model)
        self.declared, self.mesh = flux.declare(config), mesh or make_mesh()
        self.live = layout.place(self.declared, self.mesh, layout.fill(self.declared, values(self.weights, config)))

    def both(self, loaded):
        """The results with adapters apart and merged."""
        declared, model = adapters.attach(self.declared, self.live, self.mesh, loaded)
        apart = ours(declared, self.mesh, model)
        merged = adapters.merge(declared, model)
        assert jax.tree.structure(merged[0]) == jax.tree.structure(self.declared)
        return np.asarray(apart), np.asarray(ours(merged[0], self.mesh, merged[1]))


def scaled(pairs, alpha):
    return {name: (1.0 if alpha is None else alpha / len(a)) * (b @ a) for name, (a, b) in pairs.items()}


def in_metadata(settings):
    return {"lora_adapter_metadata": json.dumps(settings)}


STYLES = {
    "alpha in keys": (dict(style="diffusers"), ALPHA),
    "alpha in metadata": (
        dict(style="diffusers", alpha=None, metadata=in_metadata({"transformer.lora_alpha": ALPHA})), ALPHA,
    ),
    "no alpha": (dict(style="diffusers", alpha=None), None),
    "kohya": (dict(style="kohya"), ALPHA),
    "comfy": (dict(style="comfy"), ALPHA),
    "bare": (dict(style="bare"), ALPHA),
}  # fmt: skip


def same(one, other):
    assert one.factors.keys() == other.factors.keys()
    for path, factors in one.factors.items():
        for part in ("a", "b", "ratio"):
            assert np.array_equal(getattr(factors, part), getattr(other.factors[path], part)), (path, part)


def test_layouts_with_the_names_of_diffusers(tmp_path):
    """PEFT's by its numbers; the others are the same adapter."""
    tiny = Tiny()
    pairs = diffusers_pairs(tiny.weights)
    loaded = files.read(write_peft(tmp_path / "style", pairs), tiny.declared, strength=0.7)
    for number, (words, alpha) in enumerate(STYLES.values()):
        other = files.read(write_file(tmp_path / f"{number}.safetensors", pairs, **words), tiny.declared)
        want = loaded if alpha else files.read(write_peft(tmp_path / "none", pairs, lora_alpha=None), tiny.declared)
        same(other, want)
    apart, merged = tiny.both([loaded])
    plain = reference(tiny.model).detach().numpy()
    added(tiny.model, {n: 0.7 * d for n, d in scaled(pairs, ALPHA).items()})
    want = reference(tiny.model).detach().numpy()
    assert error(plain, want) > 0.05  # the adapter does something
    assert error(apart, want) <= TOLERANCE and error(merged, want) <= TOLERANCE


def test_layouts_with_the_original_names(tmp_path):
    """Packed projections: one A, and a B whose rows are of several leaves; columns of one A of two leaves."""
    tiny = Tiny()
    pairs, deltas = original_pairs(tiny.weights)
    loaded = files.read(write_file(tmp_path / "style.safetensors", pairs, "kohya"), tiny.declared)
    for style in ("comfy", "bare"):
        same(files.read(write_file(tmp_path / f"{style}.safetensors", pairs, style), tiny.declared), loaded)
    apart, merged = tiny.both([loaded])
    added(tiny.model, {name: ALPHA / 3 * delta for name, delta in deltas.items()})
    want = reference(tiny.model).detach().numpy()
    assert error(apart, want) <= TOLERANCE and error(merged, want) <= TOLERANCE


def test_names_of_xlabs_and_diffsynth(tmp_path):
    """XLabs': what diffusers makes of them; its single blocks adapt q, k and v alone of what the original packs."""
    declared = flux.declare(build()[-1])
    rows = {"double_blocks.0.processor.qkv_lora1": 192, "double_blocks.1.processor.qkv_lora2": 192}
    rows |= {"double_blocks.1.processor.proj_lora1": 64, "double_blocks.0.processor.proj_lora2": 64}
    rows |= {"single_blocks.1.processor.qkv_lora": 192, "single_blocks.0.processor.proj_lora": 64}
    tensors = {}
    for name, out in rows.items():
        into = 64 + 256 if name == "single_blocks.0.processor.proj_lora" else 64
        for part, shape in (("down", (2, into)), ("up", (out, 2))):
            tensors[f"{name}.{part}.weight"] = rng.normal(size=shape).astype(np.float32)
    theirs = _convert_xlabs_flux_lora_to_diffusers({name: torch.tensor(x) for name, x in tensors.items()})
    want = {name: x.numpy() for name, x in theirs.items() if x.shape[0]}
    for name, given in (
        ("theirs", want),
        ("ours", tensors),
        ("comfy", {f"diffusion_model.{k}": v for k, v in tensors.items()}),
    ):
        save_file({k: np.ascontiguousarray(v) for k, v in given.items()}, tmp_path / f"{name}.safetensors")
    wanted = files.read(tmp_path / "theirs.safetensors", declared)
    for name in ("ours", "comfy"):
        same(files.read(tmp_path / f"{name}.safetensors", declared, component="transformer"), wanted)
    pair = {"single_blocks.1.linear2": [rng.normal(size=s).astype(np.float32) for s in ((2, 320), (64, 2))]}
    plain = write_file(tmp_path / "plain.safetensors", pair, "bare", alpha=None)
    given = {
        f"pipe.dit.single_blocks.1.linear2.lora_{x}.default.weight": v
        for x, v in zip("AB", *pair.values(), strict=True)
    }
    save_file(given, tmp_path / "diffsynth.safetensors")
    same(files.read(tmp_path / "diffsynth.safetensors", declared, component="transformer"), files.read(plain, declared))


def test_several_adapters_with_a_strength_each(tmp_path):
    tiny = Tiny()
    first, (second, deltas) = diffusers_pairs(tiny.weights, seed=7), original_pairs(tiny.weights, seed=8)
    paths = write_peft(tmp_path / "first", first), write_file(tmp_path / "second.safetensors", second, "kohya")
    loaded = [files.read(path, tiny.declared) for path in paths]
    declared, model = adapters.attach(tiny.declared, tiny.live, tiny.mesh, loaded)
    assert adapters.names(declared) == ["first", "second"]
    model = adapters.set_strengths(model, {"first": 0.25, "second": -0.5})
    apart = ours(declared, tiny.mesh, model)
    added(tiny.model, {n: 0.25 * d for n, d in scaled(first, ALPHA).items()})
    added(tiny.model, {n: -0.5 * ALPHA / 3 * d for n, d in deltas.items()})
    want = reference(tiny.model).detach().numpy()
    assert error(apart, want) <= TOLERANCE
    assert error(ours(*_swap(adapters.merge(declared, model), tiny.mesh)), want) <= TOLERANCE
    bare = adapters.detach(declared, model)
    assert error(ours(*_swap(bare, tiny.mesh)), ours(tiny.declared, tiny.mesh, tiny.live)) == 0


def _swap(pair, mesh):
    return pair[0], mesh, pair[1]


def test_gradients_of_the_factors(tmp_path):
    """Those of A and B as torch has them, for weights W + ratio * B A."""
    tiny = Tiny()
    names = [
        *("transformer_blocks.1.attn.to_k", "transformer_blocks.0.attn.to_q"),
        *("single_transformer_blocks.0.proj_out", "norm_out.linear"),
    ]
    pairs = diffusers_pairs(tiny.weights, names=names)
    loaded = files.read(write_peft(tmp_path / "style", pairs), tiny.declared)
    declared, model = adapters.attach(tiny.declared, tiny.live, tiny.mesh, [loaded])
    chosen, rest = eqx.partition(model, adapters.trainable(model))
    f = flux.forward(declared, tiny.mesh)

    def loss(chosen):
        out = f(eqx.combine(chosen, rest), *GIVEN, TIMES, image_ids=IDS, guidance=GUIDANCE)
        return jnp.sum(out * COTANGENT)

    grads = layout.named(jax.jit(jax.grad(loss))(chosen))
    assert set(grads) == {p for p in layout.named(declared) if p.endswith((".a", ".b"))}
    leaves = {n: [torch.tensor(x, requires_grad=True) for x in ab] for n, ab in pairs.items()}
    patched = {
        f"{n}.weight": torch.tensor(tiny.weights[f"{n}.weight"]) + ALPHA / len(a) * (b @ a)
        for n, (a, b) in leaves.items()
    }
    out = torch.func.functional_call(tiny.model, patched, _arguments()).sample
    (out * torch.tensor(COTANGENT)).sum().backward()
    (ka, kb), (qa, qb) = leaves["transformer_blocks.1.attn.to_k"], leaves["transformer_blocks.0.attn.to_q"]
    at = "double.image.attn.qkv.weight.lora.style"
    assert error(grads[f"{at}.a"][1, 1, : len(ka)], ka.grad) <= TOLERANCE
    assert error(grads[f"{at}.b"][1, 1, ..., : len(ka)].reshape(64, -1), kb.grad) <= TOLERANCE
    assert error(grads[f"{at}.a"][0, 0, : len(qa)], qa.grad) <= TOLERANCE
    assert error(grads[f"{at}.b"][0, 0, ..., : len(qa)].reshape(64, -1), qb.grad) <= TOLERANCE
    assert not np.asarray(grads[f"{at}.a"][:, 2]).any() and not np.asarray(grads[f"{at}.b"][1, 0]).any()
    oa, ob = leaves["single_transformer_blocks.0.proj_out"]  # one pair in two leaves: the gradient is the sum
    into = [np.asarray(grads[f"single.{n}.weight.lora.style.a"][0]).reshape(len(oa), -1) for n in ("out", "down")]
    assert error(np.concatenate(into, axis=1), oa.grad) <= TOLERANCE
    both = [np.asarray(grads[f"single.{n}.weight.lora.style.b"][0]) for n in ("out", "down")]
    assert error(sum(both), ob.grad) <= TOLERANCE


def _arguments():
    ids = torch.tensor(IDS), torch.zeros(6, 3)
    return (*map(torch.tensor, GIVEN), torch.tensor(TIMES), *ids, torch.tensor(GUIDANCE))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_decoder(tmp_path, name):
    model, config = torch_decoders.build(name)
    declared, mesh = decoder.declare(config), make_mesh(context=2)
    weights = arrays(model)
    live = layout.place(declared, mesh, layout.fill(declared, torch_decoders.values(weights, config)))
    chosen = [n.removesuffix(".weight") for n, w in weights.items() if "_proj" in n and w.ndim == 2 and ".2." not in n]
    pairs = diffusers_pairs(weights, names=chosen)
    loaded = files.read(write_peft(tmp_path / "style", pairs, use_rslora=True), declared)
    tokens = np.random.default_rng(1).integers(0, 131, (2, 9))
    declared, live = adapters.attach(declared, live, mesh, [loaded])
    got = jax.jit(decoder.forward(declared, mesh))(live, tokens)
    with torch.no_grad():
        for n, (a, b) in pairs.items():
            model.get_parameter(f"{n}.weight").add_(ALPHA / len(a) ** 0.5 * torch.tensor(b @ a))
        assert error(got, model(torch.tensor(tokens)).logits) <= TOLERANCE
