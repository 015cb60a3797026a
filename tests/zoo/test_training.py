"""Training on meshes: the gradient, the optimizer's state and the step, whole and split over data, as on one device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mesh_parity import assert_close, harsh

from shardzoo.errors import InputError
from shardzoo.zoo import adapters, decoder, layout, losses, optimizer_state, quantize, training
from shardzoo.zoo.adapters import Adapter, Factors
from shardzoo.zoo.decoder import Config
from shardzoo.zoo.linears import linear_layers
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.remat import OF_JAX, POLICIES

slow = pytest.mark.slow
B, S = 4, 12
CONFIG = Config(vocab=48, embed=32, layers=3, heads=8, kv_heads=4, head_dim=8, mlp=48, qk_norm=True, mlp_bias=True)
rng = np.random.default_rng(0)
BATCHES = rng.integers(0, 48, (3, B, S))
LENGTHS = np.array([12, 5, 9, 12])
# Far from sign(gradient): Adam's first steps would turn rounding of gradients near zero into whole learning rates.
ADAMW = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(optax.warmup_cosine_decay_schedule(1e-2, 0.1, 2, 6), eps=1e-2, weight_decay=0.1),
)


def made(degrees, fsdp=False, dtype=np.float32):
    """Declaration, mesh and live model; `fsdp` names the axes that weights are split over at rest."""
    declared = decoder.declare(CONFIG, dtype)
    model = jax.tree.map(lambda v: v.astype(dtype), harsh(declared))
    degrees = layout.with_kv(declared, Degrees(**degrees))
    for axis in ("data",) if fsdp is True else fsdp or ():
        declared = layout.split_at_rest(declared, axis, degrees, smallest=64)
    mesh = make_mesh(**{f.name: getattr(degrees, f.name) for f in dataclasses.fields(degrees)})
    return declared, mesh, layout.place(declared, mesh, model)


def loss_of(declared, mesh, **options):
    forward = decoder.forward(declared, mesh, **options)

    def loss(model, tokens):
        logits = forward(model, tokens, lengths=LENGTHS)
        return losses.cross_entropy(logits, *losses.next_tokens(tokens, lengths=LENGTHS))

    return loss


def trained(degrees, fsdp=False, optimizer=ADAMW, **options):
    """Losses and gradient norms of three steps, and what they leave."""
    declared, mesh, model = made(degrees, fsdp)
    state = optimizer_state.init(optimizer, model, declared, mesh)
    step = training.make_step(loss_of(declared, mesh, **options), optimizer, declared, mesh)
    told = []
    for tokens in BATCHES:
        model, state, metrics = step(model, state, tokens)
        told.append(jnp.stack(metrics))
    lies((model, state), (declared, optimizer_state.declare(optimizer, declared)), mesh)
    return jax.tree.map(np.asarray, (jnp.stack(told), layout.named(model), layout.named(state)))


def lies(live, declared, mesh):
    """Each leaf as its declaration says."""
    for path, param in layout.named(declared).items():
        leaf = layout.named(live)[path]
        assert leaf.sharding.is_equivalent_to(param.sharding(mesh), leaf.ndim), f"{path}: {leaf.sharding}"
        assert leaf.shape == param.shape and leaf.dtype == param.dtype, path


@pytest.fixture(scope="module")
def one_device():
    return trained({})


@pytest.mark.parametrize(
    "degrees, fsdp, options",
    [
        (dict(data=2, tensor=2), True, dict(remat="dots")),
        pytest.param(dict(data=4), False, {}, marks=slow),
        pytest.param(dict(data=4), True, dict(remat=True), marks=slow),
        pytest.param(dict(data=2, context=2, tensor=2), True, dict(remat="collectives", residual="seq"), marks=slow),
        pytest.param(dict(data=2, context=2), ("data", "context"), dict(remat=True), marks=slow),
        pytest.param(dict(context=3), ("context",), dict(remat="attention"), marks=slow),
        pytest.param(dict(data=3), True, {}, marks=slow),
        pytest.param(dict(pipe=3), False, dict(remat="dots"), marks=slow),
        pytest.param(dict(pipe=3, data=2), True, dict(remat=True, microbatches=2), marks=slow),
        pytest.param(dict(tensor=8), False, dict(residual="seq"), marks=slow),
    ],
    ids=str,
)
def test_steps_are_those_of_one_device(one_device, degrees, fsdp, options):
    """Clipped AdamW with a schedule: losses, norms, weights and moments at 1e-5, and all where it was declared."""
    got = trained(degrees, fsdp, **options)
    assert (one_device[0][:, 1] > 0.5).all()  # all steps are clipped
    assert_close(got, one_device)


@slow
def test_update_of_a_pipeline_that_goes_forward_and_back_in_turn(one_device):
    """`decoder.loss_and_grad` gives what `make_update` needs: three steps of it are those of one device."""
    declared, mesh, model = made(dict(pipe=3, data=2), True)
    state = optimizer_state.init(ADAMW, model, declared, mesh)
    step = training.make_update(decoder.loss_and_grad(declared, mesh, microbatches=2), ADAMW, declared, mesh)
    for tokens in BATCHES:
        labels, counts = losses.next_tokens(tokens, lengths=LENGTHS)
        model, state, _ = step(model, state, tokens, labels, counts, lengths=LENGTHS)
    lies((model, state), (declared, optimizer_state.declare(ADAMW, declared)), mesh)
    assert_close(*(jax.tree.map(np.asarray, x) for x in ((layout.named(model), layout.named(state)), one_device[1:])))


@slow
def test_step_is_that_of_the_optimizer_alone(one_device):
    declared, mesh, model = made({})
    loss = loss_of(declared, mesh)
    state = ADAMW.init(model)

    @jax.jit
    def step(model, state, tokens):
        updates, state = ADAMW.update(jax.grad(loss)(model, tokens), state, model)
        return optax.apply_updates(model, updates), state

    for tokens in BATCHES:
        model, state = step(model, state, tokens)
    assert_close(jax.tree.map(np.asarray, layout.named(model)), one_device[1], 1e-6)


REMATS = [True, *POLICIES, *OF_JAX, jax.checkpoint_policies.save_only_these_names("attention_out")]


@slow
@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_rematerialisation_changes_no_gradient(remat):
    declared, mesh, model = made(dict(data=2, tensor=2), True)

    def gradients(remat):
        return jax.jit(jax.grad(loss_of(declared, mesh, remat=remat)))(model, BATCHES[0])

    got = gradients(remat)
    lies(got, declared, mesh)
    assert_close(*(jax.tree.map(np.asarray, layout.named(x)) for x in (got, gradients(False))))


def test_names_of_policies_are_checked():
    declared, mesh, _ = made({})
    with pytest.raises(InputError, match=r"decoder\.forward: remat='everything' is unknown: use True, False or one of"):
        decoder.forward(declared, mesh, remat="everything")


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def compiled(degrees, fsdp, **options):
    """The compiled gradient of a decoder of 3 layers."""
    declared, mesh, _ = made(degrees, fsdp)
    tokens = jax.ShapeDtypeStruct((B, S), jnp.int32)
    gradient = jax.jit(jax.grad(loss_of(declared, mesh, **options)))
    return declared, gradient.lower(layout.abstract(declared, mesh), tokens).compile()


def counted(program):
    """How often each collective over more than one device stands in the text; a scan's body once."""
    found = dict.fromkeys(KINDS, 0)
    lines = rf"= [^=]*? ({'|'.join(KINDS)})(?:-start)?\(.*?replica_groups=(\S+)"
    for kind, groups in re.findall(lines, program.as_text()):
        found[kind] += not re.match(r"\{\{\d+\}|\[\d+,1\]", groups)
    return {kind: count for kind, count in found.items() if count}


