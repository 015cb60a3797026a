"""Generation with the Qwen3.5 family: what it keeps of the tokens so far, and how it feeds more (`generate.Engine`).

    run = generate(declared, mesh)
    tokens, lengths = run(model, prompts, prompt_lengths, max_new_tokens=64, stop_ids=(2,))

Attention layers have keys and values of every token, split over `context`; DeltaNet layers a convolution tail and a
state, whose size does not grow; both lie with their layers, split over `pipe`. Images in a prompt come by `beside`
(`generate.generate`): places and positions of `qwen3_5_inputs`, features of `qwen3_5_vision`.

Per decode step and layer: two all-reduces over the tensor axes, and in an attention layer one all-gather of the partial
attention over `context`. The DeltaNet part of a step is repeated on the devices of `context`, and needs none of them.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Float, Int

from shardzoo.errors import fail_if
from shardzoo.kernels.flash_attention.options import varying_like
from shardzoo.zoo import generate as shared
from shardzoo.zoo import pipeline
from shardzoo.zoo.attention import attention, cached_attention
from shardzoo.zoo.cache import CACHE_SPECS, Cache, empty
from shardzoo.zoo.delta_net import RECURRENT_SPECS, Recurrent, empty_recurrent
from shardzoo.zoo.generate import Engine, State, check_prompts, last_rows, next_logits
from shardzoo.zoo.language_model import sequence_positions, with_features
from shardzoo.zoo.linears import layer_at
from shardzoo.zoo.mesh import CONTEXT, DATA, KV, PIPE
from shardzoo.zoo.qwen3_5 import Config, Qwen35, gather_ends, problems, rotary

__all__ = ["ENGINE", "check_prompts", "complete", "generate", "stream"]


class HybridCache(NamedTuple):
    """What both kinds of layer keep, and by how much positions of new tokens are ahead of the number of tokens."""

    attn: Cache
    delta: Recurrent
    shift: Int[Array, " batch"]


Carry = tuple[Float[Array, "batch seq embed"], HybridCache]


def prefill(
    model: Qwen35,
    declared: Qwen35,
    tokens: Int[Array, "batch seq"],
    lengths: Int[Array, " batch"],
    steps: int,
    dtype: Any,
    *,
    positions: Int[Array, "batch seq axes"] | None = None,
    features: Float[Array, "rows embed"] | None = None,
    places: Int[Array, "batch seq"] | None = None,
) -> tuple[HybridCache, Float[Array, "batch vocab"]]:
    """Cache of the prompt, with room for `steps` decode steps, and logits after each row's last token.

    `positions`, `features` and `places` are as in `qwen3_5.forward`; tokens to come go on after the largest position.
    """
    given = {"positions": positions, "features": features, "places": places}
    fail_if(problems(model.config, **given), "qwen3_5 generate")
    config, order = model.config, sequence_positions(tokens.shape[1])
    turn, blocks = rotary(config, order if positions is None else positions), config.super_blocks // lax.axis_size(PIPE)
    x = with_features(model.embed(tokens, dtype, in_place=True), features, places)
    cache = HybridCache(
        attn=empty(
            order, lengths, steps=steps, layers=blocks,
            kv_heads=config.kv_heads // lax.axis_size(KV), head_dim=config.head_dim, dtype=x.dtype,
        ),
        delta=empty_recurrent(
            config.delta_sizes, blocks * (config.interval - 1), lengths.shape[0], x.dtype
        ),
        shift=_ahead(positions, order, lengths),
    )  # fmt: skip

    def delta(carry: Carry, layer: Array, here: Array | None) -> Carry:
        x, cache = carry
        block = layer_at(model.delta, layer, declared.delta)
        mixed, kept = block.mixer.prefill(block.enter(x), lengths)
        return block.finish(x, mixed), cache._replace(delta=cache.delta.write(layer, kept, here))

    def attend(carry: Carry, layer: Array, here: Array | None) -> Carry:
        x, cache = carry
        block = layer_at(model.attn, layer, declared.attn)
        q, kv, gate = block.mixer.project(block.enter(x), turn)
        mixed = block.mixer.finish(attention(q, kv, causal=True, lengths=lengths), gate)
        return block.finish(x, mixed), cache._replace(attn=cache.attn.write(layer, 0, kv, here))

    x, cache = _through(config, delta, attend, (x, cache))
    return cache, next_logits(model, last_rows(x, lengths))


def _ahead(
    positions: Int[Array, "batch seq axes"] | None, order: Int[Array, "one seq"], lengths: Int[Array, " batch"]
) -> Int[Array, " batch"]:
    """How much larger than the length of a row the position after its largest is: one all-reduce over `context`."""
    if positions is None:
        return varying_like(jnp.zeros_like(lengths), lengths)
    seen = (order < lengths[:, None])[..., None]
    return lax.pmax(jnp.max(jnp.where(seen, positions, -1), axis=(1, 2)), CONTEXT) + 1 - lengths


def decode_step(
    model: Qwen35, declared: Qwen35, state: State, dtype: Any
) -> tuple[HybridCache, Float[Array, "batch vocab"]]:
    """Feeds each row's last token: the cache with it, and the logits after it."""
    fed = state.step - 1
    now = state.prompt + fed
    attn, slot = state.cache.attn.feed(now, fed, state.tokens.shape[1] - 1)
    turn = rotary(model.config, (now + state.cache.shift)[:, None])
    visible = attn.visible(now, None)
    x = model.embed(state.token[:, None], dtype, in_place=True)

    def delta(carry: Carry, layer: Array, here: Array | None) -> Carry:
        x, cache = carry
        block = layer_at(model.delta, layer, declared.delta)
        mixed, kept = block.mixer.step(block.enter(x), cache.delta.read(layer, x.dtype))
        return block.finish(x, mixed), cache._replace(delta=cache.delta.write(layer, kept, here, last=mixed))

    def attend(carry: Carry, layer: Array, here: Array | None) -> Carry:
        x, cache = carry
        block = layer_at(model.attn, layer, declared.attn)
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
    cache_specs=HybridCache(attn=CACHE_SPECS, delta=RECURRENT_SPECS, shift=P(DATA)),
    beside={"positions": P(DATA, CONTEXT), "features": P(), "places": P(DATA, CONTEXT)},
)
generate = functools.partial(shared.generate, engine=ENGINE)
stream = functools.partial(shared.stream, engine=ENGINE)
complete = functools.partial(shared.complete, engine=ENGINE)
