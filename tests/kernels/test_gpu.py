"""What of the GPU kernels can be checked without a GPU: lowering for CUDA, also inside shard_map, and refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from attention_cases import MASKED, PLAIN, Case
from jax.sharding import PartitionSpec as P

from shardzoo.errors import InputError
from shardzoo.kernels.flash_attention import flash_attention, which_implementation

FORWARD = ["attention_forward"]
ALL = ["attention_forward", "attention_dq", "attention_dkv"]
CASES = {c.name: c for c in PLAIN + MASKED}


def lowered(f, *shapes) -> str:
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(text: str) -> list[str]:
    """The names of the Triton kernels that a program calls, in any order."""
    names = (*ALL, "attention_dbias")
    found = [n for n in names for _ in range(text.count(f'name = "{n}"'))]
    assert len(found) == text.count("__gpu$xla.gpu.triton")
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        "length-1",
        "length-77",
        "head_dim-80",
        "head_dim-96",
        "head_dim-256",
        "gqa-24-4",
        "decode",
        "bias-one",
        "everything",
    ],
)
def test_lowers_for_cuda(name: str, dtype: str):
    """Every kernel becomes Triton IR, for each head size, with every option, forward and backward."""
    case: Case = CASES[name]
    x, options = case.inputs(dtype)
    bias = options.pop("bias", None)

    def everything(q, k, v, bias, d_out, d_lse):
        attend = partial(flash_attention, return_lse=True, implementation="gpu", **options)
        results, pull = jax.vjp(lambda q, k, v, bias: attend(q, k, v, bias=bias), q, k, v, bias)
        return *results, *pull((d_out, d_lse))

    text = lowered(everything, x["q"], x["k"], x["v"], bias, x["d_out"], x["d_lse"])
    assert kernels_in(text) == ALL + (["attention_dbias"] if bias is not None else [])


def test_platform_is_chosen_when_lowering():
    """The same traced call holds Triton kernels for CUDA, and none for a CPU."""
    q = jax.ShapeDtypeStruct((1, 100, 4, 64), jnp.bfloat16)
    step = jax.jit(jax.grad(lambda q: flash_attention(q, q, q, causal=True).astype(jnp.float32).sum()))
    traced = step.trace(q)
    assert kernels_in(traced.lower(lowering_platforms=("cuda",)).as_text()) == ALL
    assert kernels_in(traced.lower(lowering_platforms=("cpu",)).as_text()) == []
    assert which_implementation(q, q, q, causal=True, platform="cuda").implementation == "gpu"


def test_lowers_for_cuda_in_shard_map():
    """Types of what varies over which axes hold together; the gradient of whole keys is summed over the mesh."""
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 4, 32, 64), jnp.float32)

    def attend(q, k, bias):
        offset = 32 * jax.lax.axis_index("context")
        return flash_attention(q, k, k, bias=bias, causal=True, q_offset=offset, implementation="gpu")

    split, rows = P("data", "context"), P("data")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(split, rows, P()), out_specs=split, check_vma=True)
    gradient = jax.grad(lambda q, k, bias: mapped(q, k, bias).astype(jnp.float32).sum(), (0, 1, 2))
    text = lowered(gradient, q, q, bias)
    assert kernels_in(text) == [*ALL, "attention_dbias"]
    assert text.count("stablehlo.all_reduce") >= 2


def test_vmap_lowers_for_cuda():
    q = jax.ShapeDtypeStruct((3, 2, 64, 4, 64), jnp.bfloat16)
    text = lowered(jax.vmap(lambda q: flash_attention(q, q, q, implementation="gpu")), q)
    assert kernels_in(text) == FORWARD


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((1, 32, 2, 512), jnp.bfloat16, "head_dim=512 is above 256"),
        ((1, 2**22, 16, 64), jnp.bfloat16, "more than the 2147483647"),
        ((1, 32, 2, 64), jnp.float64, "dtype float64"),
    ],
)
def test_refusals_name_who_takes_the_call(shape: tuple, dtype, said: str):
    with jax.enable_x64(True):
        q = jax.ShapeDtypeStruct(shape, dtype)
        chosen = which_implementation(q, q, q, platform="cuda")
        assert chosen.implementation == "blockwise" and said in chosen.reason
        with pytest.raises(InputError, match=f"{said}.*use implementation='reference' or implementation='blockwise'"):
            jax.eval_shape(partial(flash_attention, implementation="gpu"), q, q, q)
