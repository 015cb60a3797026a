"""A Llama checkpoint of a few kilobytes, as a Hugging Face folder with a tokenizer of words and a chat template."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<end>", "<user>", "<reply>", *(f"word{i}" for i in range(21))]
CONFIG = {
    "model_type": "llama",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
TEMPLATE = "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}<reply>"


def tensors(seed: int = 0, **changed) -> dict[str, np.ndarray]:
    """Random bfloat16 weights by Hugging Face key."""
    c = {**CONFIG, **changed}
    rng = np.random.default_rng(seed)
    embed, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * c["head_dim"], embed),
        "self_attn.k_proj": (kv * c["head_dim"], embed),
        "self_attn.v_proj": (kv * c["head_dim"], embed),
        "self_attn.o_proj": (embed, heads * c["head_dim"]),
        "mlp.gate_proj": (c["intermediate_size"], embed),
        "mlp.up_proj": (c["intermediate_size"], embed),
        "mlp.down_proj": (embed, c["intermediate_size"]),
        "input_layernorm": (embed,),
        "post_attention_layernorm": (embed,),
    }
    named = {
        "model.embed_tokens": (c["vocab_size"], embed),
        "model.norm": (embed,),
        "lm_head": (c["vocab_size"], embed),
    }
    for layer in range(c["num_hidden_layers"]):
        named |= {f"model.layers.{layer}.{part}": shape for part, shape in shapes.items()}
    return {f"{k}.weight": rng.standard_normal(s).astype(ml_dtypes.bfloat16) for k, s in named.items()}


def write(folder: Path, weights: dict[str, np.ndarray] | None = None, **changed) -> Path:
    """The folder; `changed` replaces entries of its config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
    return folder
