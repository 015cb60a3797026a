"""SmolLM2-135M-Instruct, real weights, through the converter: transformers' logits and its greedy continuations."""

import jax
import numpy as np
import pytest
import torch
import transformers

from shardzoo import checkpoints
from shardzoo.zoo import decoder
from shardzoo.zoo.generate import generate
from shardzoo.zoo.mesh import make_mesh

NEW = 64
TEXTS = [
    "The capital of France is", "Once upon a time there was a", "Water boils at", "def fibonacci(n):\n",
    "The three primary colours are", "In 1969, humans first", "A recipe for pancakes:", "Photosynthesis is the process",
    "The largest planet in the solar system", "To be or not to be,", "import numpy as np\n", "The mitochondria is",
    "My favourite season is", "Gravity is a force that", "The quick brown fox", "Dear Sir or Madam,",
    "The main causes of the First World War", "A triangle has three", "The opposite of hot is",
    "Machine learning is a field of", "Shakespeare wrote", "The Pacific Ocean",
]  # fmt: skip


@pytest.fixture(scope="module")
def reference(smollm2_folder):
    return transformers.LlamaForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(smollm2_folder):
    """Token ids, ragged, padded on the right, and lengths."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(smollm2_folder / "tokenizer.json"))
    ids = [tokenizer.encode(text) for text in TEXTS]
    lengths = np.array([len(one) for one in ids])
    tokens = np.zeros((len(ids), lengths.max()), int)
    for row, one in zip(tokens, ids, strict=True):
        row[: len(one)] = one
    return tokens, lengths


@pytest.fixture(scope="module")
def model(smollm2_checkpoint):
    mesh = make_mesh()
    return mesh, checkpoints.restore(smollm2_checkpoint, mesh)


def test_logits(reference, prompts, model):
    """Relative error at most 1e-4 (float32, 30 layers) at every valid position."""
    mesh, live = model
    tokens, lengths = prompts
    valid = np.arange(tokens.shape[1]) < lengths[:, None]
    with torch.inference_mode():
        want = reference(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(valid).long()).logits.numpy()
    f = jax.jit(decoder.forward(decoder.declare(live.config), mesh))
    got = np.asarray(f(live, tokens, lengths=lengths))
    assert np.abs(got - want)[valid].max() <= 1e-4 * np.abs(want[valid]).max()


def test_greedy_continuations(reference, prompts, model):
    """22 prompts, 64 new tokens each, token for token; no end token, for some of these texts are shorter."""
    mesh, live = model
    tokens, lengths = prompts
    width = tokens.shape[1]
    left, mask = np.zeros_like(tokens), np.zeros_like(tokens)  # transformers continues rows padded on the left
    for row, (ids, length) in enumerate(zip(tokens, lengths, strict=True)):
        left[row, width - length :], mask[row, width - length :] = ids[:length], 1
    reference.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = reference.generate(
            input_ids=torch.tensor(left), attention_mask=torch.tensor(mask), max_new_tokens=NEW, do_sample=False,
            pad_token_id=0,
        )[:, width:].numpy()  # fmt: skip
    run = generate(decoder.declare(live.config), mesh)
    got, counts = run(live, tokens, lengths, max_new_tokens=NEW)
    assert out.shape == (22, NEW) and (np.asarray(counts) == NEW).all()
    for row, (ours, theirs) in enumerate(zip(np.asarray(got), out, strict=True)):
        assert ours.tolist() == theirs.tolist(), TEXTS[row]
