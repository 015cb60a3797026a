"""Generation with the Qwen3.5 family: what it keeps of the tokens so far, and how it feeds more (`generate.Engine`).

    run = generate(declared, mesh)
    tokens, lengths = run(model, prompts, prompt_lengths, max_new_tokens=64, stop_ids=(2,))

Attention layers have keys and values of every token, split over `context`; DeltaNet layers a convolution tail and a
state, whose size does not grow; both lie with their layers, split over `pipe`. Per decode step and layer: two
all-reduces over the tensor axes, and in an attention layer one all-gather of the partial attention over `context`. The
DeltaNet part of a step is repeated on the devices of `context`, and needs none of them.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shardzoo.zoo import generate as shared
from shardzoo.zoo import layout, pipeline
from shardzoo.zoo.attention import attention, cached_attention
from shardzoo.zoo.cache import CACHE_SPECS, Cache, empty
from shardzoo.zoo.decoder import sequence_positions
from shardzoo.zoo.delta_net import RECURRENT_SPECS, Recurrent, empty_recurrent
from shardzoo.zoo.generate import Engine, State, check_prompts, last_rows, next_logits
from shardzoo.zoo.in_place import block_at
from shardzoo.zoo.mesh import KV, PIPE
from shardzoo.zoo.qwen3_5 import Config, Qwen35, gather_ends, rotary

__all__ = ["ENGINE", "check_prompts", "complete", "generate", "stream"]


class HybridCache(NamedTuple):
    """What both kinds of layer keep."""

    attn: Cache
    delta: Recurrent


Carry = tuple[Float[Array, "batch seq embed"], HybridCache]


def prefill(
    model: Qwen35,
    declared: Qwen35,
    tokens: Int[Array, "batch seq"],
    lengths: Int[Array, " batch"],
    steps: int,
    dtype: Any,
) -> tuple[HybridCache, Float[Array, "batch vocab"]]:
    """Cache of the prompt, with room for `steps` decode steps, and logits after each row's last token."""
    config, positions = model.config, sequence_positions(tokens.shape[1])
    turn, blocks = rotary(config, positions), config.super_blocks // lax.axis_size(PIPE)
    x = model.embed(tokens, dtype, in_place=True)
    cache = HybridCache(
        attn=empty(
            positions, lengths, steps=steps, layers=blocks,
            kv_heads=config.kv_heads // lax.axis_size(KV), head_dim=config.head_dim, dtype=x.dtype,
        ),
        delta=empty_recurrent(
            config.delta_sizes, blocks * (config.interval - 1), lengths.shape[0], x.dtype
        ),
    )  # fmt: skip

    def delta(carry: Carry, layer: Array, here: Array | None) -> Carry:
        x, cache = carry
        block = layout.gather_at_rest(block_at(model.delta, layer), declared.delta, to="invarying")
        mixed, kept = block.mixer.prefill(block.enter(x), lengths)
        return block.finish(x, mixed), cache._replace(delta=cache.delta.write(layer, kept, here))

    def attend(carry: Carry, layer: Array, here: Array | None) -> Carry:
        x, cache = carry
        block = layout.gather_at_rest(block_at(model.attn, layer), declared.attn, to="invarying")
        q, kv, gate = block.mixer.project(block.enter(x), turn)
        mixed = block.mixer.finish(attention(q, kv, causal=True, lengths=lengths), gate)
        return block.finish(x, mixed), cache._replace(attn=cache.attn.write(layer, 0, kv, here))

    x, cache = _through(config, delta, attend, (x, cache))
    return cache, next_logits(model, last_rows(x, lengths))


def decode_step(
    model: Qwen35, declared: Qwen35, state: State, dtype: Any
) -> tuple[HybridCache, Float[Array, "batch vocab"]]:
    """Feeds each row's last token: the cache with it, and the logits after it."""
    fed = state.step - 1
    now = state.prompt + fed
    attn, slot = state.cache.attn.feed(now, fed, state.tokens.shape[1] - 1)
    turn = rotary(model.config, now[:, None])
    visible = attn.visible(now, None)
    x = model.embed(state.token[:, None], dtype, in_place=True)

    def delta(carry: Carry, layer: Array, here: Array | None) -> Carry:
        x, cache = carry
        block = layout.gather_at_rest(block_at(model.delta, layer), declared.delta, to="invarying")
        mixed, kept = block.mixer.step(block.enter(x), cache.delta.read(layer, x.dtype))
        return block.finish(x, mixed), cache._replace(delta=cache.delta.write(layer, kept, here))

    def attend(carry: Carry, layer: Array, here: Array | None) -> Carry:
        x, cache = carry
        block = layout.gather_at_rest(block_at(model.attn, layer), declared.attn, to="invarying")
        q, kv, gate = block.mixer.project(block.enter(x), turn)
        attn = cache.attn.write(layer, slot, kv, here)
        attended = cached_attention(q, *attn.read(layer, model.config.head_dim, x.dtype), visible)
        return block.finish(x, block.mixer.finish(attended, gate)), cache._replace(attn=attn)

    x, cache = _through(model.config, delta, attend, (x, state.cache._replace(attn=attn)))
    return cache, next_logits(model, x)


def _through(config: Config, delta: Any, attend: Any, carry: Carry) -> Carry:
    """The carry after all layers, in the order of the model, stage by stage.

    `delta` and `attend` are given a layer's number in this stage's stack, and whether what they write counts.
    """
    inner = config.interval - 1

    def run(x: Array, cache: HybridCache, here: Array | None) -> Carry:
        def super_block(carry: Carry, index: Array) -> tuple[Carry, None]:
            layers = index * inner + jnp.arange(inner)
            carry, _ = lax.scan(lambda carry, layer: (delta(carry, layer, here), None), carry, layers)
            return attend(carry, index, here), None

        return lax.scan(super_block, (x, cache), jnp.arange(cache.attn.k.shape[0]))[0]

    return pipeline.relay(run, *carry)


ENGINE = Engine(
    gather_ends=gather_ends,
    prefill=prefill,
    decode_step=decode_step,
    cache_specs=HybridCache(attn=CACHE_SPECS, delta=RECURRENT_SPECS),
)
generate = functools.partial(shared.generate, engine=ENGINE)
stream = functools.partial(shared.stream, engine=ENGINE)
complete = functools.partial(shared.complete, engine=ENGINE)
