"""Adapter files that do not fit are refused whole, every problem by name."""

import json

import numpy as np
import pytest
from lora_files import diffusers_pairs, with_adapter, write_file, write_peft
from mesh_parity import harsh
from safetensors.numpy import load_file, save_file
from tiny_families import TINY
from tiny_flux import CONFIG

from shardzoo.convert import adapters as files
from shardzoo.convert.families import FAMILIES, rules_of
from shardzoo.convert.families.flux import FAMILY
from shardzoo.convert.rules import expand, expected
from shardzoo.errors import InputError
from shardzoo.zoo import adapters, clip_text, decoder, flux, layout, quantize
from shardzoo.zoo.families import find_family
from shardzoo.zoo.linears import linear_layers
from shardzoo.zoo.mesh import make_mesh

DECLARED = flux.declare(CONFIG)


def shapes(name="diffusers"):
    rules = next(one.rules for one in FAMILY.layouts if one.name == name)
    return {k: np.empty(want.shape) for k, want in expected(rules, layout.named(DECLARED), {}).items()}


NAMES = ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.2", "single_transformer_blocks.1.proj_out"]


def pairs():
    return diffusers_pairs(shapes(), names=NAMES)


def refusal(path, **options):
    with pytest.raises(InputError) as caught:
        files.read(path, DECLARED, **options)
    return str(caught.value)


