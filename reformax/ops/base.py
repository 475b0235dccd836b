"""The contract that every attention algorithm keeps, and the oracle each one is held to.

Letters in the shapes of `reformax.ops` (the order of `jax.nn.dot_product_attention`):

    B batch    T queries    S keys    N heads    H query and key size    V value size
    R hashing rounds    C chunks    L chunk length    M keys in a chunk's window

Segments are integer ids, one a token: a token sees its own id only, and 0 is padding, which sees
and gives nothing. For queries and keys of one sequence they are one array `[B, T]`; for those of
two, a pair of arrays `[B, T]` and `[B, S]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

Segments = Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]]


class Traits(NamedTuple):
    """What an algorithm is, as data: callers ask these and never the algorithm's name."""

    shared_qk: bool = False  # one projection serves as query and, length-normalised, as key
    causal: bool = True  # it can hide the future
    bidirectional: bool = True  # it can show the future
    cross: bool = False  # queries and keys may come from different sequences
    bias: bool = False  # it can add a given number to each score
    exact: bool = False  # every visible key is attended to, whatever the plan
    random_plan: bool = False  # the plan is drawn at random: it needs an rng
    beams: bool = False  # in beam search `step` finds a beam's past in other beams' caches


class Dims(NamedTuple):
    """The static sizes that an algorithm's own weights may depend on."""

    n_heads: int
    d_qk: int
    d_v: int
    length: int


class AttentionOp(NamedTuple):
    """An attention algorithm with its hyperparameters fixed, as pure functions.

    `plan` says where each query looks and `apply` does the arithmetic there. They are apart because
    a reversible stack computes `apply` again in its backward pass and must look in the same places:
    it keeps the plans, which are small integers, and no activation.

    Attributes:
      init: `(rng, dims) -> params`, the algorithm's own weights, usually `()`.
      plan: `(params, q, k, *, segments, causal, rng, train, length=None) -> plan`, a pytree of
        integers through which no gradient flows. `train=False` selects the settings for evaluation;
        `length`, if not None, is what settings that depend on a length go by in place of q's.
      apply: `(params, q, k, v, *, plan, segments, causal, dropout, rng) -> out`; with the trait
        `bias` it takes that too, None by default.
      traits: what the algorithm can do.
      init_cache: decoding, `(params, q, k, v, *, plan, lengths, capacity, rng) -> cache`: what is
        kept of each row's first `lengths` positions, given the arguments and the plan of a causal
        call, so that in the end `capacity` positions fit; None: it cannot. The plan was made with
        `length=capacity` and the same rng.
      step: `(params, q, k, v, cache, *, position) -> (out, cache)`: the attention of one more
        position a row, `[B, 1, N, ...]`, whose number is `position [B]`; None: it cannot. With the
        trait `beams` it takes `origins` too.
    """

    init: Callable[..., Any]
    plan: Callable[..., Any]
    apply: Callable[..., Any]
    traits: Traits
    init_cache: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S N H"] | None,
        v: Float[Array, "B S N V"],
        *,
        causal: bool = False,
        segments: Segments | None = None,
        bias: Float[Array, "#B #N #T #S"] | None = None,
        dropout: float = 0.0,
        rng: PRNGKeyArray | None = None,
        train: bool = True,
    ) -> Float[Array, "B T N V"]:
        """Plans and applies in one call, for an algorithm without weights of its own.

        To be called under `jax.jit`: outside of it every call compiles the algorithm's loops again.

        Args:
          q: queries; for a shared-QK algorithm, queries and keys in one.
          k: keys; None for a shared-QK algorithm.
          v: values.
          causal: whether a position sees only itself and what came before it.
          segments: ids of the tokens, or a pair of them for queries and for keys.
          bias: added to the scores after they are scaled; an axis of size 1 is shared.
          dropout: the rate at which attention weights are dropped.
          rng: the source of hashes and of dropout.
          train: False selects the algorithm's settings for evaluation.

        Returns:
          The attended values in the dtype of `v`. A row that sees nothing is zeros.

        Raises:
          ValueError: an argument's shape does not fit, or an rng is needed and missing.
          NotImplementedError: the algorithm cannot do what is asked.
        """
        check_arguments(
            self.traits,
            *(q, k, v),
            causal=causal,
            segments=segments,
            bias=bias,
            dropout=dropout,
            rng=rng,
        )
        plan = self.plan((), q, k, segments=segments, causal=causal, rng=rng, train=train)
        return self.apply(
            (),
            *(q, k, v),
            plan=plan,
            segments=segments,
            causal=causal,
            dropout=dropout,
            rng=rng,
            **({} if bias is None else {"bias": bias}),
        )


