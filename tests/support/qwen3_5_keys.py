"""Keys and shapes of Qwen3.5-27B as published, and its config."""

EMBED, MLP, VOCAB, LAYERS = 5120, 17408, 248320, 64
ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip
TEXT = {
    "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": EMBED, "intermediate_size": MLP,
    "num_hidden_layers": LAYERS, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "rope_parameters": ROPE,
}  # fmt: skip
BOTH = {"model_type": "qwen3_5", "text_config": TEXT, "vision_config": {"depth": 27}, "tie_word_embeddings": False}


def attention(block):
    return {
        f"{block}self_attn.q_proj.weight": (2 * 6144, EMBED),
        **{f"{block}self_attn.{n}_proj.weight": (1024, EMBED) for n in "kv"},
        f"{block}self_attn.o_proj.weight": (EMBED, 6144),
        **{f"{block}self_attn.{n}_norm.weight": (256,) for n in "qk"},
    }


def delta(block):
    sizes = {
        "in_proj_qkv.weight": (10240, EMBED), "in_proj_z.weight": (6144, EMBED), "in_proj_b.weight": (48, EMBED),
        "in_proj_a.weight": (48, EMBED), "conv1d.weight": (10240, 1, 4), "A_log": (48,), "dt_bias": (48,),
        "norm.weight": (128,), "out_proj.weight": (EMBED, 6144),
    }  # fmt: skip
    return {f"{block}linear_attn.{name}": shape for name, shape in sizes.items()}


def rest(block):
    return {
        **{f"{block}mlp.{n}_proj.weight": (MLP, EMBED) for n in ("gate", "up")},
        f"{block}mlp.down_proj.weight": (EMBED, MLP),
        **{f"{block}{n}_layernorm.weight": (EMBED,) for n in ("input", "post_attention")},
    }


def text_keys(body):
    keys = {f"{body}embed_tokens.weight": (VOCAB, EMBED), f"{body}norm.weight": (EMBED,)}
    for i in range(LAYERS):
        block = f"{body}layers.{i}."
        keys |= (attention if i % 4 == 3 else delta)(block) | rest(block)
    return keys | {"lm_head.weight": (VOCAB, EMBED)}


def visual_keys():
    visual, size = "model.visual.", 1152
    keys = {f"{visual}pos_embed.weight": (2304, size), f"{visual}patch_embed.proj.weight": (size, 3, 2, 16, 16)}
    keys |= {f"{visual}patch_embed.proj.bias": (size,)}
    linears = {"attn.qkv": (3456, size), "attn.proj": (size, size), "mlp.linear_fc1": (4304, size)}
    linears |= {"mlp.linear_fc2": (size, 4304)}
    for i in range(27):
        block = f"{visual}blocks.{i}."
        keys |= {f"{block}norm{n}.{end}": (size,) for n in (1, 2) for end in ("weight", "bias")}
        keys |= {f"{block}{name}.weight": shape for name, shape in linears.items()}
        keys |= {f"{block}{name}.bias": shape[:1] for name, shape in linears.items()}
    merger = {"norm": (size,), "linear_fc1": (4608, 4608), "linear_fc2": (EMBED, 4608)}
    keys |= {f"{visual}merger.{name}.weight": shape for name, shape in merger.items()}
    return keys | {f"{visual}merger.{name}.bias": shape[:1] for name, shape in merger.items()}


def mtp_keys():
    norms = {f"mtp.{n}.weight": (EMBED,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return {"mtp.fc.weight": (EMBED, 2 * EMBED), **attention("mtp.layers.0."), **rest("mtp.layers.0."), **norms}
