"""Attention from one sequence to another: an encoder-decoder's attention to the encoder's output.

In the shapes, R is the rows that are decoded: several of a memory in beam search.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.declared import Unsupported
from reformax.layers import context_parallel, remat
from reformax.layers.matrices import Unnormed, affine
from reformax.layers.multi_head import ATTENTION_GATE, gated
from reformax.layers.planned_attention import PlannedAttention
from reformax.ops.calls.arguments import check_mask
from reformax.ops.calls.heads import QKV
from reformax.ops.masking.masks import paired_segment_ids
from reformax.ops.numerics.arrays import check_floats


@dataclasses.dataclass(eq=False, repr=False)
class CrossAttention(PlannedAttention):
    """`[B, T, D], [B, S, D] -> [B, T, D]`: each position of the first reads the second, the memory.

    Vaswani et al. 2017, sec. 3.2.3. The algorithm must have `cross`. An algorithm that
    shares queries and keys has no keys for a memory. One that chunks a sequence as it is relies on
    neighbours, and two sequences have none. Positions are not rotated. If only one of the two has
    segments, they and the other see each other. Weights and arguments are those of `MultiHead`.

    Raises:
      NotImplementedError: an algorithm that attends within one sequence.
    """

    n_sequences = 2

    def __post_init__(self):
        super().__post_init__()
        if self.n_qk_heads is not None:
            raise Unsupported(
                f"n_qk_heads is {self.n_qk_heads}: cross-attention has as many heads of values, "
                "leave it out"
            )
        if self.op.reads_projections:
            raise Unsupported(
                f"op is {self.op}: it reads further projections, which a memory has none of; use "
                "dense.dense()"
            )
        if not self.op.cross:
            why = "its keys are its own queries" if self.op.shared_qk else "it reads one sequence"
            raise Unsupported(
                f"op is {self.op}: it cannot attend from one sequence to another, as {why}; use "
                "one whose cross is True, such as dense.dense()"
            )

    def project(
        self, params, x: Float[Array, "B T D"], memory: Float[Array, "B S D"]
    ) -> tuple[QKV, Array | None]:
        """Queries of `x`, keys and values of the memory; and the gate, if there is one."""
        heads = self._project_heads(params, x, self._of_queries)
        check_floats("memory", memory, "batch", "length", x.shape[2])
        of_memory = self._project_heads(params, memory.astype(x.dtype), "kv")
        heads = self._normed(params, heads | of_memory)
        gate = heads.pop(ATTENTION_GATE, None)
        return context_parallel.arrange(self.op, QKV(**heads)), gate

    @property
    def _of_queries(self) -> list[str]:
        """The projections of the sequence that reads; the others are of the memory."""
        return ["q", ATTENTION_GATE] if self.gate else ["q"]

    def apply(
        self,
        params,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Int[Array, "B T"] | None = None,
        memory_mask: Int[Array, "B S"] | None = None,
        rng=None,
        run: remat.Run = remat.direct,
    ) -> Float[Array, "B T D"]:
        qkv, gate = self.project(params, x, memory)
        check_mask("mask", mask, "x", x)
        check_mask("memory_mask", memory_mask, "memory", memory)
        segment_ids = paired_segment_ids((mask, x), (memory_mask, memory))
        plan = self.plan(params, qkv, segment_ids, rng)
        out = self.attend(params, qkv, plan, segment_ids, rng, run)
        return self.combine(params, out, gate, rng)

    # Decoding: keys and values of the memory are the same at every step.

    def for_decoding(self, params, dtype: str) -> dict[str, Any]:
        """The weights for `precompute_kv` and `step`: one product a projection, for all heads.

        `w_in [D, N * H]` makes queries, and after them the output's gate; `w_k [D, G * H]` and
        `w_v [D, G * V]` read the memory; the others are those of `Attention.for_decoding`.
        """
        return self._merge(params, {"in": self._of_queries, "k": "k", "v": "v"}, dtype)

    def precompute_kv(
        self, params, memory: Float[Array, "B S D"], dtype: str, rng=None
    ) -> tuple[Float[Array, "B G H S"], Float[Array, "B G V S"], Any]:
        """Keys and values of the memory for `step`, in the order that its products read them.

        `params` are the weights from `for_decoding`; `rng` is what `step` plans with, and comes
        third.
        """
        memory = memory.astype(dtype)
        heads = {
            letter: affine(memory, params[f"w_{letter}"], params.get(f"b_{letter}"))[0].reshape(
                *memory.shape[:2], size.n_heads, size.size
            )
            for letter, size in self.projections().items()
            if letter in "kv"
        }
        heads = self._normed(params, heads)
        # The barrier keeps the compiler from moving the transposition into the loop over steps.
        heads = tuple(jnp.transpose(x, (0, 2, 3, 1)) for x in heads.values())
        return *jax.lax.optimization_barrier(heads), rng

    def step(
        self,
        params,
        x: Float[Array, "R 1 D"] | Unnormed,
        memory_kv: tuple[Float[Array, "B G H S"], Float[Array, "B G V S"], Any],
        memory_segment_ids: Int[Array, "B S"] | None = None,
        added: Float[Array, "R 1 D"] | None = None,
    ) -> Float[Array, "R 1 D"]:
        """The layer at one position of each row.

        Args:
          params: the weights from `for_decoding`.
          x: R / B rows for each memory, one after the other.
          memory_kv: from `precompute_kv`.
          memory_segment_ids: 0 is padding; every row reads the rest.
          added: a stream that the output is added to.
        """
        *memory_heads, rng = memory_kv
        batch = memory_heads[0].shape[0]
        heads = self._normed(params, self._project_merged(params, x, self._of_queries))
        rows = heads["q"].shape[:2]
        heads = {name: y.reshape(batch, -1, *y.shape[2:]) for name, y in heads.items()}
        q, gate = heads["q"], heads.get(ATTENTION_GATE)
        segment_ids = None
        if memory_segment_ids is not None:
            segment_ids = jnp.ones(q.shape[:2], bool), memory_segment_ids.astype(bool)
        qkv = QKV(q, *(jnp.transpose(x, (0, 3, 1, 2)) for x in memory_heads))
        plan = self.plan(params, qkv, segment_ids, rng)
        out = gated(self._apply_op(params, qkv, plan, segment_ids), gate)
        return self._output(params, out.reshape(*rows, self.n_heads, -1), added)