def test_everything_wrong_in_one_message(tmp_path):
    path = write_file(tmp_path / "x.safetensors", pairs(), "diffusers")
    tensors = load_file(path)
    start = "transformer.transformer_blocks.0.attn.to_q"
    a = tensors[f"{start}.lora_A.weight"]
    del tensors["transformer.transformer_blocks.1.ff.net.2.lora_B.weight"]
    tensors[f"{start}.lora_A.weight"] = np.concatenate([a, a], axis=1)
    for i in (0, 1, 2):
        tensors[f"transformer.transformer_blocks.{i}.attn.to_z.lora_A.weight"] = a
        tensors[f"transformer.transformer_blocks.{i}.attn.to_z.lora_B.weight"] = a.T.copy()
    tensors["transformer.transformer_blocks.0.attn.norm_q.lora_A.weight"] = a
    tensors["transformer.transformer_blocks.0.attn.norm_q.lora_B.weight"] = a.T.copy()
    tensors["lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"] = a
    tensors["lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight"] = a.T.copy()
    tensors["transformer.x_embedder.bias"] = a[0].copy()
    save_file(tensors, path)
    text = refusal(path)
    for part in (
        "to_q: A and B have the shapes (3, 192) and (96, 3), expected (r, 96) and (96, r)",
        "transformer_blocks.1.ff.net.2: has no B (up)",
        "transformer_blocks.{0-2}.attn.to_z: no module of this model",
        "norm_q: is double.image.attn.q_norm.weight, which is not the weight of a linear layer",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1: no module of this model (it is for text_encoder, and this is"
        " transformer: component= (--lora PART:FILE) leaves it out)",
        "1 tensors are no A, B or alpha of a LoRA, which is not supported: transformer.x_embedder.bias",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    "key, kind",
    [
        ("lora_unet_x.hada_w1_a", "LoHa"),
        ("lora_unet_x.lokr_w2", "LoKr"),
        ("lora_unet_x.dora_scale", "DoRA"),
        ("base_model.model.x.lora_magnitude_vector.default.weight", "DoRA"),
        ("transformer.x.oft_blocks", "OFT"),
        ("model.diffusion_model.x.set_weight", "a weight in place of the model's"),
    ],
)
def test_other_kinds_by_name(tmp_path, key, kind):
    save_file({key: np.ones((2, 2), np.float32)}, tmp_path / "x.safetensors")
    assert f"1 tensors are {kind}, which is not supported: {key}" in refusal(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "changes, part",
    [
        (dict(use_dora=True), "use_dora=True is not supported"),
        (dict(peft_type="LOHA"), "peft_type='LOHA' is not LORA"),
        (dict(bias="all"), "bias='all' is not supported"),
        (dict(r=5, rank_pattern={}), "is of rank 3, and its config says 5"),
        (dict(lora_alpha="x"), "lora_alpha='x' is not a finite number"),
        (dict(lora_alpha=10**400), "lora_alpha='1000000000000000000000000000000000000000' is not a finite number"),
        (dict(alpha_pattern={"(": 2}), "pattern '(' is no regular expression"),
        (dict(alpha_pattern=["x"]), "alpha_pattern=['x'] is not an object"),
        (dict(rank_pattern="x"), "rank_pattern='x' is not an object"),
    ],
)
def test_configs_that_say_something_else(tmp_path, changes, part):
    folder = write_peft(tmp_path / "style", pairs(), **changes)
    assert part in refusal(folder)


def source_of(rules, layout_, declared):
    """Key -> shape and pieces of the tensors of a layout."""
    kind, params, pieces = rules.rules_in(layout_), layout.named(declared), {}
    for piece in expand(kind, params, layout_.roots):
        pieces.setdefault(piece.source, []).append(piece)
    return {key: (want.shape, pieces[key]) for key, want in expected(kind, params, layout_.roots).items()}


def in_leaves(values, deltas, sources):
    """The leaves with what is added to the tensors of a source, by plain slices."""
    new = {path: np.array(x) for path, x in layout.named(values).items()}
    for key, delta in deltas.items():
        for piece in sources[key][1]:
            at, take = (tuple(slice(*ranges) for ranges in where) for where in (piece.at, piece.take))
            new[piece.target][at] += delta[take].reshape(new[piece.target][at].shape)
    return new


@pytest.mark.parametrize("style", ["conv", "flat", "kohya", "full"])
@pytest.mark.parametrize("family", ["clip-vision", "image-vae", "wan", "wan-vae"])
def test_adapters_of_convolutions(tmp_path, family, style):
    """Of all weights of more than two dims in the source, also of one pixel, which may be linear layers here."""
    rules, declared, rng = rules_of(family), find_family(family).declare(TINY[family]), np.random.default_rng(0)
    values = harsh(declared)
    for layout_ in rules.layouts_of(declared.config):
        tensors, deltas, sources = {}, {}, source_of(rules, layout_, declared)
        for key in (key for key, (shape, _) in sources.items() if len(shape) > 2 and key.endswith(".weight")):
            (out, *into), name = sources[key][0], key.removesuffix(".weight")
            name = "lora_unet_" + name.replace(".", "_") if style == "kohya" else name
            a, b = (rng.normal(size=n).astype(np.float32) for n in ((2, *into), (out, 2, *[1] * (len(into) - 1))))
            deltas[key] = 0.75 * (b.reshape(out, 2) @ a.reshape(2, -1)).reshape(out, *into)
            a, b = (a.reshape(2, -1), b.reshape(out, 2)) if style == "flat" else (a, b)
            pair = {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": np.float32([3])}
            tensors |= {f"{name}.diff": 2 * deltas[key]} if style == "full" else pair
        assert len(tensors) > 0
        save_file(tensors, tmp_path / "x.safetensors")
        found = files.read(tmp_path / "x.safetensors", declared, strength=0.5)
        want, got = in_leaves(values, deltas, sources), with_adapter(declared, values, found)
        for path, leaf in want.items():
            np.testing.assert_allclose(got[path], leaf, atol=1e-5, err_msg=f"{layout_.name}: {path}")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_names_with_underscores_of_every_tensor(tmp_path, family):
    """What is added to each tensor of every layout, by names in which underscores stand for points."""
    rules, declared, rng = rules_of(family), find_family(family).declare(TINY[family]), np.random.default_rng(0)
    values = harsh(declared)
    for layout_ in rules.layouts_of(declared.config):
        deltas, tensors, sources = {}, {}, source_of(rules, layout_, declared)
        for key, (shape, _) in sources.items():
            stem, _, end = key.rpartition(".")
            part = {"weight": "diff", "scale": "diff", "bias": "diff_b", "modulation": "diff_m"}.get(end)
            name = (key if part is None else stem).replace(".", "_")
            deltas[key] = rng.normal(size=shape).astype(np.float32)
            tensors[f"lora_unet_{name}.{part or 'diff'}"] = deltas[key]
        save_file(tensors, tmp_path / "x.safetensors")
        found = files.read(tmp_path / "x.safetensors", declared)
        want, got = in_leaves(values, deltas, sources), with_adapter(declared, values, found)
        for path, leaf in want.items():
            np.testing.assert_allclose(got[path], leaf, atol=1e-5, err_msg=f"{layout_.name}: {path}")


def test_names_of_two_layouts_are_told_apart(tmp_path):
    path = write_file(tmp_path / "x.safetensors", pairs(), "diffusers")
    a, b = np.ones((2, 96), np.float32), np.ones((96, 2), np.float32)
    name = "diffusion_model.double_blocks.0.img_attn.proj"
    save_file({**load_file(path), f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}, path)
    assert f"{name}: is named as in layout 'original', and most of the file as in 'diffusers'" in refusal(path)


def test_an_a_without_dims(tmp_path):
    name = "patch_embedding"
    tensors = {f"{name}.lora_down.weight": np.array(1.0, np.float32), f"{name}.lora_up.weight": np.ones(64, "f4")}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"A and B have the shapes \(\) and \(64,\)"):
        files.read(tmp_path / "x.safetensors", find_family("wan").declare(TINY["wan"]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_values_that_are_not_finite(tmp_path, part, value):
    path = write_file(tmp_path / "x.safetensors", pairs(), "diffusers")
    tensors, key = load_file(path), f"transformer.transformer_blocks.0.attn.to_q.{part}.weight"
    tensors[key][1, 2] = value
    save_file(tensors, path)
    assert f"{key}: NaN or infinite" in refusal(path)


def test_alphas_by_pattern(tmp_path):
    folder = write_peft(tmp_path / "style", pairs(), alpha_pattern={"attn.to_q": 30, "net.2": 8})
    found = files.read(folder, DECLARED)
    assert found.name == "style"
    assert found.factors["double.image.attn.qkv.weight"].ratio.tolist() == [[10.0, 0, 0], [0, 0, 0]]
    assert found.factors["double.image.down.weight"].ratio.tolist() == [0, 2.0]
    assert found.factors["single.out.weight"].ratio.tolist() == [0, 1.0]


def test_parts_of_other_models_are_left_out_when_asked(tmp_path):
    path = write_file(tmp_path / "x.safetensors", pairs(), "kohya")
    tensors = load_file(path)
    tensors["lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"] = np.ones((3, 7), np.float32)
    save_file(tensors, path)
    assert "lora_te1" in refusal(path)
    for options in (dict(ignore=("lora_te",)), dict(component="transformer"), dict(component="transformer_2")):
        assert set(files.read(path, DECLARED, **options).factors) == {
            "double.image.attn.qkv.weight", "double.image.down.weight", "single.out.weight", "single.down.weight",
        }  # fmt: skip


def test_differences_of_zero_change_nothing_and_others_can_be_left_out(tmp_path):
    path = write_file(tmp_path / "x.safetensors", pairs(), "comfy")
    plain, tensors = files.read(path, DECLARED), load_file(path)
    start = "diffusion_model.transformer_blocks.0"
    tensors[f"{start}.attn.norm_q.diff"] = np.zeros(8, np.float32)
    tensors[f"{start}.ff.net.0.proj.diff_b"] = np.zeros(48, np.float32)
    tensors["diffusion_model.nowhere.diff"] = np.zeros(3, np.float32)
    save_file(tensors, path)
    assert not files.read(path, DECLARED).differences
    tensors[f"{start}.ff.net.0.proj.diff_b"][3] = 1e-3
    save_file(tensors, path)
    (value,) = files.read(path, DECLARED).differences.values()
    assert value[0, 3] == np.float32(1e-3) and np.count_nonzero(value) == 1
    for ignore in (("*.diff_b",), ("diffusion_model.transformer_blocks.0.ff.net.0.",)):
        found = files.read(path, DECLARED, ignore=ignore)
        assert found.factors.keys() == plain.factors.keys() and not found.differences
    assert "holds no tensors but those to ignore" in refusal(path, ignore=("*",))


def test_differences_that_do_not_fit(tmp_path):
    start, ones = "diffusion_model.double_blocks.0", lambda *shape: np.ones(shape, np.float32)
    tensors = {
        f"{start}.img_mlp.0.diff_b": ones(7),
        f"{start}.img_mlp.9.diff": ones(7),
        f"{start}.img_attn.norm.key_norm.diff": np.ones(12, np.int32),
        f"{start}.img_attn.norm.key_norm.scale": ones(5),
        "diffusion_model.img_in.lora_B.bias": ones(96),
        "diffusion_model.txt_in.lora_A.weight": ones(2, 64),
        "diffusion_model.txt_in.lora_B.weight": ones(96, 2),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    text = refusal(tmp_path / "x.safetensors")
    for part in (
        "img_mlp.0.diff_b: has the shape (7,), expected (48,)",
        "img_mlp.9.diff: no module of this model (ignore= (--lora-ignore) leaves it out)",
        "key_norm.diff: is of int32, not floating point",
        "key_norm.scale: has the shape (5,), expected (12,)",
        "img_in: has no A (down)",
        "txt_in: A and B have the shapes (2, 64) and (96, 2), expected (r, 10) and (96, r): its model takes wider in",
    ):
        assert part in text, text
    tensors = {f"{start}.img_attn.norm.key_norm.diff": np.full(12, np.nan, np.float32)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert "key_norm.diff: NaN or infinite" in refusal(tmp_path / "x.safetensors")


def test_for_a_quantized_model_that_is_split_and_kept_on_the_host(tmp_path):
    """The declaration may be that of the model as it runs."""
    path = write_file(tmp_path / "my style.v2.safetensors", pairs(), "diffusers")
    running = layout.keep_on_host(quantize.declare(DECLARED, "fp8"), smallest=64)
    found, plain = files.read(path, running), files.read(path, DECLARED)
    assert found.name == "my_style_v2" and found.factors.keys() == plain.factors.keys()
    for at, factors in found.factors.items():
        assert np.array_equal(factors.a, plain.factors[at].a) and np.array_equal(factors.b, plain.factors[at].b)
    declared = adapters.declare(running, [found])
    with pytest.raises(InputError, match="there is an adapter of this name"):
        adapters.declare(declared, [found])
    with pytest.raises(InputError, match="heads=8 does not divide by 3"):
        flux.forward(declared, make_mesh(tensor=3))


def test_what_is_no_adapter(tmp_path):
    assert "there is no such file or folder" in refusal(tmp_path / "none.safetensors")
    (tmp_path / "folder").mkdir()
    assert "holds none of adapter_model.safetensors" in refusal(tmp_path / "folder")
    save_file({"x_embedder.weight": np.ones((2, 2), np.float32)}, tmp_path / "x.safetensors")
    assert "no A, B or alpha of a LoRA" in refusal(tmp_path / "x.safetensors")
    path = write_file(tmp_path / "y.safetensors", pairs(), "bare", alpha=np.inf)
    assert "alpha=inf is not a finite number" in refusal(path)
    meta = write_file(tmp_path / "z.safetensors", pairs(), "bare", None, {"lora_adapter_metadata": json.dumps([1])})
    assert "lora_adapter_metadata" in refusal(meta)


LLM = decoder.declare(decoder.Config(vocab=8, embed=6, layers=1, heads=3, kv_heads=1, head_dim=2, mlp=5))
QUERY = "model.layers.0.self_attn.q_proj"


def test_each_component_takes_its_own_keys_and_settings(tmp_path):
    """Whatever the family of a component calls itself: a decoder is a text encoder here."""
    tensors = {}
    for start in (f"text_encoder.{QUERY}", f"text_encoder_2.{QUERY}", "transformer.transformer_blocks.0.attn.to_q"):
        size = 96 if "blocks" in start else 6
        tensors |= {f"{start}.lora_{x}.weight": np.ones((3, size)[:: 1 if x == "A" else -1], np.float32) for x in "AB"}
    said = {"text_encoder.lora_alpha": 6, "text_encoder_2.lora_alpha": 12, "transformer.lora_alpha": 30, "r": 3}
    save_file(tensors, tmp_path / "x.safetensors", {"lora_adapter_metadata": json.dumps(said)})
    for component, ratio in (("text_encoder", 2.0), ("text_encoder_2", 4.0)):
        found = files.read(tmp_path / "x.safetensors", LLM, component=component)
        assert {at: f.ratio.tolist() for at, f in found.factors.items()} == {"blocks.attn.q.weight": [ratio]}
    found = files.read(tmp_path / "x.safetensors", DECLARED, component="transformer")
    assert found.factors["double.image.attn.qkv.weight"].ratio[0].tolist() == [10.0, 0, 0]


@pytest.mark.parametrize(
    "start, component",
    [("lora_te1_", "text_encoder"), ("lora_te2_", "text_encoder_2"), ("lora_te3_", "text_encoder_2")],
)
def test_text_encoders_by_their_numbers(tmp_path, start, component):
    """T5 of FLUX.1 is the second encoder to some trainers and, as of Stable Diffusion 3, the third to kohya's."""
    name = start + QUERY.replace(".", "_")
    tensors = {
        f"{name}.lora_down.weight": np.ones((3, 6), np.float32),
        f"{name}.lora_up.weight": np.ones((6, 3), np.float32),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    assert set(files.read(path, LLM, component=component).factors) == {"blocks.attn.q.weight"}
    with pytest.raises(InputError, match="holds no tensors but those to ignore"):
        files.read(path, LLM, component="transformer")


def test_text_encoders_as_diffusers_wrote_them(tmp_path):
    """`convert_state_dict_to_diffusers`, which its training scripts call for text encoders."""
    config = clip_text.Config(vocab=32, embed=8, mlp=12, layers=2, heads=2, positions=8)
    declared, name = clip_text.declare(config), "text_encoder.text_model.encoder.layers.1.self_attn.k_proj"
    a, b = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((3, 8), (8, 3)))
    tensors = {f"{name}.lora_linear_layer.down.weight": a, f"{name}.lora_linear_layer.up.weight": b}
    save_file(tensors, tmp_path / "x.safetensors")
    (factors,) = files.read(tmp_path / "x.safetensors", declared, component="text_encoder").factors.values()
    assert np.array_equal(factors.a[1, 1], a) and np.array_equal(factors.b[1, 1].reshape(8, 3), b)
    assert factors.ratio.tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("first, second", [(0.0, 6.0), (6.0, 0.0), (0.0, 0.0)])
def test_an_alpha_of_zero_beside_another(first, second):
    """Two modules in one place of a leaf take ranks of their own, whatever the ratio of the other."""
    layer = linear_layers(DECLARED)["double.image.down.weight"]
    sizes = dict(zip(layer.weight.names, layer.weight.shape, strict=True)) | {"layer": 1}
    at = {dim: (0, size) for dim, size in sizes.items()}
    rng, shares, want = np.random.default_rng(0), [], 0.0
    for module, ratio in (("one", first), ("two", second)):
        a, b = (rng.normal(size=n).astype(np.float32) for n in ((3, sizes["mlp"]), (sizes["embed"], 3)))
        shares.append(files._Share(at, a, b, (0, sizes["mlp"]), ratio, module))
        want = want + ratio * b @ a
    found = files._factors(layer, shares, None)
    assert np.allclose(found.ratio[0] * found.b[0] @ found.a[0], want, atol=1e-4)
