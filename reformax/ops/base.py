"""The contract that every attention algorithm keeps.

Letters in the shapes of `reformax.ops` (the order of `jax.nn.dot_product_attention`):

    B batch    T queries    S keys    N heads    H query and key size    V value size
    R hashes   C chunks   L chunk length   M keys in a chunk's window
    G heads of keys and values, a divisor of N (`calls/heads.py`); where it is not named, it is N

Names of arguments and fields, where a docstring does not say more:

    q, k, v                  queries, keys and values
    call, params             the `Call` of the op, and the op's own weights
    ids, segment_ids         segment ids as below; None: each row is one segment
    causal, dropout, logits  as in `Call`
    mask                     which keys a query sees
    seed                     `softmax.dropout.seed_words`; None without dropout
    impl                     the option, or the implementation that `choose_impl` takes for it
    interpret                whether kernels run in Pallas's interpreter, on any device, slowly
    x, sizes, d_out          a function's arrays, its static settings, the gradient of its output

Segment ids are integers, one for each token. A token sees the tokens of its own id. Id 0 is
padding, which sees nothing and is not seen. Queries and keys of one sequence have one array of ids,
`[B, T]`; those of two sequences have a pair, `[B, T]` and `[B, S]`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, final

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax import devices
from reformax.declared import SettingError, Unsupported
from reformax.ops.calls.arguments import check_projections, check_read, check_state
from reformax.ops.calls.call import Call
from reformax.ops.calls.dims import Dims, Projection
from reformax.ops.calls.dispatch import check_impl
from reformax.ops.calls.heads import repeat_heads, repeat_to_values
from reformax.ops.calls.options import options
from reformax.ops.decoding import reading
from reformax.ops.masking.masks import SegmentIds, int32_ids, says_one_segment, tokens_before
from reformax.ops.masking.padding import attend_to_tokens, tokens_only
from reformax.ops.numerics.logits import Logits
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.sharding.array_calls import ArrayCalls
from reformax.ops.sharding.borders import Reach
from reformax.ops.softmax.dropout import seed_words
from reformax.ops.softmax.logit_options import LogitOptions


@options
class AttentionOp(ArrayCalls, LogitOptions):
    """An attention algorithm with its hyperparameters fixed, as pure functions.

    `plan` chooses the keys that each query may attend to, and `apply` attends to them; `__call__`
    (`sharding.array_calls`) does both. A reversible stack computes `apply` again in the backward
    pass, with the same plan. It stores the plans, which are small, and no activations.

    An algorithm is a subclass with the decorator `options`, whose fields are its options. It
    defines `_apply`, and where it has them `_plan`, `_init`, `extra_projections`, `reach`, and for
    decoding `_init_cache`, `_step`, `_replace_value` and, where several steps at once cost less,
    `_read_on`. A recurrence also defines `first_state` and `_apply_from`. The methods without an
    underscore call these, for which they

    * let arguments and results vary along the same axes of a `jax.shard_map`,
    * repeat keys and values for all heads of queries, unless `_grouped`,
    * draw the seed of dropout (`softmax.dropout.seed_words`) of the arrays' part of the call,
    * write zeros at the padding of `apply`'s arguments and result, unless `_hides_padding`.

    Attributes:
      shared_qk: one projection serves as query and, length-normalised to sqrt(H), as key. Layers
        then make no keys.
      causality: the values of `causal` that a call may have: "either", "only" True (it cannot show
        the future) or "never" True (it cannot hide it). Calls are checked by it.
      cross: queries and keys may come from different sequences, as `CrossAttention` needs.
      bias: it can add a given bias to the logits, as layers with a `position_bias` need.
      dropout: it makes attention weights, which can be dropped.
      packed: it tells segments apart, as packed rows need; False: a row has one, besides padding.
      global_tokens: its plan reads `Tokens.global_tokens`: which tokens are global.
      plan_needs: what `plan` reads: "nothing" (the same keys are seen whatever they hold), "inputs"
        (queries and keys), or "rng" (random numbers too).
      reuses: its plan is that of an op before it in the cycle of layers, which `may_reuse` names.
        In decoding `step(chosen=)` takes `newest_choice` of the other's cache.
      chooses_keys: it is one softmax over keys that its plan chooses, as `softmax.kept_mass` needs.
      local: how far a position sees does not grow with the length. Models with
        `pos_type="rotary_local"` rotate its keys, and reversible stacks keep its positions.
      never_sees_itself: a position never sees itself, as layers with `next_value` need.
      rotates: it rotates queries and keys by their positions. Layers with `use_rotary` refuse it.
      gated: it gates its own output. Models with `attention_gate` add no second gate.
      shards: what devices may have a part of: () nothing, "heads", "key heads" (heads in whole
        groups that share keys), "sequence", or "queries", whose keys the op gathers
        (`sharding.queries`). Of the last two a `Shard` names the axis.
      decoding: "no", "rows", or "beams" where `step` reads a beam's past in other beams' caches.
      divides_cache: `step` and `read_on` take a cache whose positions a mesh axis divides
        (`decoding.reading`).
    """

    shared_qk: ClassVar[bool] = False
    causality: ClassVar[Literal["either", "only", "never"]] = "either"
    cross: ClassVar[bool] = False
    bias: ClassVar[bool] = False
    dropout: ClassVar[bool] = True
    packed: ClassVar[bool] = True
    global_tokens: ClassVar[bool] = False
    chooses_keys: ClassVar[bool] = False
    local: ClassVar[bool] = False
    shards: ClassVar[tuple[str, ...]] = ()
    divides_cache: ClassVar[bool] = False

    # Options of some algorithms.
    reuses = False
    rotates = False
    gated = False
    attend_self_if_alone = True
    scale = None  # the factor of logits

    # What the methods without an underscore leave to the algorithm.
    _grouped = False  # to read G heads of keys and values; False: they are repeated to N
    _repeats_qk = False  # to repeat queries and keys for all heads of values
    # To write zeros at padding, whatever its arguments hold there; "finite": in calls with
    # `lengths` alone, whose padding is finite.
    _hides_padding: ClassVar[bool | Literal["finite"]] = False
    _takes_lengths = False  # to read `Call.lengths`; False: None, and `segment_ids` say the same
    _impls: ClassVar[tuple[str, ...]] = ()  # values of the option `impl` besides "auto" and "xla"

    @property
    def plan_needs(self) -> Literal["nothing", "inputs", "rng"]:
        return "nothing" if type(self)._plan is AttentionOp._plan else "inputs"

    @property
    def never_sees_itself(self) -> bool:
        return self.shared_qk and not self.attend_self_if_alone

    @property
    def more_value_heads(self) -> bool:
        """Whether values may have more heads than queries and keys.

        Where keys are made of the queries, each has its own values.
        """
        return not self.shared_qk

    @property
    def reads_projections(self) -> bool:
        """Whether it has `extra_projections`, which a layer makes and two sequences do not have."""
        return bool(self.extra_projections(Dims(1, 1, 1, 1)))

    @property
    def carries_state(self) -> bool:
        """Whether it has `apply_from`: attention to a part of a sequence from a state of constant
        size.
        """
        return type(self)._apply_from is not AttentionOp._apply_from

    @property
    def divides_heads(self) -> bool:
        """Whether devices may each have some of the heads."""
        return "heads" in self.shards or "key heads" in self.shards

    @property
    def endless_from(self) -> int | None:
        """The capacity from which on decoding goes on without end; None: its cache has an end.

        A larger capacity makes no larger cache.
        """
        return 1 if self.carries_state else None

    @property
    def reads_ahead(self) -> bool:
        """Whether long prompts are read in pieces unasked, by a `read_on` of several at once."""
        return self.carries_state or type(self)._read_on is not AttentionOp._read_on

    @property
    def decoding(self) -> Literal["no", "rows", "beams"]:
        return "no" if type(self)._step is AttentionOp._step else "rows"

    # The options.

    def __post_init__(self):
        super().__post_init__()
        if self._impls:
            check_impl(self.impl, *self._impls)
        self._check()

    def _check(self) -> None:
        """Raises `SettingError` for options out of range, or that exclude each other."""

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return type(self).__name__

    # What layers call, and `__call__`.

    def init(self, rng: PRNGKeyArray, dims: Dims) -> Any:
        """The algorithm's own weights: a dict of arrays, or `()`.

        A stack maps it over the rngs of its layers by `jax.vmap`.
        """
        params = self._init(rng, dims)
        if not self.learn_scale_by_length:
            return params
        return self._init_length_factor(dims) | dict(params)

    def _init(self, rng: PRNGKeyArray, dims: Dims) -> Any:
        """`init` without the weight of `learn_scale_by_length`."""
        return ()

    def dims(self, q: Float[Array, "B T N H"], v: Float[Array, "B S N V"]) -> Dims:
        """The sizes of a call of these arrays, which `init` and `extra_projections` take."""
        n_qk, n_v = q.shape[2], v.shape[2]
        dims = Dims(max(n_qk, n_v), q.shape[3], v.shape[3], q.shape[1], n_kv_heads=n_v)
        return dims if n_v <= n_qk else dims._replace(n_qk_heads=n_qk)

    def extra_projections(self, dims: Dims) -> dict[str, Projection]:
        """Further projections of the layer's input that the algorithm reads, such as gates.

        A layer makes them. `apply`, `init_cache` and `step` then take `extra_projections`, a dict,
        `{name: [B, T, n_heads, size]}`.
        """
        return {}

    @final
    def projections(self, dims: Dims) -> dict[str, Projection]:
        """All projections that the algorithm reads: "q", "k" unless `shared_qk`, "v", and
        `extra_projections`.
        """
        n_qk, n_v = dims.qk_heads, dims.key_heads
        keys = {} if self.shared_qk else {"k": Projection(min(n_qk, n_v), dims.d_qk, "key")}
        return {
            "q": Projection(n_qk, dims.d_qk, "query"),
            **keys,
            "v": Projection(n_v, dims.d_v),
            **self.extra_projections(dims),
        }

    def may_reuse(self, other: AttentionOp) -> bool:
        """Whether it can attend by the plan of another op, where it `reuses` one."""
        return False

    def newest_choice(self, cache: Any) -> Any:
        """The keys that the newest query of each row chose, from a cache after `step`.

        Of an op whose choice others may reuse; () of any other.
        """
        return ()

    def cache_axes(self, cache: Any) -> Any:
        """The axis of positions of each array of a cache, where the op `divides_cache`.

        A tree of which `cache` may have more: a number is for all arrays of its part, and None says
        that a mesh axis does not divide these.
        """
        return 2

    def reach(self, causal: bool) -> Reach | None:
        """How far a position sees, whatever the length; None: there is no such distance.

        A device that has a shard of a sequence then reads its neighbours' borders alone. For an
        algorithm without a plan and without `extra_projections`.
        """
        return None

    @final
    def keys_of(
        self, q: Float[Array, "B T N H"], k: Float[Array, "B S G H"] | None
    ) -> Float[Array, "B S _ H"]:
        """The keys: with `shared_qk` the queries, length-normalised to sqrt(H)."""
        return length_normalize(q) if self.shared_qk else k

    @final
    def plan(
        self,
        params: Any,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S G H"] | None,
        v: Float[Array, "B S G V"] | None = None,
        *,
        segment_ids: SegmentIds | None,
        causal: bool,
        **call: Any,
    ) -> Any:
        """The keys that each query may see: a pytree of integers without a gradient.

        Args:
          params: the algorithm's own weights, from `init`.
          q: queries.
          k: keys; None if `shared_qk`.
          v: values, of which only the number of heads is read; None: no more than of queries.
          segment_ids: `[B, T]`, a pair of two sequences, or None: a row is one segment.
          causal: whether a position sees only itself and what came before it.
          **call: further fields of `Call`: `rng`, the source of hashes; `train`, False selects the
            settings for evaluation; `length`, `shard`, and `global_tokens` where the algorithm
            reads them.
        """

        def plan(call, params, q, k, v) -> Any:
            del v
            return self._plan(call, params, q, k)

        call = self._call(segment_ids=segment_ids, causal=causal, **call)
        return self._of_all_heads(plan, call, params, q, k, v)

    @final
    def apply(
        self,
        params: Any,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S G H"] | None,
        v: Float[Array, "B S G V"],
        *,
        plan: Any,
        segment_ids: SegmentIds | None,
        causal: bool,
        **call: Any,
    ) -> Float[Array, "B T N V"]:
        """Attention by a plan.

        Args:
          params: the algorithm's own weights, from `init`.
          q, k, v: queries, keys, which are None if `shared_qk`, and values.
          plan: from `plan`.
          segment_ids, causal: as in `plan`.
          **call: further fields of `Call`: `dropout` and its `rng`, `shard`, `lengths` with finite
            padding; `bias` and `extra_projections` where the algorithm reads them.
        """
        call = self._call(segment_ids=segment_ids, causal=causal, **call)
        return self.attend(call, params, q, k, v, plan)

    @final
    def attend(self, call: Call, params, q, k, v, plan=()) -> Float[Array, "B T N V"]:
        """`apply` of a `Call`, for the `_apply` of an algorithm that attends by another."""
        return self._run(self._attend, call, params, q, k, v, plan)

    def first_state(self, batch: int, dims: Dims, dtype: Any = jnp.float32) -> Any:
        """The state before the first position of `batch` rows, where the algorithm carries one.

        `dtype` is that of the queries, keys and values.
        """
        raise Unsupported(
            f"op is {self.name}: it carries no state, use an op whose carries_state is True, such "
            "as kda.kda()"
        )

    @final
    def apply_from(
        self,
        params: Any,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T G H"],
        v: Float[Array, "B T G V"],
        state: Any,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        shard: Any = None,
        extra_projections: dict[str, Float[Array, "B T _ _"]] | None = None,
    ) -> tuple[Float[Array, "B T N V"], Any]:
        """Causal attention to a part of a sequence, and the state after it. Both have gradients.

        Args:
          params, q, k, v: as in `apply`.
          state: from `first_state`, the part before, `init_cache` or `step`. It goes on in the
            segment of a row's first token. A new segment begins without one.
          segment_ids: of the call. Segments are contiguous, which is checked where ids are known.
          shard: as in `apply`.
          extra_projections: where the algorithm reads some.

        Returns:
          The attended values, and the state of the last token's segment, which `step` takes too.

        Raises:
          ValueError: the state is of other sizes, or a segment is not contiguous.
          Unsupported: the algorithm carries no state.
          NotImplementedError: its kernel cannot compute the call.
        """
        check_state(self, "state", state, segment_ids, q, v)
        given = dict(segment_ids=segment_ids, shard=shard, extra_projections=extra_projections)
        call = self._call(causal=True, **given)
        return self._run(self._attend_from, call, params, q, k, v, state)

    @final
    def check_decodes(self) -> None:
        """Raises `Unsupported` if it cannot decode."""
        if self.decoding == "no":
            raise Unsupported(
                f"op is {self}: it has no step to decode with; use one that has, such as "
                "dense.dense()"
            )

    @final
    def init_cache(
        self,
        params: Any,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T G H"] | None,
        v: Float[Array, "B T G V"],
        *,
        plan: Any,
        lengths: Int[Array, " B"],
        capacity: int,
        **call: Any,
    ) -> Any:
        """The cache of decoding after the first positions of each row.

        Args:
          params, q, k, v: as in `apply`, padded on the right.
          plan: that of a causal call with `length=capacity`.
          lengths: the number of each row's positions before its padding.
          capacity: the number of positions for which the cache has room.
          **call: the plan's `rng`, and `extra_projections` where the algorithm reads some.
        """
        self.check_decodes()
        call = self._call(causal=True, lengths=lengths, length=capacity, **call)
        return self._run(self._init_cache, call, params, q, k, v, plan)

    @final
    def step(
        self,
        params: Any,
        q: Float[Array, "B 1 N H"],
        k: Float[Array, "B 1 G H"] | None,
        v: Float[Array, "B 1 G V"],
        cache: Any,
        *,
        position: Int[Array, " B"],
        **call: Any,
    ) -> tuple[Float[Array, "B 1 N V"], Any]:
        """Attention of one more position of each row, and the cache with it.

        The algorithm's `impl` decides whether kernels hash and compute a softmax of one query.

        Args:
          params, q, k, v: as in `apply`, of one position.
          cache: from `init_cache` or the step before.
          position: its index in each row, from 0.
          **call: where the algorithm reads them `bias`, `(positions of keys [B, S]) -> [B, N, S]`,
            `extra_projections`, `origins` in beam search (`decoding.ring.RingDecoding`), and
            `chosen` from `newest_choice` where it `reuses` a choice.
        """
        call = self._call(causal=True, position=position, **call)
        self._check_chosen(call, "newest_choice of the cache")
        return self._run(self._step, call, params, q, k, v, cache)

    @final
    def read_on(
        self,
        params: Any,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T G H"] | None,
        v: Float[Array, "B T G V"],
        cache: Any,
        *,
        position: Int[Array, " B"],
        lengths: Int[Array, " B"],
        **call: Any,
    ) -> tuple[Float[Array, "B T N V"], Any, Any]:
        """Chunked prefill: attention of several more positions of each row, as by their steps.

        Args:
          params, q, k, v: as in `apply`, padded on the right.
          cache: from `init_cache`, `step` or the call before.
          position: the index of the first of them in each row.
          lengths: the number of them before a row's padding; 0 for none.
          **call: as in `step`, besides `origins`. `bias` is `(positions of queries [B, T], of keys
            [B, S]) -> [B, N, T, S]`, and `chosen` is `[B, T, K]`.

        Returns:
          The attended values, arbitrary at padding, the cache, and what each query chose, `[B, T,
          K]`, where others reuse it, otherwise ().
        """
        call = self._call(causal=True, position=position, lengths=lengths, **call)
        self._check_chosen(call, "the third result of read_on")
        return self._run(self._read_on, call, params, q, k, v, cache)

    def _check_chosen(self, call: Call, found: str) -> None:
        """Raises `SettingError` for a call without the choice that the op is to reuse."""
        if self.reuses and call.chosen is None:
            raise SettingError(
                f"chosen is None: {self.name} with reuse=True makes no choice, give {found} of the "
                "op whose choice it reuses"
            )

    @final
    def replace_value(
        self, cache, v: Float[Array, "B 1 N V"], position: Int[Array, " B"], axis: str | None = None
    ) -> Any:
        """The cache with another value of a position that it holds, or of -1: then it may hold any.

        For an algorithm with `never_sees_itself`, by which layers with `next_value` decode. `axis`
        is the mesh's that divides the cache.
        """
        call, options = (cache, v, position), {} if axis is None else {"axis": axis}
        new = self._replace_value(*devices.varying_as(call, call), **options)
        return devices.varying_as(call, new)

    def _call(self, **arguments: Any) -> Call:
        """A call with the op's logits, whose ids, lengths and positions are arrays of int32.

        Boolean segment ids say that rows are one segment.
        """
        if says_one_segment(ids := arguments.get("segment_ids")):
            arguments |= dict(one_segment=True)
        arguments |= dict(segment_ids=int32_ids(ids))
        for name in ("lengths", "position"):
            if arguments.get(name) is not None:
                arguments[name] = jnp.asarray(arguments[name], jnp.int32)
        # Numbers of NumPy would promote what they are multiplied with.
        numbers = (None if x is None else float(x) for x in (self.scale, self.soft_cap))
        return Call(logits=Logits(*numbers), **arguments)

    def _run(self, function, call: Call, params, q, k, v, *others) -> Any:
        """`_of_all_heads` of a function that reads `extra_projections`, which `plan` does not.

        Raises:
          ValueError: the call lacks some that the algorithm reads.
          Unsupported: the call has what the algorithm does not read.
        """
        check_read(self, call)
        check_projections(self, call.extra_projections)
        return self._of_all_heads(function, call, params, q, k, v, *others)

    def _of_all_heads(self, function, call: Call, params, q, k, v, *others) -> Any:
        """`function` of arrays that vary along the same axes, with keys and values of all heads.

        Queries are scaled by length.

        Raises:
          Unsupported: the call has what the algorithm does not read.
        """
        q = self._scaled_by_length(call, params, q, k)
        check_read(self, call)
        arrays = call, params, q, k, v, *others
        call, params, q, k, v, *others = devices.varying_as(arrays, arrays)
        if v is not None and self.more_value_heads and not self._repeats_qk:
            q, k = repeat_to_values(q, v), repeat_to_values(k, v)
        if not self._grouped:
            k, v = repeat_heads(q, k, v)
        return devices.varying_as(arrays, function(call, params, q, k, v, *others))

    def _attend(self, call: Call, params, q, k, v, plan) -> Float[Array, "B T N V"]:
        """`_apply` with the seed of dropout, of arrays that are zeros at padding."""
        if call.seed is None and call.dropout > 0.0:
            call = call.but(seed=seed_words(call.rng, len(q), call.shard))
        hides = self._hides_padding
        if hides == "finite":
            hides = call.lengths is not None
        # A part of a sequence may begin with padding.
        is_part = call.shard is not None and not isinstance(call.shard.position, int)
        if is_part or not self._takes_lengths:
            call = call.but(lengths=None)
        if hides:
            return self._apply(call, params, q, k, v, plan)
        call = call.with_token_projections()

        def apply(q, k, v) -> Float[Array, "B T N V"]:
            return self._apply(call, params, q, k, v, plan)

        return attend_to_tokens(apply, q, k, v, call.segment_ids)

    def _attend_from(self, call: Call, params, q, k, v, state):
        """`_apply_from` of arrays that are zeros at padding."""
        ids = call.segment_ids
        if ids is None:
            return self._apply_from(call, params, q, k, v, state)
        call = call.with_token_projections()
        q, k, v = (tokens_only(x, ids) for x in (q, k, v))
        out, state = self._apply_from(call, params, q, k, v, state)
        return tokens_only(out, ids), state

    # What an algorithm defines.

    def _plan(self, call: Call, params, q, k) -> Any:
        return ()

    def _apply(self, call: Call, params, q, k, v, plan) -> Float[Array, "B T N V"]:
        raise NotImplementedError(f"{self.name} has no _apply")

    def _apply_from(self, call: Call, params, q, k, v, state) -> tuple[Array, Any]:
        raise NotImplementedError(f"{self.name} has no _apply_from")

    def _init_cache(self, call: Call, params, q, k, v, plan) -> Any:
        raise NotImplementedError(f"{self.name} has no _init_cache")

    def _step(self, call: Call, params, q, k, v, cache) -> tuple[Float[Array, "B 1 N V"], Any]:
        raise NotImplementedError(f"{self.name} has no _step")

    def _read_on(self, call: Call, params, q, k, v, cache) -> tuple[Array, Any, Any]:
        if self.carries_state:
            ids = tokens_before(call.lengths, v.shape[1]).astype(jnp.int32)
            of_part = call.but(segment_ids=ids, position=None, lengths=None)
            return *self._attend_from(of_part, params, q, k, v, cache), ()

        def step(call, q, k, v, cache):
            return self._step(call, params, q, k, v, cache)

        return reading.by_steps(step, self.newest_choice, call, q, k, v, cache)

    def _replace_value(self, cache, v, position):
        raise NotImplementedError(f"{self.name} cannot replace a value")
