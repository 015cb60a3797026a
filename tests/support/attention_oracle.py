"""Attention and its gradient in float64 numpy, one head at a time, from the formulas: the truth of these tests."""

from dataclasses import dataclass

import numpy as np

F64 = np.float64


@dataclass(frozen=True)
class Truth:
    """out, dq like q; dk, dv like k; lse (batch, q_len, heads); dbias like the bias or None; the greatest
    magnitude of a logit before cap and bias, on which the rounding of any implementation depends."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    greatest_logit: float


def seen(
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    causal=False,
    window=None,
    q_offset=None,
    q_lengths=None,
    kv_lengths=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    **others,
) -> np.ndarray:
    """Which keys each query sees, (batch, q_len, kv_len), from the words of `flash_attention`."""
    offset = kv_len - q_len if q_offset is None else int(q_offset)
    i, j = np.arange(q_len)[:, None] + offset, np.arange(kv_len)[None, :]
    mask = np.ones((batch, q_len, kv_len), bool)
    if causal:
        mask &= j <= i
    if window is not None:
        mask &= j > i - window
        if not causal:
            mask &= j < i + window
    for row in range(batch):
        if q_lengths is not None:
            mask[row, int(q_lengths[row]) :] = False
        if kv_lengths is not None:
            mask[row, :, int(kv_lengths[row]) :] = False
        if q_segment_ids is not None:
            mask[row] &= np.asarray(q_segment_ids)[row][:, None] == np.asarray(kv_segment_ids)[row][None, :]
    return mask


def attention(q, k, v, d_out, d_lse, *, scale=None, soft_cap=None, bias=None, **options) -> Truth:
    """All results for the cotangents d_out (like q) and d_lse (batch, q_len, heads)."""
    q, k, v, d_out, d_lse = (np.asarray(x).astype(F64) for x in (q, k, v, d_out, d_lse))
    batch, q_len, heads, head_dim = q.shape
    group = heads // k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    mask = seen(batch, q_len, k.shape[1], **options)
    out, lse, dq = np.zeros(q.shape), np.zeros((batch, q_len, heads)), np.zeros(q.shape)
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    bias = None if bias is None else np.asarray(bias).astype(F64)
    dbias = None if bias is None else np.zeros(bias.shape)
    greatest = 0.0
    for b in range(batch):
        for h in range(heads):
            g = h // group
            at = None if bias is None else (b % bias.shape[0], h % bias.shape[1])
            one = _head(
                q[b, :, h],
                k[b, :, g],
                v[b, :, g],
                d_out[b, :, h],
                d_lse[b, :, h],
                mask[b],
                None if at is None else bias[at],
                scale,
                soft_cap,
            )
            out[b, :, h], lse[b, :, h], dq[b, :, h] = one[:3]
            dk[b, :, g] += one[3]
            dv[b, :, g] += one[4]
            if at is not None:
                dbias[at] += one[5]
            greatest = max(greatest, one[6])
    return Truth(out, lse, dq, dk, dv, dbias, greatest)


def _head(q, k, v, d_out, d_lse, mask, bias, scale, soft_cap):
    raw = scale * (q @ k.T)
    logits = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    slope = 1.0 if soft_cap is None else 1 - np.tanh(raw / soft_cap) ** 2
    if bias is not None:
        logits = logits + bias
    logits = np.where(mask, logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    top[np.isneginf(top)] = 0
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    empty = total == 0
    weights /= np.where(empty, 1, total)
    out = weights @ v
    lse = np.where(empty, -np.inf, top + np.log(np.where(empty, 1, total)))[:, 0]
    d_lse = np.where(empty[:, 0], 0, d_lse)
    d_logits = weights * (d_out @ v.T - (d_out * out).sum(-1, keepdims=True) + d_lse[:, None])
    d_raw = d_logits * slope * scale
    return out, lse, d_raw @ k, d_raw.T @ q, weights.T @ d_out, d_logits, np.abs(raw).max()
