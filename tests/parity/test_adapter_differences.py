"""What adapters hold beside A and B, held against torch: differences of weights, biases, norms and tables.

Of Wan as distilled models come (lightx2v, CausVid and their like), of FLUX.1 as its control adapters do.
"""

import jax
import numpy as np
import pytest
import torch
import torch_flux
import torch_wan
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_wan_lora_to_diffusers
from lora_files import ALIKE, ALPHA, PACKED, SWAPPED, added, original_pairs, with_adapter, write_file
from safetensors.numpy import load_file, save_file
from torch_values import arrays, error

from shardzoo.convert import adapters as files
from shardzoo.zoo import adapters, flux, layout, wan
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 5e-5
STRENGTH = 0.7
MESH = pytest.param(dict(tensor=2, context=2), marks=pytest.mark.slow)


def drawn(rng, *shape):
    return (0.2 * rng.normal(size=shape)).astype(np.float32)


def wan_tensors(rng, config):
    """What diffusers reads of such a file, of every module that it knows, and what it leaves out."""
    embed, mlp, patch = config.embed, config.mlp, config.patch
    modules = {"time_projection.1": (6 * embed, embed), "time_embedding.0": (embed, config.freq)}
    modules |= {"time_embedding.2": (embed, embed), "text_embedding.0": (embed, config.text)}
    modules |= {"text_embedding.2": (embed, embed), "img_emb.proj.1": (20, 20), "img_emb.proj.3": (embed, 20)}
    for block in range(config.layers):
        names = [f"self_attn.{x}" for x in "qkvo"] + [f"cross_attn.{x}" for x in ("q", "k", "v", "o", "k_img", "v_img")]
        modules |= {f"blocks.{block}.{name}": (embed, embed) for name in names}
        modules |= {f"blocks.{block}.ffn.0": (mlp, embed), f"blocks.{block}.ffn.2": (embed, mlp)}
    known, more = {}, {}
    for i, (name, (out, into)) in enumerate(modules.items()):
        known |= {f"{name}.lora_down.weight": drawn(rng, 3, into), f"{name}.lora_up.weight": drawn(rng, out, 3)}
        known[f"{name}.diff_b"] = drawn(rng, out)
        if i % 3 == 0 and "attn" in name:
            known[f"{name}.alpha"] = np.array(5, np.float32)
    out = config.out_channels * int(np.prod(patch))
    known |= {"head.head.diff": drawn(rng, out, embed), "head.head.diff_b": drawn(rng, out)}
    for block in range(config.layers):
        for name in ("self_attn.norm_q", "self_attn.norm_k", "cross_attn.norm_q", "cross_attn.norm_k_img", "norm3"):
            more[f"blocks.{block}.{name}.diff"] = drawn(rng, embed)
        more[f"blocks.{block}.norm3.diff_b"] = drawn(rng, embed)
        more[f"blocks.{block}.diff_m"] = drawn(rng, 1, 6, embed)
    more |= {"patch_embedding.diff": drawn(rng, embed, config.in_channels, *patch)}
    more |= {"patch_embedding.diff_b": drawn(rng, embed), "head.diff_m": drawn(rng, 1, 2, embed)}
    more |= {"img_emb.proj.0.diff": drawn(rng, 20), "img_emb.proj.4.diff_b": drawn(rng, embed)}
    return known, more


THEIRS = {  # what diffusers leaves out -> what it calls the parameter
    "self_attn.norm": "attn1.norm", "cross_attn.norm_k_img": "attn2.norm_added_k", "cross_attn.norm": "attn2.norm",
    "norm3": "norm2", "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2", "head.diff_m": "scale_shift_table",
    "diff_m": "scale_shift_table", ".diff_b": ".bias", ".diff": ".weight",
}  # fmt: skip


def their_name(key):
    for ours, theirs in THEIRS.items():
        key = key.replace(ours, theirs)
    return key


def changed(model, known, more, strength):
    """Adds to a torch model as PEFT does what diffusers makes of the file, and the rest to what it is named after."""
    start = "transformer."
    given = {f"diffusion_model.{key}": torch.tensor(x) for key, x in known.items()}
    made = {key.removeprefix(start): x for key, x in _convert_non_diffusers_wan_lora_to_diffusers(given).items()}
    with torch.no_grad():
        for key, a in made.items():
            name, end, _ = key.partition(".lora_A.weight")
            if end:
                model.get_parameter(f"{name}.weight").add_(strength * made[f"{name}.lora_B.weight"] @ a)
            elif key.endswith(".lora_B.bias"):
                model.get_parameter(key.replace("lora_B.", "")).add_(strength * a)
        for key, x in more.items():
            model.get_parameter(their_name(key)).add_(strength * torch.tensor(x))