def no_params(rng: PRNGKeyArray, dims: Dims) -> tuple[()]:
    """`AttentionOp.init` of an algorithm that has no weights of its own."""
    del rng, dims
    return ()


def no_plan(params, q, k, *, segments, causal, rng, train, length=None) -> tuple[()]:
    """`AttentionOp.plan` of an algorithm that looks in the same places whatever it reads."""
    del params, q, k, segments, causal, rng, train, length
    return ()


def check_arguments(traits: Traits, q, k, v, *, causal, segments, dropout, rng, bias=None) -> None:
    """Raises one line that names the argument, its value and the fix, before any tracing."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and x.ndim != 4:
            raise ValueError(
                f"{name} has shape {x.shape}: expected 4 axes, [batch, length, heads, size]"
            )
        if x is not None and 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: expected at least one of each axis")
    if traits.shared_qk and k is not None:
        raise ValueError("k is given, but this op makes its keys of the queries: pass k=None")
    if not traits.shared_qk and k is None:
        raise ValueError("k is None, but this op has keys of their own: pass k")
    keys, of = (q, "q") if k is None else (k, "k")
    if v.shape[:3] != keys.shape[:3]:
        raise ValueError(
            f"v has shape {v.shape}: expected [batch, length, heads] as in {of}, {keys.shape[:3]}"
        )
    if (q.shape[0], *q.shape[2:]) != (keys.shape[0], *keys.shape[2:]):
        raise ValueError(
            f"k has shape {keys.shape}: expected batch, heads and size as in q, {q.shape}"
        )
    if q.shape[1] != keys.shape[1] and not traits.cross:
        raise NotImplementedError(
            f"q and k have lengths {q.shape[1]} and {keys.shape[1]}, "
            "but this op attends within one sequence: use an op whose traits say cross=True"
        )
    if causal and not traits.causal:
        raise NotImplementedError("causal=True: this op cannot hide the future")
    if not causal and not traits.bidirectional:
        raise NotImplementedError("causal=False: this op is causal only")
    if isinstance(segments, tuple) and not traits.cross:
        raise NotImplementedError(
            "segments is a pair, but this op attends within one sequence: pass one array"
        )
    if isinstance(segments, tuple) and (len(segments) != 2 or any(x is None for x in segments)):
        raise ValueError(
            "segments is a tuple, but no pair of ids of queries and ids of keys: give both, ones "
            "where all is seen"
        )
    for ids, x, name in zip(segment_pair(segments), (q, keys), ("q", of), strict=True):
        if ids is None:
            continue
        if ids.shape != x.shape[:2]:
            pair = "" if isinstance(segments, tuple) else ", or a pair of them if keys are others"
            raise ValueError(
                f"segments has shape {ids.shape}: expected [batch, length] of {name}, "
                f"{x.shape[:2]}{pair}"
            )
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"segments has dtype {ids.dtype}: expected integers")
    if bias is not None:
        if not traits.bias:
            raise NotImplementedError(
                "bias is given: this op adds none, use one whose traits say bias=True"
            )
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise ValueError(
                f"bias has dtype {bias.dtype}: expected floats, which are added; of a mask make "
                "jnp.where(mask, 0.0, -jnp.inf)"
            )
        full = (q.shape[0], q.shape[2], q.shape[1], keys.shape[1])
        fits = bias.ndim == 4 and all(n in (1, m) for n, m in zip(bias.shape, full, strict=True))
        if not fits:
            raise ValueError(
                f"bias has shape {bias.shape}: expected [batch, heads, queries, keys], {full}, "
                "each or 1"
            )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is {dropout}: expected a rate in [0, 1)")
    if rng is None and (dropout > 0.0 or traits.random_plan):
        why = "dropout > 0" if dropout > 0.0 else "an op that draws its plan at random"
        raise ValueError(f"rng is None: {why} needs one, such as jax.random.key(0)")


def check_impl(impl: str, *others: str) -> None:
    """Raises `ValueError` for an implementation that an op does not have."""
    known = ("auto", "xla", *others)
    if impl not in known:
        names = ", ".join(repr(name) for name in known[:-1])
        raise ValueError(f"impl is {impl!r}: expected {names} or {known[-1]!r}")


def check_sizes(*others: str, **sizes: int | str | None) -> None:
    """Raises `ValueError` for a size that is neither 1 or more, nor None, nor one of `others`."""
    also = "".join(f", or {other!r}" for other in others)
    for name, size in sizes.items():
        if size is None or size in others:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}: expected at least 1{also}")


def gpu_obstacle() -> str | None:
    """What is not an NVIDIA GPU that kernels run on, in words; None on one of Ampere or later."""
    if jax.default_backend() != "gpu":
        return f"the backend {jax.default_backend()!r}"
    device = jax.local_devices()[0]
    if float(getattr(device, "compute_capability", None) or 0) < 8.0:
        return f"the device {device.device_kind!r}, which is not an NVIDIA GPU of Ampere or later"
    return None


def use_kernel(impl: str, fits: bool) -> bool:
    """Whether a layer's kernel computes a call; `fits` says that "auto" may take it.

    Raises:
      NotImplementedError: `impl` is "pallas" and there is no GPU for it.
    """
    if impl != "pallas":
        one_gpu = jax.device_count() == 1 and not gpu_obstacle()
        return impl == "pallas_interpret" or (impl == "auto" and fits and one_gpu)
    if obstacle := gpu_obstacle():
        raise NotImplementedError(f"impl='pallas' with {obstacle}: use impl='auto' or 'xla'")
    return True


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def length_normalize(x: Float[Array, "*d H"], epsilon: float = 1e-6) -> Float[Array, "*d H"]:
    """`x` scaled to unit root mean square over its last axis: a shared-QK key."""
    return _normalize_forward(x, epsilon)[0]


def _normalize_forward(x, epsilon):
    y, _ = _normalized(x, epsilon)
    return y.astype(x.dtype), x


def _normalize_backward(epsilon, x, dy):
    y, scale = _normalized(x, epsilon)
    return (((dy - y * mean_product(y, dy)) * scale).astype(x.dtype),)


length_normalize.defvjp(_normalize_forward, _normalize_backward)


def _normalized(x, epsilon):
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(mean_product(x, x) + epsilon)
    return x * scale, scale


def mean_product(x: Float[Array, "*d H"], y: Float[Array, "*d H"]) -> Float[Array, "*d 1"]:
    """The mean of `x * y` over the last axis, float32."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    if jax.default_backend() == "cpu":  # XLA has a faster product of vectors there than sum
        product = jnp.einsum("...h,...h->...", x, y)
    else:
        product = jnp.sum(x * y, axis=-1)
    return product[..., None] / x.shape[-1]


