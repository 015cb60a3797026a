"""Wan on meshes: the same numbers as on one device, the collectives it promises, what it refuses."""

import dataclasses
import functools
import math

import hlo
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from mesh_parity import assert_close, harsh

from shardzoo.errors import InputError
from shardzoo.zoo import layout, wan
from shardzoo.zoo.families import config_from_json, config_to_json, find_preset
from shardzoo.zoo.linears import linear_layers
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.wan import Config, Context, Timesteps

CONFIG = Config(in_channels=3, out_channels=2, heads=8, head_dim=8, layers=2, mlp=48, text=12, freq=16)
IMAGE = dataclasses.replace(CONFIG, in_channels=5, image=8, image_positions=6)
CONFIGS = {"text": CONFIG, "image": IMAGE}
GRID = (3, 3, 5)  # 45 tokens: they divide by no degree of the meshes but 3
TOKENS, B = math.prod(GRID), 3
VIDEO = (GRID[0], 2 * GRID[1], 2 * GRID[2])
rng = np.random.default_rng(0)
LATENTS = rng.normal(size=(B, 5, *VIDEO)).astype(np.float32)
TEXT = rng.normal(size=(B, 7, 12)).astype(np.float32)
PICTURES = rng.normal(size=(2 * B, 3, 8)).astype(np.float32)
COTANGENT = rng.normal(size=(B, 2, *VIDEO)).astype(np.float32)
FEW = Timesteps(np.array([[0, 900], [0, 40], [3, 700]]), rng.integers(0, 2, (B, TOKENS)))
TIMES = {
    "row": np.array([999.0, 250.5, 30.25], np.float32),
    "few": FEW,
    "token": np.take_along_axis(FEW.values, FEW.index, axis=1),
}


def inputs(config):
    return {"text": TEXT} if config.image is None else {"text": TEXT, "image": PICTURES}


def run(config, degrees, at_rest=None, times="row", kept=False, **options):
    """The result, and the gradients of a weighted sum of it for the model, the latents, the text and the image.

    With `kept` the keys of text and image are made by `wan.context`, and the gradient goes through it.
    """
    declared = wan.declare(config)
    values = harsh(declared)
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, degrees, smallest=64)
        assert any(p.rest for p in layout.named(declared.blocks).values())
    mesh = make_mesh(**{f.name: getattr(degrees, f.name) for f in dataclasses.fields(degrees)})
    f, make = wan.forward(declared, mesh, **options), wan.context(declared, mesh)

    def total(model, latents, given):
        how = {"context": make(model, **given)} if kept else given
        out = f(model, latents, TIMES[times], **how)
        assert out.shape == (B, 2, *VIDEO)
        return jnp.sum(out * COTANGENT), out

    model = layout.place(declared, mesh, values)
    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
    (_, out), (grads, *rest) = both(model, LATENTS[:, : config.in_channels], inputs(config))
    return jax.tree.map(np.asarray, (out, layout.named(grads), *rest))


@functools.cache
def one_device(name, times):
    return run(CONFIGS[name], Degrees(), times=times)


MESHES = [
    ("image", dict(tensor=4), dict(residual="seq", kept=True, chunk=16)),
    ("text", dict(context=3), dict(remat=True)),  # heads do not divide: keys are gathered
    ("image", dict(tensor=2, context=4), dict(residual="seq", at_rest="context")),
    ("text", dict(data=2, tensor=2, context=2), dict(at_rest="data", times="few", chunk=9)),
]
MORE_MESHES = [
    ("text", dict(tensor=2), dict()),
    ("image", dict(context=2), dict(at_rest="context")),
    ("text", dict(tensor=2, context=2), dict(residual="seq", times="token", chunk=8)),
    ("image", dict(), dict(kept=True, remat=True)),
    ("image", dict(tensor=2), dict(residual="seq")),
    ("image", dict(context=4), dict(kept=True, at_rest="context")),
    ("image", dict(tensor=2, context=2), dict(residual="whole", kept=True)),
    ("image", dict(tensor=2, context=3), dict(residual="seq")),
    ("image", dict(data=2), dict(at_rest="data", kept=True)),
    ("image", dict(data=4, context=2), dict(residual="seq")),
    ("text", dict(), dict(chunk=10, times="few")),
    ("text", dict(context=8), dict(at_rest="context")),
    ("text", dict(tensor=8), dict(residual="seq", times="few")),
    ("text", dict(tensor=4, context=2), dict(times="token")),
    ("text", dict(context=5), dict(times="few")),
    ("text", dict(tensor=2, context=4), dict(residual="seq", remat=True, times="few")),
]


