"""The contract that every attention algorithm keeps.

Letters in the shapes of `reformax.ops` (the order of `jax.nn.dot_product_attention`):

    B batch    T queries    S keys    N heads    H query and key size    V value size
    R hashes   C chunks   L chunk length   M keys in a chunk's window
    G heads of keys and values, a divisor of N (`calls/heads.py`); where it is not named, it is N

Segment ids are integers, one for each token. A token sees the tokens of its own id. Id 0 is
padding, which sees nothing and is not seen. Queries and keys of one sequence have one array of ids,
`[B, T]`; those of two sequences have a pair, `[B, T]` and `[B, S]`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax import devices
from reformax.declared import checked
from reformax.ops.calls.arguments import check_arguments, checked_params
from reformax.ops.calls.dims import Dims, ExtraProjection
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.masking.given_masks import checked_mask, with_mask
from reformax.ops.masking.masks import SegmentIds, int32_ids, segment_pair
from reformax.ops.masking.padding import attend_to_tokens, tokens_only
from reformax.ops.sharding.borders import Reach
from reformax.ops.sharding.placement import CallArrays, placement_of

T = TypeVar("T")
# Option types that are safe cache keys: equality implies identity. Sequences may hold 2 or 2.0.
_REMEMBERED = (bool, int, float, str, FunctionType, type(None))


class Traits(NamedTuple):
    """The properties of an algorithm. Callers ask these, never its name."""

    shared_qk: bool = False  # one projection serves as query and, length-normalised, as key
    causal: bool = True  # it can hide the future
    bidirectional: bool = True  # it can show the future
    cross: bool = False  # queries and keys may come from different sequences
    bias: bool = False  # it can add a given bias to the logits
    exact: bool = False  # it attends to every visible key
    random_plan: bool = False  # its plan is drawn at random and needs an rng
    causal_plan: bool = True  # in a causal call no later token changes what a position sees
    beams: bool = False  # in beam search `step` reads a beam's past in other beams' caches
    keeps_padding_out: bool = False  # `apply` itself ignores the arrays at padding
    local: bool = False  # how far a position sees does not grow with the length
    exclude_self: bool = False  # a position never sees itself
    dropout: bool = True  # it makes attention weights, which can be dropped
    packed: bool = True  # it tells segments apart; False: a row has one, besides padding
    global_tokens: bool = False  # its plan reads `Tokens.global_tokens`: which tokens are global
    lengths: bool = False  # it takes the number of a row's tokens, with padding behind them
    grouped: bool = False  # it reads keys of fewer heads; other ops get them repeated
    head_shards: bool = False  # it computes a shard of heads; a `Shard` takes the rng's place
    choose_together: bool = False  # heads that share keys attend to the same of them
    sequence_shards: bool = False  # it computes a shard of the sequence; a `Shard` names the axis


# A dataclass, because `jax.jit` keeps weak references, which a tuple has not.
@dataclasses.dataclass(frozen=True, repr=False)
class AttentionOp:
    """An attention algorithm with its hyperparameters fixed, as pure functions.

    `plan` chooses the keys that each query may attend to, and `apply` attends to them. A reversible
    stack computes `apply` again in the backward pass, with the same plan. It stores the plans,
    which are small, and no activations.

    Attributes:
      init: `(rng, dims) -> params`, the algorithm's own weights: a dict of arrays, or `()`. A stack
        maps it over the rngs of its layers by `jax.vmap`.
      plan: `(params, q, k, *, segment_ids, causal, rng, train, length=None) -> plan`, a pytree of
        integers through which no gradient flows. `train=False` selects the settings for evaluation.
        Settings that depend on a length use `length` if it is given, and else the length of q. With
        the trait `global_tokens` it also takes `global_tokens [B, T]`, None by default.
      apply: `(params, q, k, v, *, plan, segment_ids, causal, dropout, rng) -> out`. With the trait
        `bias` it also takes `bias`, None by default; an algorithm that has `extra_projections`
        takes those. With the trait `lengths` it also takes `lengths [B]`, None by default:
        each row is so many tokens of one segment and then padding, where arrays are finite.
        `segment_ids` say the same.
      traits: what the algorithm can do.
      init_cache: `(params, q, k, v, *, plan, lengths, capacity, rng) -> cache`, for decoding: the
        cache after the first `lengths` positions of each row, with room for `capacity` positions.
        The plan is that of a causal call with `length=capacity` and the same rng. None if the
        algorithm cannot decode. An algorithm that has `extra_projections` takes those.
      step: `(params, q, k, v, cache, *, position) -> (out, cache)`: attention of one more position
        of each row, `[B, 1, N, ...]`, whose number is `position [B]`. With the trait `beams` it
        also takes `origins`, with the trait `bias` also `bias`, `(positions of keys [B, S]) ->
        [B, N, S]`; an algorithm that has `extra_projections` takes those. As in `apply`, the
        algorithm's `impl` decides whether kernels hash and compute a softmax of one query. None if
        the algorithm cannot decode.
      replace_value: `(cache, v, position) -> cache`: the cache with another value, `[B, 1, N, V]`,
        of a position that it holds. None: it cannot.
      extra_projections: `dims -> {name: ExtraProjection}`: further projections of the layer's
        input, such as gates. A layer makes them, and the functions above take them as a dict,
        `{name: [B, T, n_heads, size]}`. None: there are none.
      reach: `causal -> Reach`, how far a position sees, whatever the length. A device that has a
        shard of a sequence then reads its neighbours' borders alone. For an algorithm without a
        plan and without `extra_projections`; None: there is no such distance.
      name: the algorithm's name, for people to read; `named` sets it.
      options: the options that differ from their defaults, as text; `named` sets it too.
    """

    init: Callable[..., Any]
    plan: Callable[..., Any]
    apply: Callable[..., Any]
    traits: Traits
    init_cache: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None
    replace_value: Callable[..., Any] | None = None
    extra_projections: Callable[[Dims], dict[str, ExtraProjection]] | None = None
    reach: Callable[[bool], Reach] | None = None
    name: str = "attention"
    options: str = ""

    def dims(self, q: Float[Array, "B T N H"], v: Float[Array, "B S N V"]) -> Dims:
        """The sizes of a call of these arrays, which `init` and `extra_projections` take."""
        return Dims(q.shape[2], q.shape[3], v.shape[3], q.shape[1], n_kv_heads=v.shape[2])

    def extra_projections_of(self, dims: Dims) -> dict[str, ExtraProjection]:
        """The further projections that the algorithm reads, by name."""
        return {} if self.extra_projections is None else self.extra_projections(dims)

    def __repr__(self) -> str:
        """The call that makes the op, such as `lsh(n_hashes=2)`."""
        return f"{self.name}({self.options})"

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S G H"] | None,
        v: Float[Array, "B S G V"],
        *,
        causal: bool = False,
        segment_ids: SegmentIds | None = None,
        mask: Bool[Array, "B S"] | Bool[Array, "#B #N #T #S"] | None = None,
        bias: Float[Array, "#B #N #T #S"] | None = None,
        dropout: float = 0.0,
        dropout_rate: float = 0.0,
        rng: PRNGKeyArray | None = None,
        train: bool = True,
        params: Any = (),
        extra_projections: dict[str, Float[Array, "B T _ _"]] | None = None,
        global_tokens: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T N V"]:
        """Plans and applies in one call.

        Outside of `jax.jit` it compiles once for an op, its settings and the shapes.

        Args:
          q: queries; a shared-QK algorithm makes its keys of them.
          k: keys; None for a shared-QK algorithm. Each of G heads serves N / G heads of queries.
          v: values, of as many heads as the keys.
          causal: whether a position sees only itself and what came before it.
          segment_ids: ids of the tokens, or a pair of them for queries and for keys. Booleans say
            that each row is one segment besides its padding.
          mask: True where a key may be seen. `[B, S]` is of keys, for every algorithm: it becomes
            segment ids, by which the hidden keys are padding. `[B, N, T, S]` is of pairs, for an
            algorithm with the trait `bias`; an axis of size 1 is broadcast.
          bias: added to the logits after they are scaled; an axis of size 1 is broadcast.
          dropout: the rate at which attention weights are dropped.
          dropout_rate: refused above 0. flax's modules pass it, and an rng by another name;
            `reformax.flax.attention_fn` takes both.
          rng: the source of hashes and of dropout.
          train: False selects the algorithm's settings for evaluation; `dropout` is as given.
          params: the algorithm's own weights, from its `init`.
          extra_projections: the further projections that the algorithm reads, by name.
          global_tokens: above 0 for global tokens, for an algorithm with the trait `global_tokens`.

        Returns:
          The attended values in the dtype of `v`. A row that sees nothing is zeros.

        Raises:
          ValueError: an argument's shape does not fit, or an rng is needed and missing.
          NotImplementedError: the algorithm cannot do what is asked.
        """
        if dropout_rate > 0.0:
            raise NotImplementedError(
                f"dropout_rate is {dropout_rate}: give dropout={dropout_rate} with an rng; in "
                "modules of flax use reformax.flax.attention_fn"
            )
        call = dict(causal=causal, dropout=dropout)
        checked = dict(
            segment_ids=segment_ids,
            bias=bias,
            rng=rng,
            extra_projections=extra_projections,
            global_tokens=global_tokens,
        )
        check_arguments(self, *(q, k, v), **call, train=train, **checked)
        params = checked_params(self, params, q, v)
        if mask is not None:
            mask = checked_mask(self, mask, q, q if k is None else k)
        segment_ids = int32_ids(segment_ids)
        x = CallArrays(
            params, q, k, v, segment_ids, mask, bias, extra_projections, global_tokens, rng
        )
        return _compiled(self)(x, **call, train=train)


@functools.lru_cache(maxsize=256)
def _compiled(op: AttentionOp) -> Callable[..., Float[Array, "B T N V"]]:
    """The op's call, compiled once for each choice of settings and shapes.

    Inside another compiled function it becomes a part of that.
    """
    settings = ("causal", "dropout", "train")
    return jax.jit(functools.partial(_attend, op), static_argnames=settings)


def _attend(op: AttentionOp, x: CallArrays, **settings: Any) -> Float[Array, "B T N V"]:
    on_devices = placement_of(op, x)
    attend = functools.partial(_plan_and_apply, op, **settings)
    return attend(x) if on_devices is None else on_devices.on_each(attend, x)


def _plan_and_apply(
    op: AttentionOp, x: CallArrays, *, causal: bool, dropout: float, train: bool
) -> Float[Array, "B T N V"]:
    params, q, k, v, segment_ids, mask, bias, extra_projections, global_tokens, rng = x
    segment_ids, bias = with_mask(op, mask, q, q if k is None else k, segment_ids, bias, causal)
    options = dict(segment_ids=segment_ids, causal=causal, rng=rng, train=train) | given(
        global_tokens=global_tokens
    )
    plan = op.plan(params, q, k, **options)
    masks = dict(plan=plan, segment_ids=segment_ids, causal=causal, dropout=dropout, rng=rng)
    return op.apply(
        params, q, k, v, **masks, **given(bias=bias, extra_projections=extra_projections)
    )


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None, so that functions without an option need not take it."""
    return {name: value for name, value in options.items() if value is not None}


