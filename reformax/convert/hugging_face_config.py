"""Fields of Hugging Face's config.json that several models share, and how they are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from reformax.convert.spec import Require, Spec
from reformax.declared import check

ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu_squared",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class ConfigField(NamedTuple):
    """A field of config.json.

    Attributes:
      default: the default of the configuration's class.
      hint: what it may be, as an annotation that `reformax.declared` reads.
      part: the part of the model that reads it; elsewhere it may be null. None: all models.
    """

    default: Any
    hint: Any
    part: str | None = None


def filled(config: Mapping[str, Any], fields: Mapping[str, ConfigField]) -> dict[str, Any]:
    """The fields of a config.json, defaults filled in, once each of them is what it may be."""
    get = {name: config.get(name, field.default) for name, field in fields.items()}
    for name, field in fields.items():
        check(name, get[name], field.hint)
    return get


def checked(config: Mapping[str, Any], fields: Mapping[str, ConfigField]) -> dict[str, Any]:
    """`filled`; a switch that is not at its default makes another function, and is refused."""
    get = filled(config, fields)
    for name, field in fields.items():
        if field.hint is bool and get[name] != field.default:
            raise ValueError(f"{name} is {get[name]}: expected {field.default}")
    return get


def size_of_head(get: Mapping[str, Any], size: str, n_heads: str) -> int:
    """The size of a head, of the fields that have all heads' and how many there are."""
    if get[size] % get[n_heads]:
        raise ValueError(f"{size} is {get[size]}: expected a multiple of {n_heads}, {get[n_heads]}")
    return get[size] // get[n_heads]


def learnt_positions(d_model: int, d_head: int, n_positions: int) -> dict[str, Any]:
    """The arguments of models with as many learnt positions and with biases."""
    return dict(
        d_model=d_model,
        d_attention_key=d_head,
        d_attention_value=d_head,
        ff_dropout=0.0,
        attention_bias=True,
        pos_type="axial",
        pos_axial_shape=(n_positions,),
        pos_d_axial_embs=(d_model,),
    )


def activation_of(spec: Spec, kept: str | None) -> str:
    """The name of a model's activation there; `kept` if that is one of its names."""
    names = [n for n, ours in ACTIVATIONS.items() if ours == spec.arguments["ff_activation"]]
    return kept if kept in names else names[0]


def requirement(whose: str) -> Require:
    """`(holds, what, instead)`: raises `ValueError` for a model that `whose` is not."""

    def require(holds: bool, what: str, instead: str) -> None:
        if not holds:
            raise ValueError(f"{whose} has no such model: {what}, expected {instead}")

    return require
