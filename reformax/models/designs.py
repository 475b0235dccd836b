"""Designs of a model's layers: one dataclass of choices, and designs of known models by name.

A model takes one as `design`, in two lines of gin:

    from reformax.models import designs
    lm.TransformerLM.design = @designs.qwen3()

A line more changes a choice: `designs.qwen3.rotary_base = 500_000`. Sizes, positions other than
rotary angles, and tied embeddings are the model's own arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from reformax.declared import NonNegative, Positive, Scale, SettingError, Size, check_fields, shown
from reformax.layers.layer_norm import NormName, NormPlace
from reformax.layers.matrices import relu_squared
from reformax.layers.multi_head import ConvSize, Gate, QKNorm
from reformax.ops.base import AttentionOp
from reformax.ops.numerics.rotary import (
    PairFactor,
    RotaryAngles,
    RotaryBase,
    RotaryFactor,
    RotaryFraction,
    RotaryScaling,
    Turns,
)
from reformax.ops.softmax.logit_options import LengthScale, SoftCap

Activation = Callable[[Array], Array] | str
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu_squared": relu_squared,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}
# Choices of a design that models also have as arguments of their own.
SHORTHANDS = ("attention_bias", "ff_activation", "norm_epsilon", "init_std")


def weighs_far(op: AttentionOp) -> bool:
    """Whether an algorithm makes attention weights of more keys than a window's."""
    return op.dropout and not op.local


class Readers(NamedTuple):
    """The algorithms that read a setting."""

    reads: Callable[[AttentionOp], bool]
    trait: str  # of these algorithms, for an error: an op that "projects keys"
    example: str | Callable[[Sequence[AttentionOp]], str]  # one of them, by those of the model


def _one_that_hides_itself(ops: Sequence[AttentionOp]) -> str:
    """An example of an op that hides a position from itself: a model's own, if one can."""
    name = "lsh.lsh"
    for op in ops:
        if op.shared_qk and "attend_self_if_alone" in type(op).__dataclass_fields__:
            name = f"{type(op).__module__.rpartition('.')[2]}.{op.name}"
            break
    return f"one that does, such as {name}(attend_self_if_alone=False)"


_RECURRENT = Readers(
    lambda op: op.carries_state, "is a recurrence", "one, such as gated_delta.gated_delta()"
)
_WEIGHING = Readers(
    lambda op: op.dropout, "makes attention weights", "one that does, such as flash.flash()"
)
_WEIGHING_FAR = _WEIGHING._replace(
    reads=weighs_far, trait="makes attention weights of more than a window"
)
# The settings that some algorithms alone read. A layer has the setting if its algorithm reads it
# (`read_by`). A model is refused if none of its algorithms does (`check_settings_read`).
READERS = {
    "n_kv_heads": Readers(
        lambda op: not op.shared_qk, "projects keys", "one that does, such as dense.dense()"
    ),
    "n_qk_heads": Readers(
        lambda op: op.more_value_heads, "projects keys", "one that does, such as kda.kda()"
    ),
    "pos_type": Readers(
        lambda op: op.bias, "adds a bias", "one whose bias is True, such as flash.flash()"
    ),
    "next_value": Readers(
        lambda op: op.never_sees_itself,
        "hides a position from itself",
        _one_that_hides_itself,
    ),
    "attention_gate": Readers(
        lambda op: not op.gated,
        "lacks a gate of its own",
        "one whose gated is False, such as flash.flash()",
    ),
    "rotary_local_base": Readers(
        lambda op: op.local, "is local", "one, such as local.local(window=64)"
    ),
    **dict.fromkeys(("soft_cap", "qk_norm", "attention_scale"), _WEIGHING),
    **dict.fromkeys(("scale_by_length", "learn_scale_by_length", "key_conv"), _WEIGHING_FAR),
    **{f"recurrent_{size}": _RECURRENT for size in ("heads", "qk_heads", "d_key", "d_value")},
}


