"""Trax's SelfAttention and LSHSelfAttention over reformax's ops: same arguments, same weights.

For models that Trax assembles, as `trax.models.ReformerLM(attention_type=LSHSelfAttention)`, and
for weights that were trained there. The layers compute what Trax's of the same name do (its file
`layers/research/efficient_attention.py`), for any length, with these differences:

  * `masked=True`: nothing attends to padding, and rows of padding are zeros. In Trax padding at
    positions 0 and 1 is seen, and rows of padding hold some average of the tokens' values.
  * Attention dropout drops each weight independently; in Trax chunks, heads and examples share a
  mask.
  * LSHSelfAttention has working biases, and rejects `share_qk=False`.
  * There is no `mode="predict"`: a model of that mode refuses these layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.declared import Rate, check
from reformax.layers.attention import Attention
from reformax.layers.base import Layer
from reformax.layers.dropout import dropout, rate_in
from reformax.layers.rngs import split
from reformax.layers.trax_predict import USE_EVAL, refuse_one_position
from reformax.ops import dense, local, lsh, shared_qk
from reformax.ops.base import AttentionOp
from reformax.ops.calls.heads import QKV
from reformax.ops.hashing import angular as hashing
from reformax.ops.hashing import sorting
from reformax.ops.hashing.circle import SELF_SCORE, in_a_circle
from reformax.ops.masking.visibility import is_token
from reformax.ops.numerics.arrays import check_floats
from reformax.ops.softmax.orders import ChunkSizes


@dataclasses.dataclass(eq=False, repr=False)
class TraxAttention(Layer):
    """Trax's arguments, weights and protocols, and the loop over blocks of examples and heads.

    `[B, T, D] -> [B, T, D]`; with `masked` a second input `[B, T]` that is True for tokens.

    Weights: `(w_q, w_k, w_v, w_o)`, with `bias` then `(b_q, b_k, b_v)`, shapes as in `Attention`;
    without `w_k` and `b_k` where queries and keys are shared. State: a tuple of arrays with one row
    for each pair of an example and a head, heads running faster.

    Args:
      n_heads: number of heads.
      d_qk: size of a head's queries and keys.
      d_v: size of a head's values.
      share_qk: whether keys are the length-normalised queries.
      causal: whether the future is hidden.
      masked: whether a mask comes as a second input.
      chunk_len: positions in a chunk; None attends to the whole sequence.
      n_chunks_before: how many earlier chunks a position sees besides the chunk it is in.
      n_chunks_after: how many later chunks it sees.
      bias: whether queries, keys and values have biases.
      mode: "train" or "eval", which has no dropout.
      predict_mem_len: unused; an argument of Trax's mode "predict".
      predict_drop_len: unused, like `predict_mem_len`.
      attention_dropout: the rate on attention weights.
      output_dropout: the rate on the features of the output, the same ones at all positions.
      n_parallel_heads: how many pairs of an example and a head to compute at a time: fewer need
        less memory; None is all of them. A multiple or a divisor of `n_heads`.
      use_python_loop: False; it chooses among Trax's implementations.
      use_reference_code: False, like `use_python_loop`.

    Raises:
      NotImplementedError: an option of Trax that this layer does not have.
      ValueError: a value out of range.
    """

    n_heads: int = 2
    d_qk: int = 64
    d_v: int = 64
    _: dataclasses.KW_ONLY
    share_qk: bool | str = False
    causal: bool = False
    masked: bool = False
    chunk_len: int | None = None
    n_chunks_before: int = 0
    n_chunks_after: int = 0
    bias: bool = False
    mode: str = "train"
    predict_mem_len: int | None = None
    predict_drop_len: int | None = None
    attention_dropout: float = 0.0
    output_dropout: float = 0.0
    n_parallel_heads: int | None = None
    use_python_loop: bool = False
    use_reference_code: bool = False

    def __post_init__(self):
        super().__init__(n_in=2 if self.masked else 1)
        if self.mode == "predict":
            raise NotImplementedError(f"mode='predict': {self.name} keeps no past; {USE_EVAL}")
        for name in ("use_python_loop", "use_reference_code"):
            if value := getattr(self, name):
                raise NotImplementedError(
                    f"{name}={value!r}: {self.name} has one implementation; leave it False"
                )
        n_parallel, n_heads = self.n_parallel_heads, self.n_heads
        if n_parallel and n_parallel % n_heads and n_heads % n_parallel:
            raise ValueError(
                f"n_parallel_heads is {n_parallel}: expected a multiple or a divisor of "
                f"n_heads={n_heads}, or None"
            )
        check("output_dropout", self.output_dropout, Rate)
        op = self._op()
        self._attention = Attention(
            op,
            n_heads,
            self.d_qk,
            self.d_v,
            causal=self.causal,
            masked=self.masked,
            bias=self.bias,
            attention_dropout=self.attention_dropout,
            mode=self.mode,
        )
        letters = "qv" if op.shared_qk else "qkv"
        biases = tuple(f"b_{x}" for x in letters) if self.bias else ()
        self._names = (*(f"w_{x}" for x in letters), "w_o", *biases)
        self._random_plan = op.plan_needs == "rng"

    @property
    def drops(self) -> bool:
        return rate_in(self.mode, max(self.attention_dropout, self.output_dropout)) > 0.0

    def _op(self) -> AttentionOp:
        """The algorithm that the arguments ask for."""
        raise NotImplementedError

    def init_params(self, rng, shape, mask_shape=None) -> tuple[jax.Array, ...]:
        params = self._attention.init_params(rng, shape)
        return tuple(params[name] for name in self._names)

    def init_weights_and_state(self, input_signature) -> None:
        super().init_weights_and_state(input_signature)
        batch, length = (input_signature[0] if self.masked else input_signature).shape[:2]
        self.state = self._init_state(self.rng, batch, length)

    def apply(self, params, *inputs, rng=None):
        """Attention as a pure function; what the state would hold is drawn from `rng`."""
        check_floats("x", inputs[0], "batch", "length", "features")
        batch, length, _ = inputs[0].shape
        inputs = inputs if self.masked else inputs[0]
        rates = self.attention_dropout, self.output_dropout
        if rng is None and (self._random_plan or (self.mode == "train" and any(rates))):
            raise ValueError(f"rng is None: {self} needs one, such as jax.random.PRNGKey(0)")
        return self._attend(inputs, params, self._init_state(rng, batch, length), rng, True)[0]

    def forward(self, inputs):
        refuse_one_position(self, self._inputs_of(inputs)[0])
        output, self.state = self._attend(inputs, self.weights, self.state, self.rng, True)
        return output

    def forward_and_or_backward(
        self,
        inputs,
        weights,
        state,
        rng,
        output_grad=None,
        compute_output: bool = True,
        update_state: bool = True,
    ) -> tuple[Any, Any, Any, Any]:
        """Trax's protocol for reversible layers: attention and its gradient, in one pass.

        Args:
          inputs, weights, rng: as in the forward pass.
          state: the one that the forward pass left.
          output_grad: the gradient of the loss with respect to the output; None asks for none.
          compute_output: whether to return the output.
          update_state: False attends as the forward pass that left this state did.

        Returns:
          `(output, new state, gradient of inputs, gradient of weights)`, None for what is not
          asked for.
        """

        def attend(inputs, weights):
            return self._attend(inputs, weights, state, rng, update_state)

        inputs_grad = weights_grad = None
        if output_grad is None:
            output, state = attend(inputs, weights)
        else:
            output, vjp, state = jax.vjp(attend, inputs, weights, has_aux=True)
            inputs_grad, weights_grad = vjp(output_grad)
        return (
            output if compute_output else None,
            state if update_state else None,
            inputs_grad,
            weights_grad,
        )

    def _attend(self, inputs, weights, state, rng, update_state):
        """`(output, new state)`, `n_parallel_heads` pairs of an example and a head at a time."""
        x, mask = inputs if self.masked else (inputs, None)
        segment_ids = None if mask is None else (mask != 0).astype(jnp.int32)
        attend_rng, output_rng = split(rng, 2)
        n_examples, n_heads = x.shape[0], self.n_heads
        n_parallel = min(self.n_parallel_heads or n_examples * n_heads, n_examples * n_heads)
        examples, heads = max(1, n_parallel // n_heads), min(n_parallel, n_heads)
        if n_examples % examples:
            raise ValueError(
                f"n_parallel_heads is {self.n_parallel_heads}, {examples} examples at a time: "
                f"expected a divisor of the batch, {n_examples}"
            )
        if any(s.shape[0] != n_examples * n_heads for s in state):
            raise ValueError(
                f"the input has batch {n_examples}, but the state is for "
                f"{state[0].shape[0] // n_heads}: initialise the layer for this batch"
            )
        state = _reshape(state, 1, n_examples, n_heads)
        attend = functools.partial(self._attend_block, update_state)
        if (examples, heads) != (n_examples, n_heads):
            attend = functools.partial(_by_blocks, attend, examples, heads)
        out, state = attend(x, segment_ids, weights, state, attend_rng)
        if self.mode == "train":
            out = dropout(out, self.output_dropout, output_rng, shared_axes=(0, 1))
        return out, _reshape(state, 2, n_examples * n_heads)

    def _attend_block(self, update_state: bool, x, segment_ids, weights, state, rng):
        """`(output, new state)` of some examples and some heads."""
        params = dict(zip(self._names, weights, strict=True), op=())
        attention = dataclasses.replace(self._attention, n_heads=len(params["w_o"]))
        qkv, _ = attention.project(params, x)
        plan, state = self._plan(qkv, segment_ids, state, update_state)
        out = attention.attend(params, qkv, plan, segment_ids, rng)
        return attention.combine(params, out, rng=rng), state

    def _init_state(self, rng, batch: int, length: int) -> tuple[jax.Array, ...]:
        """The state of a fresh layer."""
        raise NotImplementedError

    def _plan(self, qkv: QKV, segment_ids, state, update: bool):
        """The op's plan for a block, and the block's new state, `[examples, heads, ...]`."""
        raise NotImplementedError


def _by_blocks(attend, examples: int, heads: int, x, segment_ids, weights, state, rng):
    """`attend(x, segment_ids, weights, state, rng)`, some examples and some heads at a time."""
    n_examples, n_heads = x.shape[0], weights[0].shape[0]
    n_blocks = n_examples // examples, n_heads // heads
    x, segment_ids = _reshape((x, segment_ids), 1, n_blocks[0], examples)
    weights = _reshape(weights, 1, n_blocks[1], heads)
    state = _reshape(state, 2, n_blocks[0], examples, n_blocks[1], heads)
    state = jax.tree.map(lambda s: jnp.swapaxes(s, 1, 2), state)
    rngs = None if rng is None else jax.random.split(rng, n_blocks)

    def some_examples(args):
        x, segment_ids, state, rngs = args

        @jax.checkpoint  # else the gradient would hold every block's queries and values
        def add_heads(total, args):
            out, state = attend(x, segment_ids, *args)
            return total + out, state

        return jax.lax.scan(add_heads, jnp.zeros_like(x), (weights, state, rngs))

    out, state = jax.lax.map(some_examples, (x, segment_ids, state, rngs))
    state = jax.tree.map(lambda s: jnp.swapaxes(s, 1, 2), state)
    return out.reshape(n_examples, *out.shape[2:]), _reshape(state, 4, n_examples, n_heads)


def _reshape(tree, n_axes: int, *sizes: int):
    """Each array of a tree with its first `n_axes` axes split or joined to `sizes`."""
    return jax.tree.map(lambda a: a.reshape(*sizes, *a.shape[n_axes:]), tree)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class SelfAttention(TraxAttention):
    """`trax.layers.SelfAttention`: dense, or within chunks if `chunk_len` is set.

    Arguments are those of `TraxAttention`.
    """

    share_qk: bool = False

    def _op(self):
        if self.chunk_len is not None:
            return local.local(
                chunk_len=self.chunk_len,
                n_chunks_before=self.n_chunks_before,
                n_chunks_after=self.n_chunks_after,
                shared_qk=self.share_qk,
                # A circle of chunks that causality hides need not be computed.
                wrap=not self.causal or self.n_chunks_before > 1 or self.n_chunks_after > 0,
                self_score=SELF_SCORE,
            )
        if self.n_chunks_before or self.n_chunks_after:
            raise ValueError(
                f"chunk_len is None, but n_chunks_before is {self.n_chunks_before} and "
                f"n_chunks_after is {self.n_chunks_after}: set chunk_len"
            )
        return shared_qk.shared_qk() if self.share_qk else dense.dense()

    def _init_state(self, rng, batch, length):
        return ()

    def _plan(self, qkv, segment_ids, state, update):
        return (), state


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class LSHSelfAttention(TraxAttention):
    """`trax.layers.LSHSelfAttention`: hashes, the weights of hashes and state are Trax's.

    `[B, T, D] -> [B, T, D]`; with `masked` a second input `[B, T]` that is True for tokens. A key
    counts once for each hash that shows it. The state is `(buckets [B * n_heads, n_hashes * T],
    rng [B * n_heads, 2])`. The forward pass leaves the buckets there, for the backward pass of
    Trax's reversible layers to attend to the same positions. Further arguments are those of
    `TraxAttention`.

    Args:
      share_qk: "unused" or True: hashing needs one vector for query and key.
      chunk_len: positions in a chunk of the sorted sequence. `n_chunks_before` and
        `n_chunks_after` count such chunks.
      n_hashes: number of hashes.
      n_buckets: even; or a list of even factors; None is about two for each chunk.
      max_length_for_buckets: room in the state for sequences longer than the one that the layer
        was initialised with; None is that one's length.
    """

    share_qk: bool | str = "unused"
    chunk_len: int = 128
    n_chunks_before: int = 1
    n_hashes: int = 1
    n_buckets: int | list[int] | tuple[int, ...] | None = None
    predict_mem_len: int | None = 2048
    predict_drop_len: int | None = 256
    max_length_for_buckets: int | None = None
    n_parallel_heads: int | None = 1

    def _op(self):
        if self.share_qk not in ("unused", True):
            raise NotImplementedError(
                f"share_qk={self.share_qk!r}: LSH attention hashes one vector for query and key; "
                "leave it out"
            )
        return lsh.lsh(
            chunk_len=self.chunk_len,
            n_hashes=self.n_hashes,
            n_buckets="auto" if self.n_buckets is None else self.n_buckets,
            n_chunks_before=self.n_chunks_before,
            n_chunks_after=self.n_chunks_after,
            count_once=False,
            wrap=True,
            self_score=SELF_SCORE,
        )

    def _init_state(self, rng, batch, length):
        n_pairs = batch * self.n_heads
        n_buckets = self.n_hashes * (self.max_length_for_buckets or length)
        return jnp.zeros((n_pairs, n_buckets), jnp.int32), jax.random.split(rng, n_pairs)

    def _plan(self, qkv, segment_ids, state, update):
        length = qkv.q.shape[1]
        if self.n_buckets is None:
            factors = hashing.auto_buckets(length, self.chunk_len)
        else:
            factors = (self.n_buckets,) if isinstance(self.n_buckets, int) else self.n_buckets
        n_buckets = math.prod(factors) + self.masked  # padding has another one
        # The state numbers the buckets of all hashes one after the other.
        first = n_buckets * jnp.arange(self.n_hashes)[:, None]
        stored, rngs = state
        if self.n_hashes * length > stored.shape[-1]:
            raise ValueError(
                f"the input has length {length}, but the state has room for "
                f"{stored.shape[-1] // self.n_hashes}: initialise the layer for this length, or "
                "set max_length_for_buckets"
            )
        if update:
            rngs, subrngs = jnp.moveaxis(jax.vmap(jax.vmap(jax.random.split))(rngs), 2, 0)
            buckets = self._hash(jax.lax.stop_gradient(qkv.q), factors, subrngs)
            if segment_ids is not None:
                buckets = jnp.where(is_token(segment_ids)[:, None, None], buckets, n_buckets - 1)
            new = (buckets + first).reshape(*buckets.shape[:2], -1)
            stored = jnp.zeros_like(stored).at[..., : new.shape[-1]].set(new)
        else:
            buckets = stored[..., : self.n_hashes * length]
            buckets = buckets.reshape(*stored.shape[:2], self.n_hashes, length) - first
        plan = sorting.sort_by_bucket(
            buckets, n_buckets, segment_ids, -length % min(self.chunk_len, length)
        )
        if length > self.chunk_len:
            sizes = ChunkSizes(self.chunk_len, self.n_chunks_before, self.n_chunks_after)
            plan = in_a_circle(plan, sizes)
        return plan.with_slots(), (stored, rngs)

    def _hash(self, vectors: Float[Array, "E T G H"], factors, rngs) -> Int[Array, "E G R T"]:
        """Buckets of E examples and G heads by R hashes, each head with other rotations."""

        def hash_head(vectors, rng):
            vectors = vectors[None, :, None]
            rotations = hashing.draw_rotations(vectors, factors, self.n_hashes, rng)
            return hashing.hash_by(rotations, vectors, factors, "xla")[0, 0]

        return jax.vmap(jax.vmap(hash_head))(jnp.swapaxes(vectors, 1, 2), rngs)