def named(factory: Callable[..., AttentionOp]) -> Callable[..., AttentionOp]:
    """Names the ops of `factory` after it, with the options that differ from its defaults.

    It decorates every public function that returns an `AttentionOp`:

    * Options are checked by their annotations. The same options return the same op, whose calls
      are compiled already.
    * `apply` reads zeros at padding and writes zeros there, whatever the arrays hold. An op with
      the trait `keeps_padding_out` does so itself.
    * Without the trait `grouped`, the op's functions read keys and values of all heads.
    * Arguments and results vary along the same axes of a `jax.shard_map`.
    """

    def finish(op: AttentionOp, options: str) -> AttentionOp:
        op = dataclasses.replace(op, name=factory.__name__, options=options)
        if not op.traits.keeps_padding_out:
            op = dataclasses.replace(op, apply=functools.partial(_apply_to_tokens, op.apply))
        op = op if op.traits.grouped or op.traits.shared_qk else _of_all_heads(op)
        return _each(_alike, op, "plan", "apply", "init_cache", "step", "replace_value")

    return described(factory, finish)


def described(factory: Callable[..., T], finish: Callable[[T, str], T]) -> Callable[..., T]:
    """`factory` with its options checked, and the same result for the same options.

    Args:
      factory: a function of options.
      finish: `(result, options) -> result`: takes the options that differ from the defaults as
        text, such as "n_hashes=2".
    """
    signature, made = inspect.signature(factory), checked(factory)

    def make(*args, **options) -> T:
        result = made(*args, **options)
        given = signature.bind(*args, **options).arguments
        changed = [
            f"{name}={_shown(value)}"
            for name, value in given.items()
            if not _equal(value, signature.parameters[name].default)
        ]
        return finish(result, ", ".join(changed))

    # Typed, because True equals 1.
    remembered = functools.lru_cache(maxsize=256, typed=True)(make)

    @functools.wraps(factory)
    def call(*args, **options) -> T:
        plain = all(isinstance(x, _REMEMBERED) for x in (*args, *options.values()))
        return (remembered if plain else make)(*args, **options)

    call.__signature__ = signature  # inspect.getfullargspec reads it
    return call


