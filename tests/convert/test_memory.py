"""What a conversion holds in memory: its budget and little else, however much it converts."""

import json
import math
import subprocess
import sys

import pytest
import torch

from shardzoo.convert.convert import BUDGET

MIB = 1 << 20
CONVERT = """
import json, os, sys
if sys.argv[5:]:
    os.cpu_count = lambda: int(sys.argv[5])
from shardzoo.convert.convert import convert
from shardzoo.convert.memory import peak_memory

convert(sys.argv[1], sys.argv[2], sync=False)  # the program itself comes into memory as it is run
before = peak_memory()
report = convert(sys.argv[3], sys.argv[4], sync=False)
print(json.dumps({"before": before, "peak": report.peak_memory, "written": report.bytes_written,
                  "tensorstore": "tensorstore" in sys.modules}))
"""


def write_source(folder, files, layers, hidden, mlp):
    """A Llama of zeros, in holes: it takes no room on the disk, and pages of memory as any other."""
    block = {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
    block |= {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    block |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {f"model.layers.{i}.{name}.weight": s for i in range(layers) for name, s in block.items()}
    shapes |= {"model.embed_tokens.weight": (512, hidden), "model.norm.weight": (hidden,)}
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": mlp, "vocab_size": 512,
        "num_hidden_layers": layers, "num_attention_heads": 16, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if files == "pth":
        state = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
        torch.save(state, folder / "model.pth")
        return
    parts, keys = [f"model-{i + 1}-of-4.safetensors" for i in range(4)], list(shapes)
    for i, name in enumerate(parts):
        header, at = {}, 0
        for key in keys[i * len(keys) // 4 : (i + 1) * len(keys) // 4]:
            end = at + 2 * math.prod(shapes[key])
            header[key], at = {"dtype": "BF16", "shape": shapes[key], "data_offsets": [at, end]}, end
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
    weight_map = {key: parts[next(i for i in range(4) if n < (i + 1) * len(keys) // 4)] for n, key in enumerate(keys)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(("files", "processors"), [("safetensors", ()), ("safetensors", ("16",)), ("pth", ())])
def test_a_conversion_holds_its_budget_and_little_else(tmp_path, files, processors):
    write_source(tmp_path / "small", files, 6, 64, 176)
    write_source(tmp_path / "large", files, 6, 2048, 5632)
    places = [tmp_path / name for name in ("small", "small made", "large", "large made")]
    program = [sys.executable, "-c", CONVERT, *places, *processors]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["written"] > 4 * BUDGET, "too little for the budget to matter"
    assert found["peak"] - found["before"] < BUDGET + 40 * MIB, found
    assert found["peak"] < 400 * MIB, found
    assert not found["tensorstore"], "only reading needs TensorStore, which is 25 MiB by itself"


def test_the_peak_is_of_this_process_alone():
    """Not of the one that started it, whose memory it shares until its own program runs."""
    parent = """
import subprocess, sys
held = bytearray(300 << 20)
held[::4096] = bytes(len(held[::4096])).replace(bytes(1), b"x")
child = "from shardzoo.convert.memory import peak_memory; print(peak_memory())"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150 * MIB
