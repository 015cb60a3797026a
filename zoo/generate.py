"""Generation: prefill, then a decode loop that ends when every row has stopped; one compiled program, on any mesh.

    run = generate(declared, mesh)
    tokens, lengths = run(model, prompts, prompt_lengths, max_new_tokens=64, stop_ids=(2,))

Here is all that families of language models share, and the decoder family's own part (`DECODER`); what another family
keeps of the tokens so far, and how it computes with it, is its own `Engine`.

The batch is split over `data`, the prompt and the cache over `context`, heads over the tensor axes, blocks and their
caches over `pipe`, the vocabulary over `pipe` and the tensor axes. Per decode step and block: two all-reduces over the
tensor axes, and over `context` one all-gather of the partial attention. Per step: one all-reduce for the embedding, one
all-gather of the logits, one all-reduce over `data` that says whether any row still runs, and what `pipeline.relay`
says. The weights are read in place: no gradient flows through generation.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, Key, UInt32, jaxtyped

from shardzoo.errors import InputError, fail_if
from shardzoo.kernels.flash_attention.options import varying_over
from shardzoo.zoo import layout, pipeline
from shardzoo.zoo.attention import attention, cached_attention
from shardzoo.zoo.cache import CACHE_SPECS, Cache, empty
from shardzoo.zoo.decoder import gather_ends
from shardzoo.zoo.decoder_model import Config, Decoder, window_of
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.language_model import Host, no_tokens, pad, sequence_positions
from shardzoo.zoo.linears import layer_at
from shardzoo.zoo.mesh import CONTEXT, DATA, KV, PIPE, VOCAB, on_host
from shardzoo.zoo.next_token import Sampling, choose
from shardzoo.zoo.rope import rotary

Prompts = Sequence[Sequence[int] | np.ndarray | Array] | np.ndarray | Array  # the tokens of each
Whole = int | np.integer
Number = float | int | np.floating | np.integer
AnyKey = Key[Array, ""] | UInt32[Host, "words"]  # those of jax.random.PRNGKey are whole numbers


class State(NamedTuple):
    """Where a generation stands; `step` tokens of each row are chosen, the last of them is not fed yet.

    `cache` is what the engine keeps of the tokens fed.
    """

    cache: Any
    prompt: Int[Array, " batch"]
    step: Int[Array, ""]
    token: Int[Array, " batch"]
    done: Bool[Array, " batch"]
    running: Bool[Array, ""]
    tokens: Int[Array, "batch new"]
    lengths: Int[Array, " batch"]


class Engine(NamedTuple):
    """What generation needs of a family. The functions run inside a `shard_map`; shapes are one device's.

    Attributes:
        gather_ends: (model, declared, to=) -> the model with all but its layers gathered from a split at rest.
        prefill: (model, declared, tokens, lengths, steps, dtype) -> the cache of the prompt, with room for so many
            decode steps, and the logits after each row's last token, whole on all of `pipe` and the tensor axes.
        decode_step: (model, declared, state, dtype) -> the cache with each row's last token, and the logits after it.
        cache_specs: how the cache is split.
        beside: what else of a prompt `prefill` takes by name, and how it is split.
    """

    gather_ends: Callable[..., Any]
    prefill: Callable[..., tuple[Any, Array]]
    decode_step: Callable[..., tuple[Any, Array]]
    cache_specs: Any
    beside: Mapping[str, P] = MappingProxyType({})

    @property
    def state_specs(self) -> State:
        rows = P(DATA)
        return State(
            cache=self.cache_specs, prompt=rows, step=P(), token=rows, done=rows, running=P(), tokens=rows, lengths=rows
        )


def last_rows(x: Float[Array, "batch seq embed"], lengths: Int[Array, " batch"]) -> Float[Array, "batch one embed"]:
    """The stream at each row's last valid position, on every device of `context`: one all-reduce over it."""
    seq = x.shape[1]
    local = lengths - 1 - lax.axis_index(CONTEXT) * seq
    here = (local >= 0) & (local < seq)
    found = jnp.take_along_axis(x, jnp.clip(local, 0, seq - 1)[:, None, None], axis=1)
    return lax.psum(jnp.where(here[:, None, None], found, 0), CONTEXT)


def next_logits(model: Any, x: Float[Array, "batch one embed"]) -> Float[Array, "batch vocab"]:
    """Logits over the whole vocabulary, on every device of `pipe` and the tensor axes: one all-gather over them."""
    return lax.all_gather(model.logits(model.norm(x)), VOCAB, axis=2, tiled=True, to="invarying")[:, 0]


