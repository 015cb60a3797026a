"""Memory of a chip by our own arithmetic, against compiled programs; what would fit where nothing does; the page."""

import html.parser
import json
import re

import pytest
from command_line import invoke
from presets import presets

from shardzoo.cli.memory import memory_of, part_bytes, trace, weight_bytes
from shardzoo.cli.prediction import abstract_mesh
from shardzoo.zoo import decoder, find_preset, layout
from shardzoo.zoo.families import TraceSizes, find_family
from shardzoo.zoo.mesh import Degrees

TINY = decoder.Config(vocab=512, embed=256, layers=4, heads=8, kv_heads=4, head_dim=128, mlp=512)
V5E = "TPU v5 lite"


def memory(config, degrees, *, family="decoder", train=False, dtype="bfloat16", **sizes):
    found = find_family(family)
    model = layout.astype(found.declare(config), dtype)
    degrees = layout.with_kv(model, degrees)
    traced = trace(found, model, abstract_mesh(degrees, V5E), TraceSizes(**sizes), train=train)
    return memory_of(model, degrees, traced, train=train)


def test_weights_by_part_are_those_of_the_declaration():
    found = memory(TINY, Degrees(tensor=4), tokens=128)
    c, layers = TINY, TINY.layers
    assert found.weights["attention"] == 2 * layers * c.embed * c.head_dim * (2 * c.heads + 2 * c.kv_heads) // 4
    assert found.weights["mlp"] == 2 * layers * 3 * c.mlp * c.embed // 4
    assert found.weights["embeddings"] == found.weights["head"] == 2 * c.vocab * c.embed // 4
    assert found.total == sum(found.weights.values()) + found.inputs + found.temporaries + found.results


def test_repeated_heads_take_more():
    four, eight = (memory(TINY, Degrees(tensor=n), tokens=128).weights for n in (4, 8))
    kv = 2 * TINY.layers * 2 * TINY.kv_heads * TINY.head_dim * TINY.embed
    assert eight["attention"] == four["attention"] // 2 + kv // 4 // 2


def test_logits_are_the_results_and_the_stream_is_split_over_context():
    one, two = (memory(TINY, Degrees(context=n), tokens=1024) for n in (1, 2))
    assert one.results == 2 * 1024 * TINY.vocab and two.results == one.results // 2
    assert two.temporaries < 0.6 * one.temporaries


def test_training_holds_gradients_and_moments_where_the_weights_lie():
    plain = memory(TINY, Degrees(tensor=4), tokens=256)
    found = memory(TINY, Degrees(tensor=4), train=True, tokens=256)
    assert found.weights == plain.weights
    assert found.moments == pytest.approx(4 * found.parameters, rel=0.01)  # two of 4 bytes for each weight of 2
    assert found.gradients == pytest.approx(found.parameters, rel=0.01)
    assert found.temporaries > 2 * plain.temporaries  # what the backward pass reads


def test_weights_split_at_rest():
    model = layout.astype(decoder.declare(TINY), "bfloat16")
    degrees = layout.with_kv(model, Degrees(data=4))
    whole = sum(part_bytes(model, degrees, weight_bytes).values())
    split = sum(part_bytes(layout.split_at_rest(model, "data", degrees), degrees, weight_bytes).values())
    assert split == pytest.approx(whole / 4, rel=0.01)


def test_weights_on_the_host_are_not_the_chip_s():
    model = layout.keep_on_host(layout.astype(decoder.declare(TINY), "bfloat16"))
    degrees = layout.with_kv(model, Degrees())
    left = part_bytes(model, degrees, weight_bytes)
    assert set(left) == {"embeddings", "head", "norms"}


def test_what_a_pass_does_not_read_is_told():
    found = memory(find_preset("image-vae/flux1-vae")[1], Degrees(), family="image-vae", height=64, width=64)
    assert 0 < found.unread < found.parameters
    assert found.program == found.total - found.unread


def test_generation_keeps_a_cache():
    words = ("--mesh", "tensor=4", "--tokens", 1024, "--new-tokens", 32, "--json")
    (mesh,) = json.loads(invoke("audit", "decoder/qwen3-8b", *words).out)["meshes"]
    keys = 2 * 36 * (1024 + 32) * 8 * 128 * 2 // 4
    assert keys <= mesh["generation"]["cache"] <= 1.02 * keys
    assert mesh["generation"]["decode"] >= mesh["generation"]["cache"]
    ended = invoke("audit", "wan/wan2.1-t2v-1.3b", "--mesh", "one", "--new-tokens", 32)
    assert ended.status == 1 and "does not generate text: decoder" in ended.err


@pytest.mark.slow
def test_what_would_fit():
    ended = invoke("audit", "decoder/llama-3.2-3b", "--chips", "v5e-1", "--batch", 24, "--json")
    assert ended.status == 1
    ranking = json.loads(ended.out)["ranking"]
    found = {remedy["what"]: remedy for remedy in ranking["remedies"]}
    assert any(what.startswith("v5e-") for what in found) and any("tokens=" in what for what in found)
    room = ranking["meshes"][0]["room"]
    assert all(remedy["memory"] <= room for remedy in ranking["remedies"])
    tokens = next(what for what in found if "tokens=" in what).removeprefix("tokens=")
    again = invoke("audit", "decoder/llama-3.2-3b", "--chips", "v5e-1", "--batch", 24, "--tokens", tokens)
    assert again.status == 0, "what is said to fit does"


