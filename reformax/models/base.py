"""The hyperparameters that models share, each documented once, and the stacks made of them.

A model is a dataclass: its fields are its arguments, for gin and Python alike. Their names are
those of `trax.models`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from jaxtyping import Array, Float, Int

from reformax.declared import (
    Called,
    Count,
    NonNegative,
    Positive,
    Rate,
    SettingError,
    Size,
    check_fields,
)
from reformax.layers import (
    Attention,
    AxialPositionalEncoding,
    CrossAttention,
    FeedForward,
    Layer,
    LayerNorm,
    ResidualStack,
    ReversibleStack,
    SinusoidalPositionalEncoding,
    TransformerBlock,
)
from reformax.layers.dropout import rate_in
from reformax.layers.layer_norm import NORMS, NormPlace, norm_places
from reformax.layers.positions import EMBEDDING_SCALE
from reformax.layers.relative import PositionBias
from reformax.layers.remat import RematPolicy
from reformax.layers.reversible import SlotCount
from reformax.layers.stacks import BlockStack
from reformax.models.designs import (
    A_DESIGN,
    SHORTHANDS,
    Activation,
    Design,
    check_settings_read,
    read_by,
)
from reformax.ops.base import AttentionOp
from reformax.ops.numerics.rotary import RotaryAngles
from reformax.task import TaskModel

AttentionType = Annotated[
    AttentionOp | Sequence[AttentionOp],
    Called("an AttentionOp, such as lsh.lsh(), or a cycle of them"),
]
ROTARY = ("rotary", "rotary_local")
Dtype = Literal["float32", "bfloat16", "float16", "float8"]
PosType = Literal["rotary", "rotary_local", "axial", "sinusoidal", "alibi", "t5", "none"]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Model(Layer, TaskModel):
    """The arguments that language models and encoder-decoders share.

    Args:
      d_model: the size of the residual stream, or of each of the two in a reversible model.
      d_ff: the width of the feed-forward layers.
      n_heads: number of attention heads.
      d_attention_key: the size of a head's queries and keys; None: d_model / n_heads.
      d_attention_value: the size of a head's values; None: d_model / n_heads.
      n_kv_heads: heads of keys and values, each for a group of heads of queries (GQA; 1 is MQA), in
        the layers that project keys; None: n_heads.
      n_qk_heads: heads of queries and keys, each for a group of heads of values, as in Mamba 2, in
        the self-attention of ops with `more_value_heads`; None: n_heads.
      dropout: the rate on embeddings, sublayers' outputs and a language model's features.
      ff_dropout: the rate on the hidden layers of the feed-forward layers; None: `dropout`.
      attention_dropout: the rate on attention weights.
      pos_type: "rotary" (in self-attention), "rotary_local" (in the layers that see no further than
        a window or neighbouring chunks), "axial", "sinusoidal", "alibi" or "t5" (biases by
        distance, in the self-attention that can add one; see `layers.relative`), or "none".
      pos_axial_shape: for "axial": the grid; its product is the largest length. For "rotary" and
        "rotary_local": the grid by whose coordinates queries and keys are rotated, as (32, 32) of
        the pixels of an image; (): positions are of a line.
      pos_d_axial_embs: for "axial": the features of each axis, adding up to `d_model`.
      next_value: shifted values: whether a key's value has that of the next position in it too, in
        the causal layers whose algorithm has `never_sees_itself`, such as
        `shared_qk.shared_qk(attend_self_if_alone=False)`; see `layers.Attention`.
      ff_chunk_size: if > 0, feed-forward layers take this many positions at a time.
      design: how the layers are made: norms, feed-forward layers, what is done to queries, keys and
        logits; see `models.designs`.
      attention_bias, ff_activation, norm_epsilon, init_std: other values of these choices of the
        design; None: the design's.
      scan_layers: whether the layers compile as a loop over the cycle. False unrolls the loop:
        slower to compile, faster on a GPU.
      dtype: of the arithmetic in sublayers and logits; weights and streams are float32. "float8" is
        "bfloat16" but for the projections and feed-forward layers in training, whose products are
        of FP8 numbers (`layers.float8`).
      amax_history: of "float8": the last steps whose largest numbers set the scales of FP8 products
        (delayed scales, such as 16); 0: an array's own largest number does, found before rounding.
      mode: "train" or "eval".
    """

    d_model: Size = 512
    d_ff: Size = 2048
    n_heads: Size = 8
    d_attention_key: Size | None = None
    d_attention_value: Size | None = None
    n_kv_heads: Size | None = None
    n_qk_heads: Size | None = None
    dropout: Rate = 0.1
    ff_dropout: Rate | None = None
    attention_dropout: Rate = 0.0
    attention_bias: bool | None = None
    pos_type: PosType = "rotary"
    pos_axial_shape: Sequence[Size] = ()
    pos_d_axial_embs: Sequence[Size] = ()
    next_value: bool = False
    ff_activation: Activation | None = None
    ff_chunk_size: Count = 0
    norm_epsilon: NonNegative | None = None
    design: Annotated[Design, Called(A_DESIGN)] = Design()
    init_std: Positive | None = None
    scan_layers: bool = True
    dtype: Dtype = "float32"
    amax_history: Count = 0
    mode: Literal["train", "eval"] = "train"

    n_inputs = 1  # arrays of tokens that the model reads
    _attention_types = ("attention_type",)  # the arguments that are algorithms
    final_norm = True  # whether a norm follows a stack

    def __post_init__(self):
        super().__init__(n_in=self.n_inputs)
        check_fields(self)
        if self.amax_history and self.dtype != "float8":
            raise SettingError(
                f"amax_history is {self.amax_history} and dtype is {self.dtype!r}, which has no "
                "scales: set amax_history=0 or dtype='float8'"
            )
        self.design = self.design.but(**{name: getattr(self, name) for name in SHORTHANDS})
        self._dropout_rate = rate_in(self.mode, self.dropout)
        self._positions = self._added_positions()

    @property
    def compute_dtype(self) -> str:
        """The dtype of all but FP8 products: bfloat16 where `dtype` is "float8"."""
        return "bfloat16" if self.dtype == "float8" else self.dtype

    @property
    def features_dtype(self) -> str:
        """The dtype of the features that logits are computed from: float32 for float16 too.

        The gradient of a mean over many targets underflows in float16.
        """
        return "float32" if self.compute_dtype == "float16" else self.compute_dtype

    @property
    def max_length(self) -> int | None:
        """The largest length that the positions hold; None if they hold any."""
        return None if self._positions is None else self._positions.max_length

    def with_n_hashes(self, n):
        def changed(ops):
            if isinstance(ops, AttentionOp):
                return ops.with_n_hashes(n)
            return ops if ops is None else tuple(op.with_n_hashes(n) for op in ops)

        types = {name: getattr(self, name) for name in self._attention_types}
        new = {name: changed(ops) for name, ops in types.items()}
        if all(cycle_of(new[name]) == cycle_of(ops) for name, ops in types.items() if ops):
            return None
        return dataclasses.replace(self, **new)

    def _added_positions(self) -> Layer | None:
        """The encoding that is added to the embeddings, if any; rotary positions are not added."""
        shape, d_embs = tuple(self.pos_axial_shape), tuple(self.pos_d_axial_embs)
        if self.pos_type == "axial":
            fits = shape or d_embs
        else:
            fits = not d_embs and (self.pos_type in ROTARY or not shape)
        if not fits:
            raise SettingError(
                f"pos_type is {self.pos_type!r}, pos_axial_shape {shape}, pos_d_axial_embs "
                f"{d_embs}: 'axial' needs both, rotary positions may have a shape, others have none"
            )
        if self.pos_type == "axial":
            std = EMBEDDING_SCALE if self.design.init_std is None else self.design.init_std
            return AxialPositionalEncoding(self.pos_axial_shape, self.pos_d_axial_embs, std)
        return SinusoidalPositionalEncoding() if self.pos_type == "sinusoidal" else None

    def _add_positions(
        self, params, x: Float[Array, "B T D"], position: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """`x` and the encoding of these positions, if one is added; None: of 0 to T - 1.

        Raises:
          SettingError: a row is longer than the positions hold, whatever its segments.
        """
        if self._positions is None:
            return x
        if position is None:
            return self._positions.apply(params["positions"], x)
        if self.max_length is not None and x.shape[1] > self.max_length:
            raise SettingError(
                f"a row has {x.shape[1]} positions and the model's hold {self.max_length}: enlarge "
                "pos_axial_shape or shorten the rows"
            )
        return self._positions.apply_at(params["positions"], x, position)

    def _stack(self, blocks: list[TransformerBlock], n_layers: int) -> BlockStack:
        """A stack of the model's kind: `Residual` and `Reversible` define it."""
        raise NotImplementedError

    def _stack_options(self) -> dict[str, Any]:
        design = self.design
        return dict(
            dtype=self.compute_dtype,
            norm=design.norm,
            norm_epsilon=design.norm_epsilon,
            norm_place=design.norm_place,
            scan_layers=self.scan_layers,
        )

    def _norm_layer(self, dtype: str | None = None) -> LayerNorm:
        """A norm of the design; None: in the dtype of its input."""
        return NORMS[self.design.norm](self.design.norm_epsilon, dtype)

    def _blocks(
        self, argument: str, *, causal: bool = True, cross: AttentionOp | None = None
    ) -> list[TransformerBlock]:
        """A block for each algorithm of the cycle that an argument such as `attention_type` has.

        Args:
          argument: the argument's name.
          causal: whether a position sees only itself and what came before it.
          cross: the algorithm of the attention to a memory; None: the blocks have none.
        """
        cycle, design = cycle_of(getattr(self, argument)), self.design
        rotating = design.rotating(self.pos_type, argument, cycle)
        self._check_cycle(argument, cycle, rotating, causal)
        ops = [op for name in self._attention_types for op in cycle_of(getattr(self, name))]
        check_settings_read(vars(design), " or ".join(self._attention_types), ops)
        cycle = [design.of_op(op) for op in cycle]
        places = norm_places(design.norm_place, len(cycle))
        cross = None if cross is None else design.of_op(cross)
        return [
            TransformerBlock(
                self._self_attention(op, place, causal, rotates),
                self._feed_forward(place),
                None if cross is None else self._cross_attention(cross, place),
            )
            for op, rotates, place in zip(cycle, rotating, places, strict=True)
        ]

    def _self_attention(
        self, op: AttentionOp, norm_place: NormPlace, causal: bool, rotates: bool
    ) -> Attention:
        return Attention(
            op,
            **self._attention_options(op, norm_place),
            causal=causal,
            key_conv=read_by(op, "key_conv", self.design.key_conv),
            use_rotary=rotates,
            rotary=self.design.rotary_of(op) if rotates else RotaryAngles(),
            rotary_grid=self.pos_axial_shape if rotates else (),
            position_bias=read_by(op, "pos_type", self._position_bias),
            next_value=causal and bool(read_by(op, "next_value", self.next_value)),
        )

    def _cross_attention(self, op: AttentionOp, norm_place: NormPlace) -> CrossAttention:
        return CrossAttention(op, **self._attention_options(op, norm_place) | {"n_qk_heads": None})

    def _check_cycle(
        self, argument: str, cycle: Sequence[AttentionOp], rotating: Sequence[bool], causal: bool
    ) -> None:
        """Raises `SettingError` for no algorithm, or a setting that none of them would read."""
        if not cycle:
            raise SettingError(f"{argument} is {cycle!r}: expected an op, or several")
        given = dict(n_kv_heads=self.n_kv_heads, n_qk_heads=self.n_qk_heads)
        given |= dict(pos_type=self._position_bias, next_value=self.next_value and causal)
        check_settings_read(given, argument, cycle)
        for name in ("rotary_layers", "rotary_local_base"):
            value = getattr(self.design, name)
            if value and self.pos_type not in ROTARY:
                raise SettingError(
                    f"{name} is {value} and pos_type is {self.pos_type!r}, by which no layer has "
                    "rotary positions: set pos_type='rotary'"
                )
        if self.pos_type in ROTARY and self.pos_axial_shape and not any(rotating):
            raise SettingError(
                f"pos_type is {self.pos_type!r} with pos_axial_shape {tuple(self.pos_axial_shape)} "
                f"and no op of {argument} is local: leave the shape out, or set pos_type='rotary'"
            )
        if self.design.rotary != RotaryAngles() and not any(rotating):
            raise SettingError(
                f"the design has {self.design.rotary} and pos_type is {self.pos_type!r}, by which "
                f"no op of {argument} has rotary positions: set pos_type='rotary'"
            )

    @property
    def _position_bias(self) -> PositionBias | None:
        """The bias by distance that self-attention adds to its logits; None: none."""
        return self.pos_type if self.pos_type in ("alibi", "t5") else None

    def _attention_options(self, op: AttentionOp, norm_place: NormPlace) -> dict[str, Any]:
        """The options of an attention layer, by what its algorithm does."""
        design = self.design
        options = dict(
            n_heads=self.n_heads,
            d_qk=self._head_size(self.d_attention_key),
            d_v=self._head_size(self.d_attention_value),
            n_kv_heads=read_by(op, "n_kv_heads", self.n_kv_heads),
            n_qk_heads=read_by(op, "n_qk_heads", self.n_qk_heads),
            bias=design.attention_bias,
            output_bias=design.output_bias,
            attention_dropout=self.attention_dropout,
            output_dropout=self.dropout,
            init_std=design.init_std,
            norm=design.norm,
            norm_epsilon=design.norm_epsilon,
            output_norm=norm_place != "input",
            qk_norm=read_by(op, "qk_norm", design.qk_norm) or False,
            scale=read_by(op, "attention_scale", design.attention_scale),
            gate=read_by(op, "attention_gate", design.attention_gate),
            float8=self.dtype == "float8",
            amax_history=self.amax_history,
            mode=self.mode,
        )
        recurrent = dict(
            n_heads=design.recurrent_heads,
            n_qk_heads=design.recurrent_qk_heads,
            d_qk=design.recurrent_d_key,
            d_v=design.recurrent_d_value,
        )
        given = {name: size for name, size in recurrent.items() if size is not None}
        if op.carries_state and given:  # heads of keys and values are those of attention
            options |= {"n_kv_heads": None} | given
        return options

    def _head_size(self, size: int | None) -> int:
        if size is not None:
            return size
        if self.d_model % self.n_heads:
            raise SettingError(
                f"d_model is {self.d_model}: expected a multiple of n_heads, {self.n_heads}"
            )
        return self.d_model // self.n_heads

    def _feed_forward(self, norm_place: NormPlace) -> FeedForward:
        return FeedForward(
            self.d_ff,
            self.dropout,
            self.dropout if self.ff_dropout is None else self.ff_dropout,
            self.design.activation,
            self.ff_chunk_size,
            self.mode,
            init_std=self.design.init_std,
            float8=self.dtype == "float8",
            amax_history=self.amax_history,
            gated=self.design.ff_gated,
            bias=self.design.ff_bias,
            output_norm=None if norm_place == "input" else self.design.norm,
            norm_epsilon=self.design.norm_epsilon,
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Residual:
    """A mixin of `Model`: one residual stream.

    Args:
      remat_policy: what the gradient keeps of each layer, and does not compute again: "all",
        "attention" (what attention computed) or "nothing"; see `layers.remat`.
      offload_activations: whether what is kept lies in the host's memory between the passes of a
        training step; with "attention" or "nothing", on a GPU.
      post_norm: whether a norm follows each residual sum, as in Vaswani et al. 2017 and BERT,
        instead of preceding each sublayer. Post-norm stacks have no norm at the end, because their
        last layer ends in one.
    """

    remat_policy: RematPolicy = "all"
    offload_activations: bool = False
    post_norm: bool = False

    @property
    def final_norm(self) -> bool:
        """Whether a norm follows a stack."""
        return not self.post_norm

    def _stack(self, blocks, n_layers):
        options = self._stack_options() | _kept(self)
        return ResidualStack(blocks, n_layers, post_norm=self.post_norm, **options)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Reversible:
    """A mixin of `Model`: a residual stream whose gradient keeps no layer's activations.

    Args:
      n_slots: the number of slots, each the sum of every n-th sublayer's outputs; None: two
        streams, as in the paper. See `layers.coupling`. A slot takes the memory of a stream.
      exact: whether the backward pass rebuilds activations bit for bit; see `layers.reversible`.
      keep_ff_outputs: whether the gradient keeps the feed-forward layers' outputs: fewer
        products, and memory that grows with the depth.
      remat_policy: what the gradient keeps of each layer, and does not compute again: "nothing"
        but plans, "attention" (what attention computed) or "all", as a Transformer's does; see
        `layers.remat`.
      offload_activations: whether what is kept lies in the host's memory between the passes of a
        training step; with "attention" or "nothing", on a GPU.
    """

    n_slots: SlotCount | None = None
    exact: bool = False
    keep_ff_outputs: bool = False
    remat_policy: RematPolicy = "nothing"
    offload_activations: bool = False

    def _stack(self, blocks, n_layers):
        options = {name: getattr(self, name) for name in ("n_slots", "exact", "keep_ff_outputs")}
        options |= self._stack_options() | _kept(self)
        return ReversibleStack(blocks, n_layers, **options)


def _kept(model: Residual | Reversible) -> dict[str, Any]:
    """The options of a stack that say what its gradient keeps; evaluation offloads nothing."""
    offload = model.offload_activations and model.mode == "train"
    return dict(remat_policy=model.remat_policy, offload_activations=offload)


def cycle_of(ops: AttentionOp | Sequence[AttentionOp]) -> Sequence[AttentionOp]:
    """The algorithms of a cycle of layers; a single one is a cycle of one."""
    return [ops] if isinstance(ops, AttentionOp) else ops