def prefill(
    model: Decoder,
    declared: Decoder,
    tokens: Int[Array, "batch seq"],
    lengths: Int[Array, " batch"],
    steps: int,
    dtype: Any,
) -> tuple[Cache, Float[Array, "batch vocab"]]:
    """Cache of the prompt, with room for `steps` decode steps, and logits after each row's last token."""
    config, positions = model.config, sequence_positions(tokens.shape[1])
    turn = rotary(config.rope, config.head_dim, positions)
    x = model.embed(tokens, dtype, in_place=True)
    cache = empty(
        positions,
        lengths,
        steps=steps,
        layers=config.layers // lax.axis_size(PIPE),
        kv_heads=config.kv_heads // lax.axis_size(KV),
        head_dim=config.head_dim,
        dtype=x.dtype,
    )

    def run(x: Array, cache: Cache, here: Array | None) -> tuple[Array, Cache]:
        def body(carry: tuple[Array, Cache], index: Array) -> tuple[tuple[Array, Cache], None]:
            x, cache = carry
            block = layer_at(model.blocks, index, declared.blocks)
            q, kv = block.project(x, turn)
            window = window_of(config, first_layer(config) + index)
            attended = attention(q, kv, causal=True, **window, lengths=lengths)
            return (block.finish(x, attended), cache.write(index, 0, kv, here)), None

        return lax.scan(body, (x, cache), jnp.arange(cache.k.shape[0]))[0]

    x, cache = pipeline.relay(run, x, cache)
    return cache, next_logits(model, last_rows(x, lengths))


def first_layer(config: Config) -> Int[Array, ""]:
    """The number of this stage's first block in the model."""
    return lax.axis_index(PIPE) * (config.layers // lax.axis_size(PIPE))


def decode_step(
    model: Decoder, declared: Decoder, state: State, dtype: Any
) -> tuple[Cache, Float[Array, "batch vocab"]]:
    """Feeds each row's last token: the cache with it, and the logits after it."""
    config, fed = model.config, state.step - 1
    now = state.prompt + fed
    cache, slot = state.cache.feed(now, fed, state.tokens.shape[1] - 1)
    turn = rotary(config.rope, config.head_dim, now[:, None])
    sees = _visible(config, cache, now)
    x = model.embed(state.token[:, None], dtype, in_place=True)

    def run(x: Array, cache: Cache, here: Array | None) -> tuple[Array, Cache]:
        def body(carry: tuple[Array, Cache], index: Array) -> tuple[tuple[Array, Cache], None]:
            x, cache = carry
            block = layer_at(model.blocks, index, declared.blocks)
            q, kv = block.project(x, turn)
            cache = cache.write(index, slot, kv, here)
            keys = cache.read(index, config.head_dim, x.dtype)
            return (block.finish(x, cached_attention(q, *keys, sees(first_layer(config) + index))), cache), None

        return lax.scan(body, (x, cache), jnp.arange(cache.k.shape[0]))[0]

    x, cache = pipeline.relay(run, x, cache)
    return cache, next_logits(model, x)


def _visible(config: Config, cache: Cache, now: Int[Array, " batch"]) -> Callable[[Array], Array]:
    """For a layer, what `Cache.visible` says with that layer's window."""
    windowed = config.windowed
    near, far = cache.visible(now, config.sliding_window), cache.visible(now, None)
    if len(set(windowed)) == 1:
        return lambda layer: near if windowed[0] else far
    return lambda layer: jnp.where(jnp.asarray(windowed)[layer], near, far)


DECODER = Engine(gather_ends=gather_ends, prefill=prefill, decode_step=decode_step, cache_specs=CACHE_SPECS)


def _take(state: State, cache: Any, token: Int[Array, " batch"], stop_ids: Int[Array, " stops"]) -> State:
    """The state with one more token chosen; rows that are done get zeros."""
    token = jnp.where(state.done, 0, token)
    done = state.done | jnp.any(token[:, None] == stop_ids, axis=1)
    return State(
        cache=cache,
        prompt=state.prompt,
        step=state.step + 1,
        token=token,
        done=done,
        running=_any(~done),
        tokens=lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.step, 1),
        lengths=state.lengths + (~state.done).astype(jnp.int32),
    )


def _any(x: Bool[Array, " batch"]) -> Bool[Array, ""]:
    return lax.psum(jnp.any(x).astype(jnp.int32), DATA) > 0


def _rows(batch: int) -> Int[Array, " batch"]:
    return lax.axis_index(DATA) * batch + jnp.arange(batch)