@pytest.mark.parametrize(
    "name, degrees, options",
    [*MESHES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_MESHES)],
    ids=str,
)
def test_mesh_parity(name, degrees, options):
    """Forward and gradient on a mesh, at 1e-5 of one device's."""
    want = one_device(name, "few" if options.get("times") == "token" else options.get("times", "row"))
    assert_close(run(CONFIGS[name], Degrees(**degrees), **options), want)


def abstract_context(config, mesh, batch=4):
    spec = jax.NamedSharding(mesh, wan.CONTEXT_SPEC)
    shape = (config.layers, 2, batch, 7, config.heads, config.head_dim)
    kept = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spec)
    return Context(kept, None if config.image is None else kept)


def collectives(config, degrees, kept, **options):
    """Those of a forward pass, with 4 rows of 48 tokens, which divide by every mesh below."""
    declared, mesh = wan.declare(config), make_mesh(**degrees)
    f = wan.forward(declared, mesh, **options)
    latents = jax.ShapeDtypeStruct((4, config.in_channels, 4, 6, 8), jnp.float32)
    times = jax.ShapeDtypeStruct((4,), jnp.float32)
    text = jax.ShapeDtypeStruct((4, 7, config.text), jnp.float32)
    image = None if config.image is None else jax.ShapeDtypeStruct((4, 6, config.image), jnp.float32)
    given = {"context": abstract_context(config, mesh)} if kept else {"text": text, "image": image}
    lowered = jax.jit(f).lower(layout.abstract(declared, mesh), latents, times, **given)
    return hlo.collectives(lowered.compile())


# What `wan.forward` says of the two ends, and `Block` of a block, whose program stands in the scan once.
TIMES_ENDS = {"all-reduce": 2}
WHOLE = {"all-reduce": 5}
SEQ = {"all-reduce": 2, "all-gather": 3, "reduce-scatter": 3}
JOIN = {"all-gather": 1}


@pytest.mark.parametrize(
    "name, degrees, kept, options, parts",
    [
        ("text", dict(tensor=2), True, {}, [TIMES_ENDS, WHOLE]),
        ("text", dict(tensor=2), True, dict(residual="seq"), [TIMES_ENDS, SEQ, JOIN]),
        ("text", dict(tensor=2), True, dict(residual="seq", chunk=20), [TIMES_ENDS, SEQ, JOIN]),
        ("image", dict(tensor=4), True, {}, [TIMES_ENDS, WHOLE]),
        ("text", dict(tensor=2), False, {}, [TIMES_ENDS, WHOLE]),  # XLA joins what waits for nothing:
        ("image", dict(tensor=2), False, {}, [TIMES_ENDS, WHOLE]),  # text with times, norms with norms
        ("text", dict(context=4), True, {}, [{"all-to-all": 3}, JOIN]),
        ("text", dict(context=3), True, {}, [{"all-gather": 1}, JOIN]),
        ("text", dict(tensor=2, context=2), True, dict(residual="seq"), [TIMES_ENDS, SEQ, {"all-to-all": 3}, JOIN]),
        ("text", dict(data=4), True, {}, []),
    ],
    ids=str,
)
def test_collectives(name, degrees, kept, options, parts):
    want: dict[str, int] = {}
    for part in parts:
        want = {kind: want.get(kind, 0) + part.get(kind, 0) for kind in {*want, *part}}
    assert collectives(CONFIGS[name], degrees, kept, **options) == want


def test_collectives_of_the_context():
    declared, mesh = wan.declare(IMAGE), make_mesh(tensor=2)
    text, image = (jax.ShapeDtypeStruct((4, 6, size), jnp.float32) for size in (IMAGE.text, IMAGE.image))
    lowered = jax.jit(wan.context(declared, mesh)).lower(layout.abstract(declared, mesh), text, image)
    assert hlo.collectives(lowered.compile()) == {"all-reduce": 2}  # XLA joins those of text and image


@pytest.mark.parametrize("platform, counts", [("cpu", [1, 1, 2]), ("tpu", [1, 4, 5]), ("gpu", [1, 4, 5])])
def test_a_cpu_works_on_more_tokens_at_once(platform, counts):
    """By default; it writes the results of chunks into place on one core."""
    device = jax.sharding.AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    mesh = make_mesh().abstract_mesh.update(abstract_device=device)

    def chunks(tokens, width=1536, **run):
        def ones():
            return jnp.ones(wan.Split.of(tokens, wan.Run(**run), width).chunks)

        return jax.eval_shape(jax.shard_map(ones, mesh=mesh, in_specs=(), out_specs=P())).size

    assert [chunks(tokens) for tokens in (1024, 4096, 4097)] == counts
    assert chunks(4096, chunk=1024) == 4
    wide = [chunks(4096, width) for width in (2560, 3072, 5120, 10240)]
    assert wide == ([1] * 4 if platform == "cpu" else [4, 6, 8, 8])