@pytest.mark.parametrize("remat", [pytest.param(False, marks=slow), pytest.param(True, marks=slow), "dots"])
def test_collectives_of_weights_split_over_data(remat):
    """What `training` says: a gather and a scatter for each split leaf; under remat a second gather in a block.

    That is left out for the one leaf that no derivative reads, the bias of the block's last sum.
    """
    declared, program = compiled(dict(data=4), True, remat=remat)
    split = {path: bool(param.rest) for path, param in layout.named(declared).items()}
    blocks = sum(there for path, there in split.items() if path.startswith("blocks."))
    ends = sum(split.values()) - blocks
    found = counted(program)
    assert split["blocks.mlp.down.bias"] and (blocks, ends, len(split)) == (9, 2, 14)
    again = blocks - 1 if remat else 0
    # One for the norms of q and k, which stay whole, one for the last norm, one for the number of tokens.
    assert found == {"all-gather": ends + blocks + again, "reduce-scatter": ends + blocks, "all-reduce": 3}


def test_weights_are_gathered_in_the_dtype_that_is_computed_in():
    """Half the bytes: all gathers of a block's matrices in 16 bits; gradients are scattered in the stored dtype.

    Counted before compilation: XLA for CPUs widens collectives of 16-bit floats, for other platforms it does not.
    """
    declared, mesh, _ = made(dict(data=4), True)
    tokens = jax.ShapeDtypeStruct((B, S), jnp.int32)
    gradient = jax.jit(jax.grad(loss_of(declared, mesh, dtype="bfloat16", remat="dots")))
    text = gradient.lower(layout.abstract(declared, mesh), tokens).as_text()
    gathered = re.findall(r"stablehlo\.all_gather.*-> tensor<(?:\d+x)*(\w+)>", text)
    scattered = re.findall(r"stablehlo\.reduce_scatter.*?\) -> tensor<(?:\d+x)*(\w+)>", text, re.DOTALL)
    matrices = len(linear_layers(declared.blocks))
    assert matrices == 5
    assert gathered.count("bf16") == 2 * matrices  # forward, and again in the backward pass
    assert set(scattered) == {"f32"} and len(scattered) == 11


@slow
def test_whole_weights_take_one_all_reduce_each():
    declared, program = compiled(dict(data=4), False)
    leaves = len(layout.named(declared))
    assert set(counted(program)) == {"all-reduce"} and counted(program)["all-reduce"] <= leaves + 2