@pytest.mark.parametrize("degrees", [{}, MESH], ids=str)
def test_distilled_wan(tmp_path, degrees):
    model, _, config = torch_wan.build(**torch_wan.IMAGE)
    rng = np.random.default_rng(2)
    known, more = wan_tensors(rng, config)
    save_file({f"diffusion_model.{key}": x for key, x in {**known, **more}.items()}, tmp_path / "fast.safetensors")
    declared, mesh = wan.declare(config), make_mesh(**degrees)
    host = layout.fill(declared, torch_wan.values(arrays(model), config))
    loaded = files.read(tmp_path / "fast.safetensors", declared, strength=STRENGTH)
    assert {*loaded.differences, *loaded.factors} == {*layout.named(declared)} - {
        *("blocks.cross.text.k_norm.weight", "image.norm_in.bias", "image.norm_out.weight"),  # which the file leaves
    }
    text, image = (rng.normal(size=s).astype(np.float32) for s in ((2, 512, 32), (2, 5, 20)))
    latents, times = rng.normal(size=(2, 12, 3, 6, 8)).astype(np.float32), np.array([999, 250])
    declared, live = adapters.attach(declared, layout.place(declared, mesh, host), mesh, [loaded])
    f = wan.forward(declared, mesh)
    run = jax.jit(lambda m: f(m, latents, times, text=text, image=image))

    def reference():
        given = (torch.tensor(x) for x in (latents, times, text))
        with torch.no_grad():
            return model(*given, encoder_hidden_states_image=torch.tensor(image)).sample.numpy()

    plain = reference()
    assert error(run(adapters.set_strengths(live, {"fast": 0.0})), plain) <= TOLERANCE
    changed(model, known, more, STRENGTH)
    want = reference()
    assert error(plain, want) > 0.1 and error(run(live), want) <= TOLERANCE
    assert_same(with_adapter(wan.declare(config), host, loaded), torch_wan.values(arrays(model), config))
    if degrees:
        merged = adapters.merge(declared, live)[1]
        assert_same(layout.named(merged), torch_wan.values(arrays(model), config))


def assert_same(got, want):
    for path, leaf in got.items():
        assert error(leaf, want[path]) <= 1e-6, path


@pytest.mark.parametrize("degrees", [None, MESH], ids=str)
def test_control_of_flux(tmp_path, degrees):
    """Biases of B, multiplied as B A is, and scales of norms in place of the model's."""
    model, _, config = torch_flux.build()
    weights = {name: x.copy() for name, x in arrays(model).items()}  # not to be changed with the model
    pairs, deltas = original_pairs(weights)
    rng = np.random.default_rng(3)
    biases = {ours: drawn(rng, len(b)) for ours, (_, b) in pairs.items()}
    theirs = {name: biases[ours] for name, ours in ALIKE.items()}
    for ours, group in PACKED.items():
        cuts = np.cumsum([len(weights[f"{name}.bias"]) for name in group])[:-1]
        theirs |= dict(zip(group, np.split(biases[ours], cuts), strict=True))
    theirs |= {name: np.concatenate(np.split(biases[ours], 2)[::-1]) for ours, name in SWAPPED.items()}
    scales = {
        "double_blocks.1.img_attn.norm.key_norm.scale": "transformer_blocks.1.attn.norm_k.weight",
        "double_blocks.0.txt_attn.norm.query_norm.scale": "transformer_blocks.0.attn.norm_added_q.weight",
        "single_blocks.1.norm.key_norm.scale": "single_transformer_blocks.1.attn.norm_k.weight",
    }
    values = {ours: 1 + drawn(rng, 16) for ours in scales}
    path = write_file(tmp_path / "depth.safetensors", pairs, "bare")
    save_file({**load_file(path), **{f"{n}.lora_B.bias": x for n, x in biases.items()}, **values}, path)
    added(model, {name: ALPHA / 3 * delta for name, delta in deltas.items()})
    with torch.no_grad():
        for name, bias in theirs.items():
            model.get_parameter(f"{name}.bias").add_(torch.tensor(ALPHA / 3 * bias))
        for ours, name in scales.items():
            model.get_parameter(name).copy_(torch.tensor(values[ours]))
    declared = flux.declare(config)
    host, loaded = layout.fill(declared, torch_flux.values(weights, config)), files.read(path, declared)
    wanted = torch_flux.values(arrays(model), config)
    assert_same(with_adapter(declared, host, loaded), wanted)
    if degrees is None:
        return
    mesh = make_mesh(**degrees)
    declared, live = adapters.attach(declared, layout.place(declared, mesh, host), mesh, [loaded])
    sizes = (2, 12, 16), (2, 6, 32), (2, 24)
    given, ids = [rng.normal(size=s).astype(np.float32) for s in sizes], flux.image_ids(3, 4)
    times, guidance = (rng.uniform(0, 1, 2).astype(np.float32) for _ in range(2))
    f = flux.forward(declared, mesh)
    got = jax.jit(lambda m: f(m, *given, times, image_ids=ids, guidance=guidance))(live)
    with torch.no_grad():
        places = torch.tensor(ids), torch.zeros(6, 3)
        want = model(*map(torch.tensor, (*given, times)), *places, torch.tensor(guidance)).sample.numpy()
    assert error(got, want) <= TOLERANCE
    assert_same(layout.named(adapters.merge(declared, live)[1]), wanted)
