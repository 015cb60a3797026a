"""TPU"""

from shardzoo.kernels.flash_attention import tpu_backward, tpu_bias, tpu_forward
from shardzoo.kernels.flash_attention.options import sizes
from shardzoo.kernels.flash_attention.tpu_blocks import call_of


def supports(q, k, v, extras, options):
    return None


def forward(q, k, v, extras, options):
    return tpu_forward.run(call_of("forward", sizes(q, k), q.dtype.itemsize, extras, options), q, k, v, extras)


def backward(q, k, v, extras, options, out, lse, d_out, d_lse):
    size = sizes(q, k)
    call = call_of("backward", size, q.dtype.itemsize, extras, options)
    grads = tpu_backward.run(call, q, k, v, extras, d_out, *tpu_backward.row_terms(call, out, lse, d_out, d_lse))
    if extras.bias is None:
        return *grads, None
    call = call_of("bias", size, q.dtype.itemsize, extras, options)
    return *grads, tpu_bias.run(call, q, k, v, extras, d_out, *tpu_backward.row_terms(call, out, lse, d_out, d_lse))
