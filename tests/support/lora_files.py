"""LoRA files for a tiny FLUX.1 in every layout that is read, and what each adds to the weights, by plain arithmetic."""

import json

import numpy as np
import torch
from safetensors.numpy import save_file

from shardzoo.zoo import adapters, layout
from shardzoo.zoo.adapters import Adapter, Factors, is_blocked
from shardzoo.zoo.linears import input_dims, linear_layers

RANK, ALPHA = 3, 5.0
# diffusers path -> the original's, for layers that both have whole
ALIKE = {
    "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
    "transformer_blocks.1.attn.to_add_out": "double_blocks.1.txt_attn.proj",
    "transformer_blocks.1.norm1.linear": "double_blocks.1.img_mod.lin",
    "transformer_blocks.0.ff.net.2": "double_blocks.0.img_mlp.2",
    "transformer_blocks.1.ff_context.net.0.proj": "double_blocks.1.txt_mlp.0",
    "single_transformer_blocks.1.norm.linear": "single_blocks.1.modulation.lin",
    "single_transformer_blocks.0.proj_out": "single_blocks.0.linear2",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
}
# the original's packed layers -> those of diffusers, in the order of their rows
PACKED = {
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"],
    "double_blocks.1.txt_attn.qkv": [f"transformer_blocks.1.attn.add_{x}_proj" for x in "qkv"],
    "single_blocks.1.linear1": [
        *(f"single_transformer_blocks.1.attn.to_{x}" for x in "qkv"), "single_transformer_blocks.1.proj_mlp",
    ],
}  # fmt: skip
SWAPPED = {"final_layer.adaLN_modulation.1": "norm_out.linear"}  # whose halves change places


def factors(shape, rank, rng):
    """A and B of a weight of this shape."""
    out, into = shape
    return [rng.normal(size=s).astype(np.float32) * 0.2 for s in ((rank, into), (out, rank))]


def diffusers_pairs(weights, seed=1, names=None):
    """Diffusers path -> (A, B), of some layers with ranks of their own."""
    rng = np.random.default_rng(seed)
    names = names or [*ALIKE, *(n for group in PACKED.values() for n in group), "norm_out.linear"]
    return {name: factors(weights[f"{name}.weight"].shape, RANK + i % 3, rng) for i, name in enumerate(names)}


def original_pairs(weights, seed=2):
    """The original's path -> (A, B), and diffusers path -> what the pair adds to its weight at a ratio of 1."""
    rng = np.random.default_rng(seed)
    pairs, deltas = {}, {}
    for theirs, ours in ALIKE.items():
        pairs[ours] = a, b = factors(weights[f"{theirs}.weight"].shape, RANK, rng)
        deltas[theirs] = b @ a
    for ours, group in PACKED.items():
        rows = [weights[f"{name}.weight"].shape[0] for name in group]
        pairs[ours] = a, b = factors((sum(rows), weights[f"{group[0]}.weight"].shape[1]), RANK, rng)
        deltas |= dict(zip(group, np.split(b @ a, np.cumsum(rows)[:-1]), strict=True))
    for ours, theirs in SWAPPED.items():
        pairs[ours] = a, b = factors(weights[f"{theirs}.weight"].shape, RANK, rng)
        deltas[theirs] = np.concatenate(np.split(b @ a, 2)[::-1])
    return pairs, deltas


def write_peft(folder, pairs, config=True, **changes):
    """A folder as PEFT writes it: alpha and ranks in adapter_config.json."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    if config:
        ranks = {name: len(a) for name, (a, _) in pairs.items() if len(a) != RANK}
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "rank_pattern": ranks, "alpha_pattern": {},
                    "bias": "none", "use_dora": False, **changes}  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def write_file(path, pairs, style, alpha=ALPHA, metadata=None):
    """One file in the style of "diffusers", "kohya", "comfy" or "bare"."""
    tensors = {}
    for name, (a, b) in pairs.items():
        module = {"kohya": "lora_unet_" + name.replace(".", "_"), "comfy": f"diffusion_model.{name}", "bare": name}
        module = module.get(style, f"transformer.{name}")
        down, up = ("lora_A", "lora_B") if style in ("diffusers", "bare") else ("lora_down", "lora_up")
        tensors |= {f"{module}.{down}.weight": a, f"{module}.{up}.weight": b}
        if alpha is not None:
            tensors[f"{module}.alpha"] = np.asarray(alpha, np.float32)
    save_file(tensors, path, metadata=metadata)
    return path


def added(model, deltas):
    """Adds to the weights of a torch model, in place; diffusers path -> array."""
    with torch.no_grad():
        for name, delta in deltas.items():
            model.get_parameter(f"{name}.weight").add_(torch.tensor(delta))


def made(declared, name, rank, seed=0, strength=0.8, only=""):
    """An adapter with random factors for every linear layer."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        return np.asarray(0.3 * rng.normal(size=shape), np.float32)

    factors = {}
    for path, layer in linear_layers(declared).items():
        lora = adapters.declare_lora(layer, rank)
        if only in path:
            factors[path] = Factors(
                a=draw(lora.a.shape),
                b=draw(lora.b.shape),
                ratio=np.asarray(np.abs(draw(lora.ratio.shape)) + 0.5, np.float32),
            )
    return Adapter(name=name, strength=strength, factors=factors)


def product(layer, factors):
    """ratio * B A in the dims of the weight, layer by layer and block by block."""
    param, inputs = layer.weight, input_dims(layer)
    out = np.zeros(param.shape, np.float32)
    for slot in np.ndindex(factors.ratio.shape):
        a, b = factors.a[slot], factors.b[slot]
        out[slot] = factors.ratio[slot] * np.tensordot(b, a, axes=1)
    assert a.ndim == 1 + len(inputs) and (factors.ratio.ndim == ("layer" in param.names) + is_blocked(param))
    return out


def with_adapter(declared, values, adapter):
    """Path -> weights with an adapter of a plain declaration in them."""
    layers, new = linear_layers(declared), {path: np.array(x) for path, x in layout.named(values).items()}
    for path, factors in adapter.factors.items():
        new[path] += adapter.strength * product(layers[path], factors)
    for path, value in adapter.differences.items():
        new[path] += adapter.strength * value
    for path, value in adapter.instead.items():
        new[path] += np.where(np.isnan(value), 0, adapter.strength * (value - new[path]))
    return new