def segment_pair(
    segments: Segments | None,
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | tuple[None, None]:
    """The segments of the queries and those of the keys."""
    return segments if isinstance(segments, tuple) else (segments, segments)


def visibility(
    n_queries: int,
    n_keys: int,
    *,
    causal: bool,
    segments: Segments | None = None,
) -> Bool[Array, "#B 1 T S"]:
    """Which key each query may see at all, by causality and by segment."""
    mask = jnp.ones((1, 1, n_queries, n_keys), bool)
    if causal:
        mask = jnp.tril(mask)
    if segments is not None:
        of_query, of_key = segment_pair(segments)
        same = of_query[:, None, :, None] == of_key[:, None, None, :]
        mask = mask & same & (of_key != 0)[:, None, None, :]
    return mask


def except_self(mask: Bool[Array, "#B #N T T"]) -> Bool[Array, "#B #N T T"]:
    """Hides each position from itself unless it sees nothing else (Reformer, sec. 2)."""
    itself = jnp.eye(mask.shape[-1], dtype=bool)
    others = mask & ~itself
    alone = ~others.any(axis=-1, keepdims=True)
    return others | (mask & itself & alone)


def _mix(x: Int[Array, "*d"]) -> Int[Array, "*d"]:
    """A bijection of 32-bit words in which each input bit flips each output bit half the time."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def dropout_multiplier(
    rng: PRNGKeyArray,
    rate: float,
    batch: Int[Array, "*d"],
    head: Int[Array, "*d"],
    query: Int[Array, "*d"],
    key: Int[Array, "*d"],
) -> Float[Array, "*d"]:
    """Dropout of attention weights as a function of *which* weight: 0 or 1 / (1 - rate).

    A weight is addressed by its batch, head, query and key position, so any tiling, any order and
    both passes see the same mask, and nothing of it is stored. The arguments broadcast.
    """
    return keep_multiplier(dropout_words(rng), rate, batch, head, query, key)


def dropout_words(rng: PRNGKeyArray) -> Int[Array, 2]:
    """The seed and the salt of `dropout_multiplier`, as a kernel reads them."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def keep_multiplier(
    words: Int[Array, 2],
    rate: float,
    batch: Int[Array, "*d"],
    head: Int[Array, "*d"],
    query: Int[Array, "*d"],
    key: Int[Array, "*d"],
) -> Float[Array, "*d"]:
    """`dropout_multiplier` of the words that its rng gives."""
    bits = dropout_bits(words, batch, head, query, key)
    keep = bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(keep, np.float32(1 / (1 - rate)), np.float32(0))