def _start(
    model: eqx.Module,
    tokens: Int[Array, "batch seq"],
    lengths: Int[Array, " batch"],
    key: Key[Array, ""],
    stop_ids: Int[Array, " stops"],
    beside: dict[str, Array],
    *,
    declared: eqx.Module,
    engine: Engine,
    sampling: Sampling,
    new: int,
    dtype: Any,
) -> State:
    """One device's state after the prompt, with the first token chosen. Rows of length 0 are done."""
    model = engine.gather_ends(model, declared, to="invarying")
    cache, logits = engine.prefill(model, declared, tokens, lengths, new - 1, dtype, **beside)
    batch, step = tokens.shape[0], jnp.zeros((), jnp.int32)
    none = varying_over(jnp.zeros(batch, jnp.int32), frozenset({DATA}))
    state = State(
        cache=cache,
        prompt=lengths,
        step=step,
        token=none,
        done=lengths == 0,
        running=_any(lengths > 0),
        tokens=varying_over(jnp.zeros((batch, new), jnp.int32), frozenset({DATA})),
        lengths=none,
    )
    return _take(state, cache, choose(logits, sampling, key, _rows(batch), step), stop_ids)


def _advance(
    model: eqx.Module,
    state: State,
    key: Key[Array, ""],
    stop_ids: Int[Array, " stops"],
    until: Int[Array, ""],
    *,
    declared: eqx.Module,
    engine: Engine,
    sampling: Sampling,
    dtype: Any,
) -> State:
    """One device's state when `until` tokens of each row are chosen, or every row has stopped."""
    model = engine.gather_ends(model, declared, to="invarying")
    rows = _rows(state.token.shape[0])

    def body(state: State) -> State:
        cache, logits = engine.decode_step(model, declared, state, dtype)
        return _take(state, cache, choose(logits, sampling, key, rows, state.step), stop_ids)

    return lax.while_loop(lambda s: s.running & (s.step < until), body, state)


class _Programs:
    """The two halves of generation as functions of global arrays."""

    def __init__(self, declared: eqx.Module, mesh: Mesh | AbstractMesh, dtype: Any, engine: Engine):
        layout.audit(declared, mesh)
        self.declared, self.mesh, self.engine = declared, mesh, engine
        self.dtype = float_dtype("generate", dtype)

    def _shard(self, f: Callable, inputs: tuple, **options: Any) -> Callable:
        f = functools.partial(f, declared=self.declared, engine=self.engine, dtype=self.dtype, **options)
        specs = (layout.specs(self.declared), *inputs)
        return layout.sharded(f, self.mesh, specs, self.engine.state_specs)

    def start(
        self, model, tokens, lengths, key, stop_ids, beside=MappingProxyType({}), *, sampling: Sampling, new: int
    ) -> State:
        ways, specs = (self.mesh.shape[DATA], self.mesh.shape[CONTEXT]), {k: self.engine.beside[k] for k in beside}
        beside = {k: pad(v, *ways) if specs[k] == P(DATA, CONTEXT) else v for k, v in beside.items()}
        tokens, lengths = pad(tokens, *ways), pad(lengths, self.mesh.shape[DATA], 1)
        f = self._shard(_start, (P(DATA, CONTEXT), P(DATA), P(), P(), specs), sampling=sampling, new=new)
        return f(model, tokens, lengths, key, stop_ids, beside)

    def advance(self, model, state: State, key, stop_ids, until, *, sampling: Sampling) -> State:
        f = self._shard(_advance, (self.engine.state_specs, P(), P(), P()), sampling=sampling)
        return f(model, state, key, stop_ids, until)


def _sampling(temperature: Number, top_k: Whole | None, top_p: Number | None) -> Sampling:
    """With Python's numbers, whose dtype no other gives way to."""
    return Sampling(
        temperature=float(temperature),
        top_k=None if top_k is None else int(top_k),
        top_p=None if top_p is None else float(top_p),
    )


def _arrays(tokens: Host, lengths: Host, key: Host | None, stop_ids: Any) -> tuple[Array, ...]:
    noise: Any = jax.random.key(0) if key is None else key
    noise = noise if jnp.issubdtype(noise.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(noise)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32), noise, jnp.asarray(stop_ids, jnp.int32)


def _beside(engine: Engine, given: Mapping[str, Host] | None) -> dict[str, Array]:
    """What else of the prompt is given, for an engine that takes it."""
    unknown = sorted({*(given or {})} - {*engine.beside})
    known = ", ".join(engine.beside) or "nothing"
    fail_if([f"beside: {unknown} are not what this family takes: {known} is"] if unknown else [], "generate")
    return {name: jnp.asarray(value) for name, value in (given or {}).items()}


