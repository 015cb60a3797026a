"""8-bit floats with scales: converted as their products, whatever the keys of the scales are; others are refused."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
import torch_flux
from safetensors.torch import save_file
from torch_values import arrays
from weight_files import loaded

from shardzoo import checkpoints
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.source import open_source
from shardzoo.convert.verify import verify
from shardzoo.errors import InputError

PREFIX = "model.diffusion_model."
# what stands beside a weight in place of {}: the scale, its shape, and what else
FORMS = {
    "scalar": ("scale_weight", lambda n: (), {"scale_input": torch.ones(())}),
    "one": ("weight_scale", lambda n: (1,), {"input_scale": torch.ones(1), "comfy_quant": torch.ones(9).byte()}),
    "rows": ("weight_scale", lambda n: (n, 1), {}),
    "channels": ("scale_weight", lambda n: (n,), {}),
}


def scaled(named, form, dtype, prefix):
    """The tensors of a file with scaled weights of blocks, and those of the plain file with their products."""
    name, shape, more = FORMS[form]
    generator = torch.Generator().manual_seed(2)
    file, plain = {f"{prefix}scaled_fp8": torch.zeros(2).to(dtype)}, {}
    for key, value in named.items():
        if not key.endswith("weight") or value.ndim != 2 or "blocks" not in key:
            plain[key] = file[prefix + key] = torch.tensor(value).bfloat16()
            continue
        scale = torch.rand(shape(len(value)), generator=generator) * 0.01 + 0.003
        module, across = prefix + key.removesuffix("weight"), scale.reshape(-1, 1)
        file[prefix + key] = stored = (torch.tensor(value) / across).clamp(-448, 448).to(dtype)
        file |= {module + name: scale, **{module + n: x.clone() for n, x in more.items()}}
        plain[key] = (stored.float() * across).bfloat16()
    return file, plain


def write(folder, tensors, saved):
    folder.mkdir()
    save_file(tensors, folder / "flux.safetensors")
    (folder / "config.json").write_text(json.dumps({**saved, "_class_name": "FluxTransformer2DModel"}))
    return folder


@pytest.mark.parametrize(
    "form, dtype, prefix",
    [
        ("scalar", torch.float8_e4m3fn, PREFIX),
        ("one", torch.float8_e5m2, ""),
        ("rows", torch.float8_e4m3fn, ""),
        ("channels", torch.float8_e4m3fn, PREFIX),
    ],
)
def test_weights_are_the_products(tmp_path, form, dtype, prefix):
    module, saved, config = torch_flux.build()
    file, plain = scaled(arrays(module), form, dtype, prefix)
    source, bare = write(tmp_path / "scaled", file, saved), write(tmp_path / "plain", plain, saved)
    options = {"sync": False, "memory_budget": None}
    report = convert(source, tmp_path / "a", **options)
    convert(bare, tmp_path / "b", **options)
    weights = sum(value.dtype == dtype for value in file.values()) - 1
    assert any(f"{weights} weights are 8-bit floats with scales" in note for note in report.notes)
    one, other = (checkpoints.open(tmp_path / name) for name in "ab")
    assert one.config == other.config == config and not one.manifest.header.skipped
    for path in one.manifest.leaves:
        assert one.read(path).tobytes() == other.read(path).tobytes(), path
        assert one.read(path).dtype == np.dtype(ml_dtypes.bfloat16)
    verify(tmp_path / "a", source)
    with pytest.raises(InputError, match="differ"):
        file[f"{prefix}transformer_blocks.0.attn.to_q.{FORMS[form][0]}"] *= 2
        verify(tmp_path / "a", write(tmp_path / "other", file, saved))
    made = export(tmp_path / "a", tmp_path / "out")
    assert "had scales, and are written as their products" in made.changed["flux.safetensors"]
    found = loaded(tmp_path / "out")
    assert {prefix + key for key in plain} == found.keys()
    for key, value in plain.items():
        assert found[prefix + key].astype(np.float32).tobytes() == value.float().numpy().tobytes(), key


def test_some_rows_are_those_of_the_whole(tmp_path):
    module, saved, _ = torch_flux.build()
    file, plain = scaled(arrays(module), "channels", torch.float8_e4m3fn, "")
    with open_source(write(tmp_path / "x", file, saved)) as source:
        key = "transformer_blocks.1.attn.to_k.weight"
        whole, some = source.read(key), source.read(key, slice(5, 9))
        assert whole[5:9].tobytes() == some.tobytes() == plain[key][5:9].view(torch.int16).numpy().tobytes()
        assert source.tensors[key].nbytes == whole.nbytes


@pytest.mark.parametrize(
    "key, value",
    [
        ("transformer_blocks.0.attn.to_q.weight_scale_inv", torch.ones(1, 1)),  # of blocks of 128 by 128
        ("transformer_blocks.0.attn.to_q.weight_scale", torch.ones(64, 2)),  # of blocks of a row
        ("transformer_blocks.0.attn.norm_q.weight_scale", torch.ones(())),  # of a weight that is not 8 bits
        ("transformer_blocks.7.attn.to_q.scale_weight", torch.ones(())),  # of no weight
    ],
)
def test_other_scales_are_refused_by_name(tmp_path, key, value):
    module, saved, _ = torch_flux.build()
    file, _ = scaled(arrays(module), "scalar", torch.float8_e4m3fn, "")
    del file["transformer_blocks.0.attn.to_q.scale_weight"]
    source = write(tmp_path / "x", file | {key: value}, saved)
    with pytest.raises(InputError) as caught:
        plan_conversion(source)
    assert key in str(caught.value).replace("{0-1}", "0"), caught.value
