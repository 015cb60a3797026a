"""Decoders as the text encoders of image models, against transformers: chosen layers, padding on either side."""

import jax
import numpy as np
import pytest
import torch
import transformers
from torch_values import arrays, by_rules, error, harshen

from shardzoo.convert.families.decoder import LAYOUTS, RULES, read_config
from shardzoo.zoo import decoder, layout
from shardzoo.zoo.mesh import make_mesh

TOLERANCE = 5e-5
TEXT = dict(
    vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=7, num_attention_heads=8,
    num_key_value_heads=4, head_dim=8, max_position_embeddings=512, rms_norm_eps=1e-5,
)  # fmt: skip
VISION = dict(
    model_type="pixtral", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    image_size=56, patch_size=14, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip


def mistral():
    rope = {"rope_type": "default", "rope_theta": 1e9}
    text = dict(TEXT, model_type="mistral", sliding_window=None, rope_parameters=rope)
    config = transformers.Mistral3Config(
        text_config=text, vision_config=VISION, tie_word_embeddings=False, image_token_id=10, spatial_merge_size=2
    )
    return transformers.Mistral3ForConditionalGeneration(config), config, "transformers, multimodal"


def qwen():
    config = transformers.Qwen3Config(
        **TEXT, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    return transformers.Qwen3ForCausalLM(config), config, "transformers"


def build(make):
    """The torch model with no weight at a trivial value, our declaration and live model."""
    torch.manual_seed(0)
    model, config, name = make()
    harshen(model)
    declared = decoder.declare(read_config(config.to_dict(), {}))
    values = by_rules(arrays(model), declared, LAYOUTS, name, RULES)
    return model.eval(), declared, layout.fill(declared, values)


TOKENS = np.random.default_rng(0).integers(11, 128, (3, 19))
MASKS = {"left": np.arange(19) >= np.array([[5], [0], [13]]), "right": np.arange(19) < np.array([[19], [2], [11]])}


@pytest.mark.parametrize("side", MASKS)
@pytest.mark.parametrize("make", [mistral, qwen])
def test_layers_one_after_another_on_padding_too(make, side):
    """FLUX.2 attends to padding, so that what stands there counts."""
    layers, mask = (2, 4, 5), MASKS[side]
    model, declared, values = build(make)
    with torch.no_grad():
        states = model(
            input_ids=torch.tensor(TOKENS), attention_mask=torch.tensor(mask).long(), output_hidden_states=True
        ).hidden_states
    want = torch.stack([states[i] for i in layers], dim=2).flatten(2).numpy()
    part = decoder.encoder_part(declared, layers)
    given = {path: v[: layers[-1]] if path.startswith("blocks.") else v for path, v in layout.named(values).items()}
    first = layout.fill(part, {path: given[path] for path in layout.named(part)})
    for degrees, options in ((dict(), {}), (dict(context=2, tensor=2), dict(residual="seq"))):
        mesh = make_mesh(**degrees)
        live = layout.place(part, mesh, first)
        got = np.asarray(jax.jit(decoder.encode(part, mesh, layers=layers, **options))(live, TOKENS, mask))
        assert got.shape == (3, 19, 3 * 48) and error(got, want) <= TOLERANCE