@pytest.mark.parametrize("remat, fewer", [("collectives", {"all-reduce", "all-to-all"}), ("dots", {"all-reduce"})])
@slow
def test_policies_spare_collectives(remat, fewer):
    full, kept = (counted(compiled(dict(data=2, context=2, tensor=2), True, remat=r)[1]) for r in (True, remat))
    assert {kind for kind in full if kept[kind] < full[kind]} >= fewer
    assert all(kept[kind] <= full[kind] for kind in full)


@slow
def test_gathered_weights_are_kept_only_without_remat():
    """Temporaries of a gradient: all layers' gathered weights, or those of a block."""
    wide = dataclasses.replace(CONFIG, layers=12, embed=64, mlp=512)

    def temporaries(remat):
        degrees = Degrees(data=4)
        declared = layout.split_at_rest(decoder.declare(wide), "data", degrees, smallest=64)
        tokens = jax.ShapeDtypeStruct((B, S), jnp.int32)
        mesh = make_mesh(data=4)
        run = jax.jit(jax.grad(loss_of(declared, mesh, remat=remat)))
        stats = run.lower(layout.abstract(declared, mesh), tokens).compile().memory_analysis()
        return stats.temp_size_in_bytes, sum(p.nbytes for p in layout.named(declared.blocks).values())

    kept, weights = temporaries(False)
    assert kept - temporaries("dots")[0] > 0.7 * weights


@slow
def test_bfloat16_compute_with_float32_masters():
    """The loss falls, weights and state stay float32, and updates too small for bfloat16 are not lost."""
    declared, mesh, model = made(dict(data=2, tensor=2), True)
    optimizer = optax.adamw(1e-6)
    state = optimizer_state.init(optimizer, model, declared, mesh)
    before = np.asarray(model.blocks.mlp.down.weight)
    step = training.make_step(loss_of(declared, mesh, dtype="bfloat16", remat="dots"), optimizer, declared, mesh)
    values = []
    for _ in range(5):
        model, state, metrics = step(model, state, BATCHES[0])
        values.append(float(metrics.loss))
    lies((model, state), (declared, optimizer_state.declare(optimizer, declared)), mesh)
    moved = np.abs(np.asarray(model.blocks.mlp.down.weight) - before)
    assert 0 < moved.max() < 1e-5 and np.isfinite(values).all()


FACTORS = "*.lora.*.[ab]"


def adapted(degrees):
    """A quantized decoder with an adapter beside the weights of its blocks."""
    declared, mesh = decoder.declare(CONFIG), make_mesh(**degrees)
    values, draw = harsh(declared), np.random.default_rng(1).normal
    factors = {}
    for path, layer in linear_layers(declared).items():
        lora = adapters.declare_lora(layer, 2)
        a, b = (np.asarray(draw(size=p.shape) * 0.1, np.float32) for p in (lora.a, lora.b))
        factors[path] = Factors(a=a, b=b, ratio=np.ones(lora.ratio.shape, np.float32))
    declared, values = quantized(declared, values)
    declared = layout.split_at_rest(declared, "data", Degrees(**degrees), smallest=64)
    adapter = Adapter(name="x", strength=1.0, factors=factors)
    return *adapters.attach(declared, layout.place(declared, mesh, values), mesh, [adapter]), mesh


def quantized(declared, values):
    new, host, made = quantize.declare(declared, "int8"), layout.named(values), {}
    for path, param in layout.named(new).items():
        root = path.removesuffix(quantize.VALUES)
        if root != path:
            scale = layout.named(new)[root + quantize.SCALE]
            lead = param.ndim - scale.ndim
            made[path], made[root + quantize.SCALE] = quantize.quantize(host[root], lead, "int8", scale.dtype)
        elif path in host:
            made[path] = host[path]
    return new, layout.fill(new, made)


@slow
@pytest.mark.parametrize("degrees", [dict(data=2, tensor=2), dict(data=4)], ids=str)
def test_only_adapters_are_trained(degrees):
    """Their factors move, on a mesh as on one device, and all else of a quantized model stays bit for bit."""

    def run(degrees):
        declared, model, mesh = adapted(degrees)
        before = jax.tree.map(np.asarray, layout.named(model))
        state = optimizer_state.init(ADAMW, model, declared, mesh, trainable=FACTORS)
        step = training.make_step(loss_of(declared, mesh), ADAMW, declared, mesh, trainable=FACTORS)
        model, state, metrics = step(model, state, BATCHES[0])
        return before, jax.tree.map(np.asarray, (layout.named(model), metrics, jax.tree.leaves(state)))

    before, (after, *told) = run(degrees)
    moved = {path for path, value in after.items() if (value != before[path]).any()}
    assert moved == {path for path in after if re.search(r"lora\..*\.[ab]$", path)} != set()
    assert_close((after, *told), run({})[1])


def test_what_has_no_gradient_is_named():
    declared, _, mesh = adapted({})
    with pytest.raises(InputError, match=r"make_step: .*\n  blocks\.attn\.q\.weight.*values: int8 has no gradient"):
        training.make_step(lambda model: 0.0, ADAMW, declared, mesh)