def _check(max_new_tokens: Whole) -> None:
    if max_new_tokens < 1:
        raise InputError(f"generate: max_new_tokens={max_new_tokens} is not at least 1: change it")


def _wrong_prompts(tokens: Host, lengths: Host, vocab: int) -> Iterator[str]:
    """What is wrong with prompts that are known now, as those of a jitted caller are not."""
    yield from no_tokens(tokens)
    if isinstance(lengths, np.ndarray):
        outside = [int(n) for n in lengths if not 0 <= n <= tokens.shape[1]]
        if outside:
            yield f"lengths: {outside[:5]} are not in 0 ... {tokens.shape[1]} (seq): give the lengths of the prompts"
        elif isinstance(tokens, np.ndarray):
            inside = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
            wrong = sorted({*inside[(inside < 0) | (inside >= vocab)].tolist()})
            if wrong:
                yield f"tokens: {wrong[:5]} are not in 0 ... {vocab - 1} (vocab): check them"


def generate(
    declared: Any, mesh: Mesh | AbstractMesh, *, dtype: Any = None, engine: Engine = DECODER
) -> Callable[..., tuple[Int[Array, "batch new"], Int[Array, " batch"]]]:
    """The function `run(model, tokens, lengths, *, max_new_tokens, temperature, top_k, top_p, key, stop_ids, beside)`.

    It returns the new tokens (batch, max_new_tokens), zeros after the end, and how many each row has, a stop token
    included. Results do not depend on the mesh, on padding, or on the other rows.

    run's arguments, beside the live model:
        tokens, lengths: prompts padded on the right, and their lengths (`padded_right` gives both); a row of length 0
            gets nothing.
        max_new_tokens: the most tokens for a row.
        temperature, top_k, top_p: see `Sampling`; the default takes the likeliest token.
        key: of the sampling noise; `jax.random.key(0)` if not given.
        stop_ids: tokens that end a row.
        beside: what else of the prompt the family takes, by name: of Qwen3.5 `positions`, `features` and `places`, as
            its forward pass does, for images among the tokens.

    Args:
        dtype: of activations and cache; None is that of the weights.
        engine: that of the declaration's family.

    Raises:
        InputError: the mesh does not fit the declaration; options out of range.
    """
    programs = _Programs(declared, mesh, dtype, engine)

    @functools.partial(jax.jit, static_argnames=("sampling", "new"))
    def whole(model, tokens, lengths, key, stop_ids, beside, *, sampling, new):
        state = programs.start(model, tokens, lengths, key, stop_ids, beside, sampling=sampling, new=new)
        state = programs.advance(model, state, key, stop_ids, jnp.int32(new), sampling=sampling)
        return state.tokens[: len(tokens)], state.lengths[: len(tokens)]

    @jaxtyped(typechecker=beartype)
    def run(
        model: eqx.Module,
        tokens: Int[Host, "batch seq"],
        lengths: Int[Host, " batch"],
        *,
        max_new_tokens: Whole,
        temperature: Number = 0.0,
        top_k: Whole | None = None,
        top_p: Number | None = None,
        key: AnyKey | None = None,
        stop_ids: Sequence[Whole] | Int[Host, " stops"] = (),
        beside: Mapping[str, Host] | None = None,
    ) -> tuple[Int[Array, "batch new"], Int[Array, " batch"]]:
        _check(max_new_tokens)
        fail_if(_wrong_prompts(tokens, lengths, declared.config.vocab), "generate")
        new, sampling = int(max_new_tokens), _sampling(temperature, top_k, top_p)
        given = (*_arrays(tokens, lengths, key, stop_ids), _beside(engine, beside))
        return whole(model, *given, sampling=sampling, new=new)

    return run