def read_by(op: AttentionOp, name: str, value: Any) -> Any:
    """The value of a setting for a layer: None where its algorithm does not read the setting."""
    return value if READERS[name].reads(op) else None


def check_settings_read(
    settings: Mapping[str, Any], argument: str, ops: Sequence[AttentionOp]
) -> None:
    """Raises `SettingError` for a setting that none of a model's algorithms reads.

    Args:
      settings: values by their names; None and False are not set.
      argument: the model's, or several, that the algorithms are from.
      ops: the algorithms.
    """
    for name, readers in READERS.items():
        value = settings.get(name)
        if value and not any(map(readers.reads, ops)):
            without = f"set {name}=False" if value is True else "leave it out"
            example = readers.example if isinstance(readers.example, str) else readers.example(ops)
            raise SettingError(
                f"{name} is {value!r} and no op of {argument} {readers.trait}: {without}, or give "
                f"{example}"
            )


A_DESIGN = "a Design, such as designs.llama()"  # in errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Design:
    """The choices that a model's layers are made by; the defaults are the Reformer's.

    Args:
      norm: "layer" (Ba et al. 2016), "rms" (Zhang & Sennrich 2019), without mean and bias, or
        "rms_plus_one", whose weights are the scale minus 1 (Gemma Team 2024).
      norm_epsilon: added to the mean square in norms.
      norm_place: norms of each sublayer's "input"; its "output", before it is added to the stream
        (as in OLMo 2, OLMo Team 2024, sec. 3.3.1); or "both" (as in Gemma 2); or one of these for
        each layer of the cycle. See `post_norm` of models for a norm of the sum.
      embedding_scale: what embeddings are multiplied by, such as `sqrt(d_model)`; None: nothing,
        and `sqrt(d_model)` in encoder-decoders.
      init_std: the standard deviation of all fresh matrices and embeddings, such as the 0.02 of
        GPT-2 and BERT; None: matrices after Glorot and Bengio 2010, embeddings of a scale of their
        own. Pre-norm layers' last matrices are scaled down by the depth in either case.
      attention_bias: whether the projections of attention have biases, the output's too.
      attention_output_bias: whether the output's has one; None: as `attention_bias`.
      ff_bias: whether the feed-forward layers have biases.
      logits_bias: whether logits have biases, where embeddings are not tied.
      ff_activation: the feed-forward layers' nonlinearity, a function or a name: "relu",
        "relu_squared", "gelu", its approximation "gelu_tanh", "silu".
      ff_gated: whether the hidden layer is multiplied by one more product: with "silu" SwiGLU
        (Shazeer 2020). Two thirds of the width have the same number of weights.
      qk_norm: whether each head's queries and keys are normalised, in the layers whose algorithm
        makes attention weights, or all heads' together with "joint"; see `layers.Attention`.
      attention_scale: the factor of products of queries and keys in these layers; None: the
        algorithm's, `1 / sqrt(H)`.
      attention_gate: whether the sigmoid of a projection multiplies attention's output, "headwise"
        or "elementwise" (Qiu et al. 2025), where the algorithm has no gate of its own; see
        `layers.Attention`.
      key_conv: the positions that a short convolution of keys reads, such as 3 or 5, by which MoBA,
        LSH and DSA then choose (Xiao et al. 2025); in the layers of self-attention that make
        weights of more than a window; see `layers.Attention`. None: there is none.
      scale_by_length: a factor s of logits, which become `s ln n q k` for a query that sees n keys,
        in the layers that see more than a window (Nakanishi 2025, "Scalable-Softmax"); with
        `1 / ln L` the factor is 1 at length L. None: none.
      learn_scale_by_length: whether s is a weight of each head, which begins as `scale_by_length`.
      soft_cap: a bound c of attention's logits x, which become `c tanh(x / c)` (Gemma Team 2024,
        "Gemma 2", sec. 2). None: none.
      logits_soft_cap: the same for the model's logits.
      rotary_base, rotary_fraction: the angles of rotary positions, with the next seven; see
        `ops.numerics.rotary.RotaryAngles`.
      rotary_scaling, rotary_factor, rotary_trained_length: the same.
      rotary_slow_turns, rotary_fast_turns, rotary_short_factors, rotary_long_factors: the same.
      rotary_local_base: another base in the layers that see no further than a window or
        neighbouring chunks, where frequencies are not scaled (as in Gemma 3); None: the same.
      rotary_layers: which layers of the cycle have the rotary positions of `pos_type`; (): all.
      recurrent_heads, recurrent_qk_heads, recurrent_d_key, recurrent_d_value: other values of
        `n_heads`, `n_qk_heads`, `d_attention_key` and `d_attention_value` in the layers whose
        algorithm is a recurrence; None: the model's.
    """

    norm: NormName = "layer"
    norm_epsilon: NonNegative = 1e-6
    norm_place: NormPlace | Sequence[NormPlace] = "input"
    embedding_scale: Scale | None = None
    init_std: Positive | None = None
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    ff_bias: bool = True
    logits_bias: bool = True
    ff_activation: Activation = jax.nn.gelu
    ff_gated: bool = False
    qk_norm: QKNorm = False
    attention_scale: Scale | None = None
    attention_gate: Gate | None = None
    key_conv: ConvSize | None = None
    scale_by_length: LengthScale | None = None
    learn_scale_by_length: bool = False
    soft_cap: SoftCap | None = None
    logits_soft_cap: SoftCap | None = None
    rotary_base: RotaryBase = 10_000.0
    rotary_fraction: RotaryFraction = 1.0
    rotary_scaling: RotaryScaling | None = None
    rotary_factor: RotaryFactor = 1.0
    rotary_trained_length: Size | None = None
    rotary_slow_turns: Turns | None = None
    rotary_fast_turns: Turns | None = None
    rotary_short_factors: Sequence[PairFactor] = ()
    rotary_long_factors: Sequence[PairFactor] = ()
    rotary_local_base: RotaryBase | None = None
    rotary_layers: Sequence[bool] = ()
    recurrent_heads: Size | None = None
    recurrent_qk_heads: Size | None = None
    recurrent_d_key: Size | None = None
    recurrent_d_value: Size | None = None

    def __post_init__(self):
        check_fields(self)
        for name in ("rotary_layers", "rotary_short_factors", "rotary_long_factors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not isinstance(self.norm_place, str):
            object.__setattr__(self, "norm_place", tuple(self.norm_place))
        _ = self.activation, self.rotary  # each raises for what does not fit
        if self.learn_scale_by_length and self.scale_by_length is None:
            raise SettingError(
                "learn_scale_by_length is True and scale_by_length None: set it, such as to 0.12, "
                "which is 1 / ln 4096"
            )

    @property
    def rotary(self) -> RotaryAngles:
        """The angles of rotary positions."""
        return RotaryAngles(
            base=self.rotary_base,
            fraction=self.rotary_fraction,
            scaling=self.rotary_scaling,
            factor=self.rotary_factor,
            trained_length=self.rotary_trained_length,
            slow_turns=self.rotary_slow_turns,
            fast_turns=self.rotary_fast_turns,
            short_factors=self.rotary_short_factors,
            long_factors=self.rotary_long_factors,
        )

    @property
    def output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        given = self.attention_output_bias
        return self.attention_bias if given is None else given

    def rotating(self, pos_type: str, argument: str, ops: Sequence[AttentionOp]) -> list[bool]:
        """Whether each layer of a cycle rotates queries and keys, by a model's `pos_type`.

        Args:
          pos_type: the model's.
          argument: the model's, that the cycle is from.
          ops: the algorithms of the cycle.

        Raises:
          SettingError: `rotary_layers` has more values or fewer.
        """
        chosen = self.rotary_layers or [True] * len(ops)
        if len(chosen) != len(ops):
            raise SettingError(
                f"rotary_layers has {len(chosen)} values and {argument} {len(ops)} ops: expected "
                "one for each"
            )
        return [
            rotates and (pos_type == "rotary" or (pos_type == "rotary_local" and op.local))
            for op, rotates in zip(ops, chosen, strict=True)
        ]

    def rotary_of(self, op: AttentionOp) -> RotaryAngles:
        """The angles in a layer of an algorithm."""
        local_base = read_by(op, "rotary_local_base", self.rotary_local_base)
        if local_base is None:
            return self.rotary
        return RotaryAngles(base=local_base, fraction=self.rotary_fraction)

    @property
    def activation(self) -> Callable[[Array], Array]:
        """The function of `ff_activation`; `SettingError` if it maps no array to its shape."""
        given = self.ff_activation
        function = ACTIVATIONS.get(given) if isinstance(given, str) else given
        x = jax.ShapeDtypeStruct((2, 4), "float32")
        try:
            fits = jax.eval_shape(function, x).shape == x.shape
        except Exception:  # whatever another function makes of an array
            fits = False
        if not fits:
            raise SettingError(
                f"ff_activation is {shown(given)}: expected one of {', '.join(ACTIVATIONS)}, or a "
                "function of an array"
            )
        return function

    def but(self, **changes: Any) -> Design:
        """The design with other choices; None leaves one as it is."""
        return dataclasses.replace(self, **{n: x for n, x in changes.items() if x is not None})

    def of_op(self, op: AttentionOp) -> AttentionOp:
        """An algorithm with the design's options of logits.

        Raises:
          SettingError: it has another value of one.
        """
        if self.attention_scale is not None and op.scale is not None:
            raise SettingError(
                f"the design's attention_scale is {self.attention_scale} and the scale of {op} "
                f"{op.scale}: set one"
            )
        names = "soft_cap", "scale_by_length", "learn_scale_by_length"
        options = {name: read_by(op, name, getattr(self, name)) for name in names}
        changes = {name: value for name, value in options.items() if value}
        for name, value in changes.items():
            if getattr(op, name) not in (None, False, value):
                raise SettingError(
                    f"the design's {name} is {value} and that of {op} {getattr(op, name)}: set one"
                )
        return dataclasses.replace(op, **changes) if changes else op


# Presets: a subclass has other defaults, each of which gin sets by the preset's name.


@dataclasses.dataclass(frozen=True, kw_only=True)
class gpt2(Design):
    """GPT-2 (Radford et al. 2019): biases everywhere, the tanh's GELU, fresh weights of 0.02.

    Its positions are learnt, `pos_type='axial'` with one axis, and its embeddings tied.
    """

    norm_epsilon: NonNegative = 1e-5
    init_std: Positive | None = 0.02
    attention_bias: bool = True
    ff_activation: Activation = "gelu_tanh"


@dataclasses.dataclass(frozen=True, kw_only=True)
class llama(Design):
    """Llama (Touvron et al. 2023, sec. 2.2): RMSNorm, SwiGLU, rotary positions, no biases.

    The base is Llama 3's (Grattafiori et al. 2024, table 3); that of the first two is 10,000.
    """

    norm: NormName = "rms"
    norm_epsilon: NonNegative = 1e-5
    init_std: Positive | None = 0.02
    ff_bias: bool = False
    logits_bias: bool = False
    ff_activation: Activation = "silu"
    ff_gated: bool = True
    rotary_base: RotaryBase = 500_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class qwen3(llama):
    """Qwen3 (Qwen Team 2025, sec. 2): Llama's with normalised queries and keys."""

    norm_epsilon: NonNegative = 1e-6
    qk_norm: bool = True
    rotary_base: RotaryBase = 1_000_000.0
