"""Adapters and quantization from the command line: text and images, what audit and verify say, wrong usage."""

import json

import jax
import ml_dtypes
import numpy as np
import PIL.Image
import pytest
import tiny_images
import tiny_llama
import torch
from command_line import invoke
from lora_files import ALPHA, added, diffusers_pairs, write_file, write_peft

from shardzoo import checkpoints, zoo
from shardzoo.cli import diffusion
from shardzoo.convert import adapters as files
from shardzoo.zoo import adapters
from shardzoo.zoo.generate import complete
from shardzoo.zoo.mesh import make_mesh

PROMPT = "word3 word4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A source, checkpoints of it, and an adapter as PEFT writes it."""
    folder = tmp_path_factory.mktemp("weights")
    source = tiny_llama.write(folder / "source")
    assert invoke("convert", source, folder / "ckpt", "--dtype", "f32").status == 0
    ended = invoke("convert", source, folder / "int8", "--dtype", "f32", "--quantize", "int8")
    assert ended.status == 0 and "weights of blocks quantized to int8" in ended.out
    config = checkpoints.open(folder / "ckpt").config
    shapes = {
        f"model.layers.{i}.{name}.weight": np.empty(shape)
        for i in range(config.layers)
        for name, shape in (
            ("self_attn.q_proj", (config.heads * config.head_dim, config.embed)),
            ("self_attn.v_proj", (config.kv_heads * config.head_dim, config.embed)),
            ("mlp.down_proj", (config.embed, config.mlp)),
        )
    }
    pairs = diffusers_pairs(shapes, names=[name.removesuffix(".weight") for name in shapes])
    write_peft(folder / "style", {name: (8 * a, 8 * b) for name, (a, b) in pairs.items()})
    return folder


def replies(*arguments):
    ended = invoke("generate", *arguments, "--max-new-tokens", 12, "--json", "--raw", "--prompt", PROMPT)
    assert ended.status == 0, ended.err
    return [one["text"].split() for one in json.loads(ended.out)["replies"]]


def expected(folder, *loras, kind=None):
    mesh, ckpt = make_mesh(), checkpoints.open(folder / "ckpt")
    model, declared = checkpoints.restore(ckpt, mesh, quantize=kind), ckpt.declared
    declared = declared if kind is None else zoo.quantize.declare(declared, kind)
    loaded = [files.read(path, declared, strength=strength, name=f"n{i}") for i, (path, strength) in enumerate(loras)]
    declared, model = adapters.attach(declared, model, mesh, loaded)
    ids = [tiny_llama.WORDS.index(word) for word in PROMPT.split()]
    (reply,) = complete(declared, mesh, model, [ids], max_new_tokens=12, stop_ids=(0,))
    return [[tiny_llama.WORDS[token] for token in reply]]


def test_a_reply_with_adapters(folder):
    style = folder / "style"
    plain = replies(folder / "ckpt")
    assert replies(folder / "ckpt", "--lora", style) == expected(folder, (style, 1.0)) != plain
    assert replies(folder / "ckpt", "--lora", f"{style}=0") == plain
    twice = ("--lora", f"{style}=0.75", "--lora", f"{style}=-0.5")
    assert replies(folder / "ckpt", *twice, "--mesh", "tensor=2,context=2") == expected(folder, (style, 0.25))


def test_a_reply_of_quantized_weights(folder):
    want = expected(folder, (folder / "style", 0.5), kind="int8")
    lora = ("--lora", f"{folder / 'style'}=0.5")
    assert replies(folder / "int8", *lora) == want
    assert replies(folder / "ckpt", *lora, "--quantize", "int8", "--mesh", "tensor=2", "--offload") == want