@pytest.mark.parametrize(
    "words",
    [
        "decoder/qwen2.5-0.5b --chips v5e-2 --train --tokens 16384",
        pytest.param("decoder/llama-3.2-3b --chips v5e-8 --batch 8 --train", marks=pytest.mark.slow),
        pytest.param("flux/flux1-dev --chips v5e-8 --train", marks=pytest.mark.slow),
        pytest.param("wan/wan2.1-t2v-14b --chips v5e-4 --frames 321 --height 720 --width 1280", marks=pytest.mark.slow),
    ],
)
def test_each_remedy_fits_when_it_is_taken(words):
    """With the options and sizes that it names, on its mesh; and only sizes that the model has are named."""
    words = words.split()
    ended = invoke("audit", *words, "--json")
    assert ended.status == 1
    found = json.loads(ended.out)["ranking"]["remedies"]
    assert found and len({remedy["what"] for remedy in found}) == len(found)
    for remedy in found:
        taken = list(words)
        for option in re.findall(r"\((--[^)]*)\)", remedy["what"]):
            taken += option.split()
        if slice_ := re.match(r"(v\S+), ", remedy["what"]):
            taken += ["--chips", slice_[1]]
        for name, size in re.findall(r"(\w+)=(\d+)", remedy["what"]):
            taken += [f"--{name}", size]
            assert name != "frames" or int(size) % 4 == 1, "autoencoders of videos take no others"
        if "--offload" not in remedy["what"]:
            mesh = ("--mesh", "one" if remedy["mesh"] == "one device" else remedy["mesh"])
            again = invoke("audit", *taken, *mesh)
            assert again.status == 0, (remedy, again.out, again.err)


def test_the_best_mesh_wins_for_a_reason():
    ended = invoke("audit", "decoder/smollm2-1.7b", "--chips", "v5e-4", "--tokens", 512)
    assert "best: " in ended.out and "longer: " in ended.out and "ms more" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 100


class Page(html.parser.HTMLParser):
    """Whether every tag is closed in its order, and what a page would fetch."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_fetches_nothing(tmp_path):
    path = tmp_path / "audit.html"
    ended = invoke("audit", "decoder/smollm2-1.7b", "--chips", "v5e-4", "--tokens", 512, "--html", path)
    assert ended.status == 0, ended.err
    text, page = path.read_text(), Page()
    page.feed(text)
    assert page.open == [] and page.fetched == [] and "url(" not in text and "@import" not in text
    said = " ".join(page.text)
    for part in ("decoder/smollm2-1.7b", "Memory of a chip", "How the weights lie on the mesh", "Meshes of v5e-4"):
        assert part in said


def test_names_are_escaped_in_the_page():
    from shardzoo.cli.page import page

    assert "<script>" not in page([], "<script>alert(1)</script>")


QUICK = ("clip-text/clip-l",)
SLICES = {"v5e-8": 7.5e9, "v5p-16": 1e12}  # the first whose chips have room for the weights


@pytest.mark.parametrize(
    "preset", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in presets()]
)
def test_ours_is_within_a_tenth_of_the_compiler_s(preset):
    family, config = find_preset(preset)
    model = layout.astype(family.declare(config), "bfloat16")
    size = sum(param.nbytes for param in layout.named(model).values())
    tensor = next(t for t in (4, 8, 2, 1) if not layout.misfits(model, layout.with_kv(model, Degrees(tensor=t))))
    chips = next(name for name, room in SLICES.items() if size / tensor < room)
    words = ("--chips", chips, "--mesh", f"context={8 // tensor},tensor={tensor}", "--compile", "--json")
    audit = json.loads(invoke("audit", preset, *words).out)
    ours, compiled = audit["ranking"]["meshes"][0]["memory"]["program"], audit["meshes"][0]["compiled"]
    # A tenth off what is alive at the worst moment; what is on chip of it may be copies (`topology.Compiled.off`).
    low, high = min(compiled["total_bytes"], compiled["peak_bytes"]), compiled["peak_bytes"]
    assert 0.9 * low <= ours <= 1.1 * high


def test_a_pipeline_s_stages(monkeypatch):
    """One component at a time is on the chips: what counts is the largest of them."""
    from shardzoo.cli import targets
    from shardzoo.zoo import t5, wan, wan_vae

    configs = {
        "text_encoder": ("t5", t5.Config(vocab=256, embed=128, layers=2, heads=8, head_dim=16, mlp=128)),
        "transformer": (
            "wan",
            wan.Config(in_channels=4, out_channels=4, heads=8, head_dim=16, layers=2, mlp=256, text=128, freq=16),
        ),
        "vae": (
            "wan-vae",
            wan_vae.Config(
                latent_channels=4, width=8, decoder_width=8, multipliers=(1, 2), blocks=1, halve_time=(True,),
                latent_mean=(0.0,) * 4, latent_std=(1.0,) * 4,
            ),
        ),
    }  # fmt: skip
    parts = [
        targets.Target(f"folder: {name}", "source", family, find_family(family).declare(config))
        for name, (family, config) in configs.items()
    ]
    monkeypatch.setattr(targets, "find_targets", lambda *_, **__: parts)
    sizes = ("--tokens", 64, "--frames", 5, "--height", 64, "--width", 64)
    ended = invoke("audit", "folder", "--mesh", "context=2,tensor=4", *sizes)
    assert ended.status == 0, ended.err
    said = ended.out.partition("stages, one after another on the same chips:\n")[2].splitlines()
    assert [line.split()[0] for line in said[:3]] == ["text", "denoise", "decode"]
    assert "most: " in said[3]
    report = json.loads(invoke("audit", "folder", "--mesh", "context=2,tensor=4", *sizes, "--json").out)
    totals = [part["meshes"][0]["memory"]["total"] for part in report["components"]]
    assert all(total > 0 for total in totals)
