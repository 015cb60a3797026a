"""TPU"""
import jax, jax.numpy as jnp
from shardzoo.kernels.flash_attention.options import Extras, Options, sizes
from shardzoo.kernels.flash_attention.tpu_blocks import call_of
from shardzoo.kernels.flash_attention import tpu_forward
def supports(q,k,v,extras,options): return None
def forward(q,k,v,extras,options):
    return tpu_forward.run(call_of("forward", sizes(q,k), q.dtype.itemsize, extras, options), q,k,v,extras)
