"""Tiny models of every type that the decoder family reads, saved by transformers and torch as users have them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
}


def _plain(model: type, config: type, **more) -> Callable[[], transformers.PreTrainedModel]:
    return lambda: model(config(**{**SIZES, **more}))


def _mistral3() -> transformers.PreTrainedModel:
    config = transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**SIZES),
        vision_config=transformers.PixtralVisionConfig(**VISION, patch_size=14, head_dim=8),
        tie_word_embeddings=False,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def _qwen_vl() -> transformers.PreTrainedModel:
    sizes = {key: size for key, size in SIZES.items() if key != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**sizes, "rope_parameters": rope},
        vision_config={**vision, "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 28},
        tie_word_embeddings=False,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": _plain(transformers.LlamaForCausalLM, transformers.LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama-tied": _plain(transformers.LlamaForCausalLM, transformers.LlamaConfig, tie_word_embeddings=True),
    "mistral": _plain(transformers.MistralForCausalLM, transformers.MistralConfig, sliding_window=8),
    "qwen2": _plain(transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    "qwen3": _plain(transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
    "mistral3": _mistral3,
    "qwen2.5-vl": _qwen_vl,
}


def make(name: str, dtype: torch.dtype = torch.bfloat16) -> transformers.PreTrainedModel:
    """The model with random weights, no two of them equal where that can be, norms and biases included."""
    torch.manual_seed(len(name))
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.to(dtype)


def save(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, shard: str = "20KB") -> Path:
    """A Hugging Face folder in shards, with files that stand for a tokenizer's."""
    make(name, dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


def save_bin(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, shards: int = 1) -> Path:
    """The same weights as transformers wrote them before safetensors: pickled, sharded with an index where asked."""
    model = make(name, dtype)
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    tensors = list(model.state_dict().items())
    if shards == 1:
        torch.save(dict(tensors), folder / "pytorch_model.bin")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        torch.save(dict(tensors[i::shards]), folder / file)
        weight_map |= {key: file for key, _ in tensors[i::shards]}
    size = sum(t.numel() * t.element_size() for _, t in tensors)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, in a last dim of their own."""
    flat = tensor.detach().contiguous()
    return flat.reshape(-1).view(torch.uint8).numpy().reshape(*flat.shape, flat.element_size())


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def edit_config(folder: Path, **fields) -> Path:
    """Changes fields of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def flip_bit(checkpoint: Path, leaf: str, at: int = 50) -> None:
    """Damages one bit of a leaf's values on disk."""
    file = max((f for f in (checkpoint / "params" / leaf).rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