def loops(jaxpr):
    """Every loop of a program, those within others too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from loops(inner)


def test_each_loop_of_a_block_reads_weights_of_its_own():
    """So that of weights gathered from a split at rest only those of one loop are held."""
    degrees = Degrees(context=2)
    declared, mesh = layout.split_at_rest(wan.declare(CONFIG), "context", degrees, smallest=64), make_mesh(context=2)
    latents, times = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((4, CONFIG.in_channels, 4, 6, 8), (4,)))
    f, kept = wan.forward(declared, mesh, chunk=8), abstract_context(CONFIG, mesh)
    program = jax.make_jaxpr(f)(layout.abstract(declared, mesh), latents, times, context=kept).jaxpr
    paths = {layer.weight.shape[1:]: path for path, layer in linear_layers(declared.blocks).items()}
    read = [{paths.get(v.aval.shape) for v in e.invars[: e.params["num_consts"]]} - {None} for e in loops(program)]
    assert [sorted(x) for x in read if x] == [
        ["attn.qkv.weight"],
        ["cross.out.weight", "cross.q.weight"],  # and attn.out.weight, of the same shape
        ["mlp.down.weight", "mlp.up.weight"],
    ]


def test_few_timesteps_are_never_spread_over_the_tokens():
    """No array of six modulations for each token, which is what a timestep a token costs."""
    declared, mesh = wan.declare(CONFIG), make_mesh()
    model, latents = layout.abstract(declared, mesh), jax.ShapeDtypeStruct(LATENTS[:, :3].shape, jnp.float32)
    f = jax.jit(wan.forward(declared, mesh))

    def wide(times):
        return f"3,{TOKENS},6,64]" in f.lower(model, latents, times, text=TEXT).compile().as_text()

    assert wide(TIMES["token"]) and not wide(FEW) and not wide(TIMES["row"])


def test_refusals():
    declared, mesh = wan.declare(IMAGE), make_mesh()
    for degrees, words in ((dict(pipe=2), "pipe=2"), (dict(tensor=3), "heads=8")):
        with pytest.raises(InputError, match=words):
            wan.forward(declared, make_mesh(**degrees))
        with pytest.raises(InputError, match=words):
            wan.context(declared, make_mesh(**degrees))
    with pytest.raises(InputError, match="chunk=0"):
        wan.forward(declared, mesh, chunk=0)
    f, model = wan.forward(declared, mesh), layout.abstract(declared, mesh)
    times = TIMES["row"]

    def refused(words, latents=LATENTS, times=times, **given):
        with pytest.raises(InputError, match=words):
            f(model, latents, times, **given)

    refused("either text or context")
    refused("image: missing", text=TEXT)
    refused("latents=.*holds nothing", latents=LATENTS[:0], times=times[:0], text=TEXT[:0])
    refused("image=.*holds nothing", text=TEXT, image=PICTURES[:0])
    refused("channels=3", latents=LATENTS[:, :3], **inputs(IMAGE))
    refused("height=5 does not divide", latents=LATENTS[:, :, :, :5], **inputs(IMAGE))
    refused("seq=7 are not the 45 tokens", times=np.zeros((B, 7)), **inputs(IMAGE))
    refused("3 tokens a row are not the 6 positions", text=TEXT, image=PICTURES[:B])
    refused("4 images do not divide by batch=3", text=TEXT, image=PICTURES[:4])
    refused("width 11", text=TEXT[..., :11], image=PICTURES)
    refused("holds the image", context=abstract_context(IMAGE, mesh, B), image=PICTURES)
    refused("another kind", context=abstract_context(CONFIG, mesh, B))
    with pytest.raises(InputError, match="no image branch"):
        wan.context(wan.declare(CONFIG), mesh)(model, TEXT, PICTURES)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layers=0), "layers=0"),
        (dict(head_dim=7), "head_dim=7 is odd"),
        (dict(freq=9, patch=(1, 0, 2)), r"patch\[1\]=0(.|\n)*freq=9 is odd"),
        (dict(image_positions=4), "image_positions=4 without image"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **change)


PUBLISHED = {
    "wan2.1-t2v-1.3b": 1_418_996_800,
    "wan2.1-t2v-14b": 14_288_491_584,
    "wan2.1-i2v-14b": 16_394_878_784,
    "wan2.1-flf2v-14b": 16_395_536_704,
    "wan2.2-ti2v-5b": 4_999_787_712,
    "wan2.2-t2v-a14b": 14_288_491_584,
    "wan2.2-i2v-a14b": 14_288_901_184,
}


def test_presets_have_their_published_sizes():
    assert wan.PRESETS.keys() == PUBLISHED.keys()
    for name, count in PUBLISHED.items():
        family, config = find_preset(f"wan/{name}")
        declared = layout.named(family.declare(config))
        assert sum(math.prod(p.shape) for p in declared.values()) == count, name
        assert config_from_json(Config, config_to_json(config)) == config