def dropout_bits(
    words: Int[Array, 2],
    batch: Int[Array, "*d"],
    head: Int[Array, "*d"],
    query: Int[Array, "*d"],
    key: Int[Array, "*d"],
) -> Int[Array, "*d"]:
    """The 32 random bits of each address."""
    seed, salt = words
    batch, head, query, key = (jnp.asarray(x).astype(jnp.uint32) for x in (batch, head, query, key))
    row = _mix(query ^ _mix(head ^ _mix(batch ^ seed)))
    return _mix(row ^ _mix(key ^ salt))


def full_dropout_multiplier(
    rng: PRNGKeyArray, rate: float, shape: tuple[int, int, int, int]
) -> Float[Array, "B N T S"]:
    """`dropout_multiplier` of every weight of a `[B, N, T, S]` attention matrix."""
    return dropout_multiplier(rng, rate, *jnp.ogrid[tuple(slice(n) for n in shape)])


def reference_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N V"],
    mask: Bool[Array, "#B #N T S"],
    *,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    dropout: float = 0.0,
    rng: PRNGKeyArray | None = None,
) -> Float[Array, "B T N V"]:
    """The oracle: softmax(q k^T / sqrt(H) + bias) v over an explicit mask, in O(T * S).

    Scores and weights are float32 whatever the inputs are. A row that sees nothing is zeros.
    """
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) / math.sqrt(
        q.shape[-1]
    )
    if bias is not None:
        scores = scores + bias
    # Subtracting the maximum only of what is visible keeps a fully masked row finite. No gradient
    # goes through it, for what it adds up to is 0.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=-1e30))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    if dropout > 0.0:
        weights = weights * full_dropout_multiplier(rng, dropout, weights.shape)
    out = jnp.einsum(
        "bnts,bsnv->btnv", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.astype(v.dtype)