def _of_all_heads(op: AttentionOp) -> AttentionOp:
    """`op` whose functions may be given keys and values of fewer heads, which they repeat."""

    def whole(function):
        def call(params, q, k, *others, **options):
            k, *v = repeat_heads(q, k, *others[:1])
            return function(params, q, k, *v, *others[1:], **options)

        return call

    return _each(whole, op, "plan", "apply", "init_cache", "step")


def _alike(function):
    """`function`, whose arguments and results vary along the same axes of a `jax.shard_map`."""

    def call(*arrays, **options):
        everything = arrays, options
        arrays, options = devices.varying_as(everything, everything)
        return devices.varying_as(everything, function(*arrays, **options))

    return call


def _each(wrapped: Callable[[Callable], Callable], op: AttentionOp, *names: str) -> AttentionOp:
    """`op` with some of its functions wrapped; it may lack some."""
    functions = {name: getattr(op, name) for name in names}
    return dataclasses.replace(
        op, **{name: f and functools.wraps(f)(wrapped(f)) for name, f in functions.items()}
    )


def _apply_to_tokens(
    apply, params, q, k, v, *, segment_ids, extra_projections=None, **options
) -> Float[Array, "B T N V"]:
    """`AttentionOp.apply` of arrays that are zeros at padding."""
    if extra_projections is not None and segment_ids is not None:
        extra_projections = {
            name: tokens_only(x, segment_pair(segment_ids)[0])
            for name, x in extra_projections.items()
        }
    options |= given(extra_projections=extra_projections)
    attend = functools.partial(apply, params, segment_ids=segment_ids, **options)
    return attend_to_tokens(attend, q, k, v, segment_ids)


def _equal(value: Any, default: Any) -> bool:
    plain = isinstance(value, bool | int | float | str | tuple | list)
    return value is default or (plain and value == default)


def _shown(value: Any) -> str:
    """An option's value as text: arrays by shape, functions by name."""
    if getattr(value, "shape", ()):
        return f"{value.dtype}{list(value.shape)}"
    return getattr(value, "__name__", None) or repr(value)


def no_params(rng: PRNGKeyArray, dims: Dims) -> tuple[()]:
    """`AttentionOp.init` of an algorithm that has no weights of its own."""
    del rng, dims
    return ()


def no_plan(params, q, k, *, segment_ids, causal, rng, train, length=None) -> tuple[()]:
    """`AttentionOp.plan` of an algorithm that sees the same keys whatever it reads."""
    del params, q, k, segment_ids, causal, rng, train, length
    return ()