def test_verify_audit_and_export_of_quantized_weights(folder, tmp_path):
    ended = invoke("verify", folder / "int8", folder / "source")
    assert ended.status == 0 and "but for what was quantized" in ended.out, ended.err
    assert "quantized to int8: error 0." in ended.out and "furthest off: blocks." in ended.out
    found = json.loads(invoke("verify", folder / "int8", folder / "source", "--json").out)["rounding"]
    assert set(found["groups"]) == {"blocks.attn", "blocks.mlp"} and 0.001 < found["error"] < 0.02
    sizes = {}
    for words in (["flux/flux1-dev"], ["flux/flux1-dev", "--quantize", "int8"]):
        report = json.loads(invoke("audit", *words, "--mesh", "tensor=4", "--json").out)
        sizes[len(words)] = report["meshes"][0]["parameter_bytes_per_device"]
    assert 0.24 < sizes[3] / sizes[1] < 0.27  # 8 bits for 32
    ended = invoke("audit", folder / "int8", "--mesh", "one", "--quantize", "fp8")
    assert ended.status == 1 and "its weights are int8 already: leave quantize out" in ended.err
    ended = invoke("export", folder / "int8", tmp_path / "out")
    assert ended.status == 1 and "quantized to int8" in ended.err and "--dequantize" in ended.err
    assert invoke("export", folder / "int8", tmp_path / "out", "--dequantize").status == 0


@pytest.mark.parametrize(
    "words, status, part",
    [
        (["--lora", "none.safetensors"], 1, "there is no such file"),
        (["--lora", "style.safetensors=much"], 2, "'much' in 'style.safetensors=much' is not a number"),
        (["--lora", "style.safetensors=inf"], 2, "is not a file and a finite weight"),
        (["--lora", "vae:x.safetensors"], 1, "there is no component 'vae': there are model"),
        (["--lora-ignore", "*.diff"], 1, "--lora-ignore does nothing without --lora"),
        (["--lora", "STYLE", "--lora-ignore", "base", "--lora-ignore", "*.alpha"], 1, "no tensors but those to ignore"),
        (["--quantize", "int4"], 2, "'int4' is not one of int8, fp8"),
    ],
)
def test_what_is_refused(folder, words, status, part):
    words = [folder / "style" if word == "STYLE" else word for word in words]
    ended = invoke("generate", folder / "ckpt", "--prompt", "word3", *words)
    assert ended.status == status and part in ended.err.replace("\n", " ").replace("│ ", ""), ended.err


@pytest.mark.slow
def test_an_image_with_adapters_is_that_of_diffusers_with_merged_weights(tmp_path, monkeypatch):
    theirs = tiny_images.pipeline("flux-schnell")
    theirs.save_pretrained(tmp_path / "source")
    assert invoke("convert", tmp_path / "source", tmp_path / "ours").status == 0
    weights = {name: w.detach().numpy() for name, w in theirs.transformer.named_parameters()}
    names = [n.removesuffix(".weight") for n, w in weights.items() if w.ndim == 2 and ".0." in n]
    pairs = diffusers_pairs(weights, names=names)
    write_file(tmp_path / "style.safetensors", pairs, "kohya")
    monkeypatch.setattr(diffusion, "start_mesh", lambda _: make_mesh(devices=jax.devices()[:1]))
    real, drawn = jax.random.normal, []
    monkeypatch.setattr(jax.random, "normal", lambda *given: drawn.append(real(*given)) or drawn[-1])
    words = ("--prompt", "a fox", "--height", 16, "--width", 24, "--steps", 2, "--seed", 4)
    lora = ("--lora", f"transformer:{tmp_path / 'style.safetensors'}=0.5")
    ended = invoke("generate", tmp_path / "ours", *words, *lora, "--out", tmp_path / "it.png")
    assert ended.status == 0, ended.err
    added(theirs.transformer, {n: 0.5 * ALPHA / len(a) * (b @ a) for n, (a, b) in pairs.items()})
    latents = theirs._pack_latents(torch.from_numpy(np.array(drawn[0])), *drawn[0].shape)
    options = {"num_inference_steps": 2, "latents": latents, "output_type": "np", "max_sequence_length": 256}
    want = theirs(prompt="a fox", height=16, width=24, **options).images[0]
    found = np.asarray(PIL.Image.open(tmp_path / "it.png"))
    assert found.shape == want.shape and np.abs(found - want * 255).max() < 0.55
    ended = invoke("convert", tmp_path / "source", tmp_path / "fp8", "--quantize", "fp8", "--dtype", "bf16")
    assert ended.status == 0, ended.err
    stored = checkpoints.open(tmp_path / "fp8" / "transformer")
    assert stored.leaf("single.up.weight.values").spec.dtype == ml_dtypes.float8_e4m3fn
    assert "nothing was quantized" in ended.err
    ended = invoke("generate", tmp_path / "fp8", *words, *lora, "--out", tmp_path / "fp8.png")
    assert ended.status == 0, ended.err
