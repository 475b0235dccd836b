"""What a family of decoders is in Hugging Face's format: fields of config.json, and what they mean.

`hugging_face_families` has a row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from reformax.convert.hugging_face_config import ACTIVATIONS, ConfigField
from reformax.declared import (
    Count,
    Depth,
    NonNegative,
    Positive,
    Rate,
    Size,
    VocabSize,
    Width,
)
from reformax.ops.numerics.rotary import RotaryBase, RotaryFraction

FULL, WINDOW, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
Get = Mapping[str, Any]  # the fields of a config.json, with defaults


class Only(NamedTuple):
    """The one value that a field may have, as a hint: `Annotated[Any, Only(False)]`."""

    value: Any

    def hold(self, value: Any) -> bool:
        """Whether a field has it, or is null."""
        return value is None or (type(value) is type(self.value) and value == self.value)

    def words(self, value: Any) -> str:
        """The expected value, in words."""
        return repr(self.value)


Layers = Sequence[Literal["full_attention", "sliding_attention"]]
TOKEN = Count | None
TOKENS = Count | Sequence[Count] | None
_ROPE = Mapping[str, Any] | None
COMMON = {
    "attention_dropout": ConfigField(0.0, Rate),
    "bos_token_id": ConfigField(1, TOKEN),
    "eos_token_id": ConfigField(2, TOKENS),
    "head_dim": ConfigField(None, Width | None),
    "hidden_act": ConfigField("silu", Literal[*ACTIVATIONS]),
    "hidden_size": ConfigField(4096, Size),
    "initializer_range": ConfigField(0.02, Positive),
    "intermediate_size": ConfigField(11008, Size),
    "num_attention_heads": ConfigField(32, Size),
    "num_hidden_layers": ConfigField(32, Depth),
    "num_key_value_heads": ConfigField(None, Size | None),
    "partial_rotary_factor": ConfigField(None, RotaryFraction | None),
    "max_position_embeddings": ConfigField(2048, Size),
    "quantization_config": ConfigField(None, Annotated[Any, Only(None)]),
    "rms_norm_eps": ConfigField(1e-6, NonNegative),
    "rope_parameters": ConfigField(None, _ROPE),
    "rope_scaling": ConfigField(None, _ROPE),
    "rope_theta": ConfigField(None, RotaryBase | None),
    "tie_word_embeddings": ConfigField(False, bool),
    "vocab_size": ConfigField(32000, VocabSize),
}
BIASES = {"attention_bias": ConfigField(False, bool)}
MLP_BIAS = {"mlp_bias": ConfigField(False, bool)}
WINDOWS = {
    "layer_types": ConfigField(None, Layers | None),
    "sliding_window": ConfigField(4096, Size | None),
}


class Layer(NamedTuple):
    """A layer of a decoder."""

    kind: str  # FULL, WINDOW or RECURRENT
    rotates: bool = True


class Family(NamedTuple):
    """A family of decoders.

    Attributes:
      model_type: its name in config.json.
      architecture: the class of `transformers`.
      fields: of config.json, besides `COMMON`.
      layers: the kinds of all layers.
      design: choices of the design, besides those that all families have.
      written: fields of config.json by the model's arguments, design and kinds of layers, besides
        those that `hugging_face_decoder.config_of` writes for all families.
      theta: the base of rotary positions where config.json has none.
      fraction: the share of features that rotate, likewise.
      partial: whether it may be below 1.
      local_theta: of layers with a window, where they have angles of their own; None: they do not.
      activation: the name of the field that has the nonlinearity.
      plus_one: whether a norm's weights are its scale minus 1.
      fused: whether queries, keys and values are one tensor, and the two inputs of a gated layer.
      scalings: values of rope_type besides "default".
      whole_heads: whether the class wants `hidden_size` to be a multiple of the number of heads.
      within: the name in config.json of a model of several media, whose text is of this family.
      separate: whether each projection of a recurrence is a tensor.
      recurrent_epsilon: of the norms in recurrences; None: that of the others.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, ConfigField] = {}
    layers: Callable[[Get], list[Layer]] = lambda get: every(get, FULL)
    design: Callable[[Get], dict[str, Any]] = lambda get: {}
    written: Callable[[Any], dict[str, Any]] = lambda decoder: {}
    theta: float = 10_000.0
    fraction: float = 1.0
    partial: bool = False
    local_theta: float | None = None
    activation: str = "hidden_act"
    plus_one: bool = False
    fused: bool = False
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn", "dynamic")
    whole_heads: bool = False
    within: str | None = None
    separate: bool = False
    recurrent_epsilon: float | None = None

    @property
    def all_fields(self) -> dict[str, ConfigField]:
        """The fields of its config.json."""
        return COMMON | dict(self.fields)


def every(get: Get, kind: str) -> list[Layer]:
    """Layers of one kind."""
    return [Layer(kind)] * get["num_hidden_layers"]


def listed(get: Get, usual: Callable[[int], str]) -> list[Layer]:
    """The layers of `layer_types`; where it is null, those of a function of the index."""
    n, kinds = get["num_hidden_layers"], get["layer_types"]
    if kinds is not None and len(kinds) != n:
        raise ValueError(f"layer_types has {len(kinds)} values: expected num_hidden_layers, {n}")
    layers = [Layer(kind) for kind in (kinds or map(usual, range(n)))]
    for layer in layers:
        if layer.kind == WINDOW and get["sliding_window"] is None:
            raise ValueError(
                "layer_types has 'sliding_attention' and sliding_window is None, or off by "
                "use_sliding_window: set it"
            )
    return layers