def stream(
    declared: Any, mesh: Mesh, *, dtype: Any = None, chunk: int = 8, engine: Engine = DECODER
) -> Callable[..., Iterator[tuple[np.ndarray, np.ndarray]]]:
    """As `generate`, but `run` yields (new tokens (batch, up to `chunk`), total lengths so far (batch,)) as they come.

    The first token comes by itself, right after the prompt. Tokens of a row beyond its length are zeros.
    """
    if chunk < 1:
        raise InputError(f"stream: chunk={chunk} is not at least 1: change it")
    programs = _Programs(declared, mesh, dtype, engine)
    start = jax.jit(programs.start, static_argnames=("sampling", "new"))
    advance = jax.jit(programs.advance, static_argnames=("sampling",), donate_argnums=1)

    @jaxtyped(typechecker=beartype)
    def run(
        model: eqx.Module,
        tokens: Int[Host, "batch seq"],
        lengths: Int[Host, " batch"],
        *,
        max_new_tokens: Whole,
        temperature: Number = 0.0,
        top_k: Whole | None = None,
        top_p: Number | None = None,
        key: AnyKey | None = None,
        stop_ids: Sequence[Whole] | Int[Host, " stops"] = (),
        beside: Mapping[str, Host] | None = None,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        _check(max_new_tokens)
        fail_if(_wrong_prompts(tokens, lengths, declared.config.vocab), "generate")
        new, sampling = int(max_new_tokens), _sampling(temperature, top_k, top_p)
        prompts, sizes, key, stops = _arrays(tokens, lengths, key, stop_ids)
        given = _beside(engine, beside)
        state = start(model, prompts, sizes, key, stops, given, sampling=sampling, new=new)
        shown, batch = 0, len(tokens)
        while True:
            step, running = int(state.step), bool(state.running)
            yield on_host(state.tokens)[:batch, shown:step], on_host(state.lengths)[:batch]
            shown = step
            if not running or step >= new:
                return
            until = jnp.int32(min(step + chunk, new))
            state = advance(model, state, key, stops, until, sampling=sampling)

    return run


def padded_right(
    tokens: Int[np.ndarray, "batch seq"], mask: Bool[np.ndarray, "batch seq"]
) -> tuple[Int[np.ndarray, "batch seq"], Int[np.ndarray, " batch"]]:
    """Prompts that are padded on any side as `generate` takes them, on the right, and their lengths.

    `mask` is True for tokens that count.

    Raises:
        InputError: padding between the tokens of a row.
    """
    lengths, first = mask.sum(axis=1), mask.argmax(axis=1)
    place = np.arange(tokens.shape[1])
    kept = place < lengths[:, None]
    order = (first[:, None] + place) % max(tokens.shape[1], 1)
    torn = np.flatnonzero((kept & ~np.take_along_axis(mask, order, axis=1)).any(axis=1)).tolist()
    fail_if([f"rows {torn} have padding between their tokens: take it out"] if torn else [], "padded_right: mask")
    return np.where(kept, np.take_along_axis(tokens, order, axis=1), 0), lengths


def complete(
    declared: Any,
    mesh: Mesh,
    model: eqx.Module,
    prompts: Prompts,
    *,
    max_new_tokens: Whole,
    stop_ids: Sequence[Whole] | Int[Host, " stops"] = (),
    dtype: Any = None,
    engine: Engine = DECODER,
    **options: Any,
) -> list[list[int]]:
    """The new tokens of each prompt as lists, without the stop token; options are those of `generate`.

    It compiles anew at each call: to answer many batches of one shape, keep the function that `generate` gives.

    Raises:
        InputError: as `generate`; an empty prompt, a token outside the vocabulary, or a prompt that leaves less than
            `max_new_tokens` of the model's positions.
    """
    prompts = [np.asarray(prompt) if isinstance(prompt, Array) else prompt for prompt in prompts]
    stop_ids = [int(token) for token in stop_ids]
    check_prompts(declared.config, prompts, max_new_tokens)
    if not prompts:
        return []
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), int(lengths.max())), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    run = generate(declared, mesh, dtype=dtype, engine=engine)
    new, counts = run(model, tokens, lengths, max_new_tokens=max_new_tokens, stop_ids=stop_ids, **options)
    rows = [row[:count].tolist() for row, count in zip(on_host(new), on_host(counts), strict=True)]
    return [row[:-1] if row and row[-1] in stop_ids else row for row in rows]


@runtime_checkable
class Limits(Protocol):
    """What a family's config says of the tokens that it takes."""

    @property
    def vocab(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


def check_prompts(config: Limits, prompts: Prompts, max_new_tokens: Whole) -> None:
    """Raises `InputError` naming every prompt that `complete` would refuse; needs no weights."""
    _check(max_new_tokens)
    problems = []
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence | np.ndarray) or not all(isinstance(t, Integral) for t in prompt):
            problems.append(f"prompt {i}: {str(prompt)[:40]!r} is not a list of tokens: give their numbers, encoded")
            continue
        outside = sorted({int(t) for t in prompt if not 0 <= t < config.vocab})
        if not len(prompt):
            problems.append(f"prompt {i} is empty: give at least one token")
        if outside:
            problems.append(f"prompt {i}: tokens {outside[:5]} are not in 0 ... {config.vocab - 1} (vocab): check it")
        if len(prompt) + max_new_tokens > config.max_positions:
            problems.append(
                f"prompt {i}: {len(prompt)} tokens + max_new_tokens={max_new_tokens} exceed"
                f" max_positions={config.max_positions}: shorten one of them"
            )
    fail_if(problems, "generate")
