"""Decoders of `hugging_face_families`: the model of a config.json, and the config.json of a model.

A model goes out as the family whose config.json, read again, is the same function. Where none is,
the error says by which arguments the closest one differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from reformax.convert import hugging_face_rotary
from reformax.convert.hugging_face_config import ACTIVATIONS, activation_of, filled
from reformax.convert.hugging_face_family import FULL, RECURRENT, WINDOW, Family, Layer
from reformax.convert.spec import DENSE, Op, Spec, cycle_of
from reformax.declared import shown
from reformax.layers.layer_norm import norm_places
from reformax.models.base import ROTARY
from reformax.models.designs import Design

# Positions that a chunk of local attention has at least, and the most chunks of a window: they
# decide only how the window is computed.
_CHUNK, _MOST_CHUNKS = 256, 64
# Fields that a config.json keeps from the one that its model was read from.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
_TEXT = "text_config"


def text_of(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model's text, where it has other media too."""
    text = config.get(_TEXT)
    if family.within is None or config.get("model_type") != family.within or text is None:
        return dict(config)
    if not isinstance(text, Mapping):
        raise ValueError(f"{_TEXT} is {shown(text)}: expected an object")
    outer = {"tie_word_embeddings": config.get("tie_word_embeddings")}
    outer |= {name: config[name] for name in ("quantization_config",) if name in config}
    return {**{k: x for k, x in outer.items() if x is not None}, **text}


def spec_of(family: Family, config: Mapping[str, Any]) -> tuple[Spec, list[str]]:
    """The model that computes the function of a config.json, and notes on the differences.

    Raises:
      ValueError: a value is out of range in either format, or the function is another.
    """
    config = text_of(family, config)
    get = filled(config, family.all_fields)
    layers = family.layers(get)
    n_heads = get["num_attention_heads"]
    n_kv = get["num_key_value_heads"] or n_heads
    if n_heads % n_kv:
        raise ValueError(f"num_key_value_heads is {n_kv}: expected a divisor of {n_heads}")
    d_head = get["head_dim"]
    if d_head is None:
        if get["hidden_size"] % n_heads:
            raise ValueError(
                f"hidden_size is {get['hidden_size']}: expected a multiple of num_attention_heads, "
                f"{n_heads}, or head_dim"
            )
        d_head = get["hidden_size"] // n_heads
    design = dict(
        norm="rms_plus_one" if family.plus_one else "rms",
        norm_epsilon=get["rms_norm_eps"],
        init_std=get["initializer_range"],
        attention_bias=get.get("attention_bias", False),
        ff_bias=False,
        logits_bias=False,
        ff_activation=ACTIVATIONS[get[family.activation]],
        ff_gated=True,
    )
    design |= family.design(get) | hugging_face_rotary.design_of(family, get, layers)
    rotated = int(d_head * design.get("rotary_fraction", 1.0))
    if rotated % 2 and any(layer.rotates for layer in layers):
        raise ValueError(
            f"head_dim is {d_head}: {rotated} features of a head rotate, expected an even number"
        )
    cycle = cycle_of(layers)
    if not isinstance(design.get("norm_place", ""), str):
        design["norm_place"] = design["norm_place"][: len(cycle)]
    if not all(layer.rotates for layer in cycle) and any(layer.rotates for layer in cycle):
        design["rotary_layers"] = tuple(layer.rotates for layer in cycle)
    first, notes = _first_token(get)
    notes += hugging_face_rotary.notes(get)
    rate = get.get("resid_pdrop", 0.0)
    spec = Spec.make(
        "TransformerLM",
        [_op(family, layer, get) for layer in cycle],
        vocab_size=get["vocab_size"],
        d_model=get["hidden_size"],
        d_ff=get["intermediate_size"],
        d_attention_key=d_head,
        d_attention_value=d_head,
        n_layers=len(layers),
        n_heads=n_heads,
        n_kv_heads=None if n_kv == n_heads else n_kv,
        dropout=rate,
        ff_dropout=0.0,
        attention_dropout=get["attention_dropout"],
        pos_type="rotary" if any(layer.rotates for layer in layers) else "none",
        tie_embeddings=get["tie_word_embeddings"],
        first_token=first,
        design=Design(**design),
    )
    spec.build()  # checks what the settings say together
    return spec, notes


def _op(family: Family, layer: Layer, get: Mapping[str, Any]) -> Op:
    if layer.kind == FULL:
        return Op("flash", {})
    if layer.kind == WINDOW:
        window = get["sliding_window"]
        size = min(window, max(_CHUNK, -(-window // _MOST_CHUNKS)))
        reached = -(-(window - 1) // size)
        return Op("local", dict(chunk_len=size, n_chunks_before=reached, window=window))
    epsilon = family.recurrent_epsilon or get["rms_norm_eps"]
    options = dict(gated=True, conv_size=get["linear_conv_kernel_dim"], norm_epsilon=epsilon)
    turns = get.get("linear_allow_neg_eigval", False)
    return Op("gated_delta", options | (dict(negative_eigenvalues=True) if turns else {}))


def _first_token(get: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The token before a row: the beginning's, or else the end's, of which one may be many."""
    end = get["eos_token_id"]
    end = end[0] if isinstance(end, list | tuple) and end else end
    found = get["bos_token_id"] if get["bos_token_id"] is not None else end
    if not isinstance(found, int):
        return 0, ["no token begins or ends a text in config.json: token 0 begins rows"]
    if found >= get["vocab_size"]:
        raise ValueError(
            f"bos_token_id is {found}: expected an id below vocab_size, {get['vocab_size']}"
        )
    return found, []


# Functions: what two models compute, by the arguments that decide it.


class Decoder(NamedTuple):
    """The facts of a model that `Family.written` reads."""

    spec: Spec
    kinds: list[str]  # of all layers
    window: int | None  # of the layers that have one
    rotating: list[bool]  # whether each layer rotates queries and keys
    recurrence: Mapping[str, Any]  # options and sizes of the layers of the delta rule; {}: none

    @property
    def design(self) -> Design:
        """The design of the model."""
        return self.spec.design


def function_of(spec: Spec) -> dict[str, Any]:
    """All that decides what a model computes, each by a name that an error may have."""
    a, design = spec.arguments, spec.design
    sizes = "vocab_size", "d_model", "d_ff", "n_layers", "n_heads"
    sizes += "d_attention_key", "d_attention_value", "tie_embeddings", "first_token"
    others = "post_norm", "embedding_norm", "next_value", "n_qk_heads"
    found = {name: a[name] for name in (*sizes, *others)}
    found["n_kv_heads"] = a["n_kv_heads"] or a["n_heads"]
    rotary = a["pos_type"] in (*ROTARY, "none") and not a["pos_axial_shape"]
    found["pos_type"] = "rotary" if rotary else a["pos_type"]
    for name in (
        *("norm", "norm_epsilon", "embedding_scale", "attention_bias", "ff_bias"),
        *("logits_bias", "ff_activation", "ff_gated", "qk_norm", "attention_gate", "key_conv"),
        *("scale_by_length", "learn_scale_by_length", "soft_cap", "logits_soft_cap"),
    ):
        found[name] = getattr(design, name)
    # The two differ by what weights are called, which `hugging_face_tensors.prepared` sees to.
    found["norm"] = "rms" if design.norm == "rms_plus_one" else design.norm
    found["logits_bias"] = design.logits_bias and not a["tie_embeddings"]
    found["attention_output_bias"] = design.output_bias
    rotating, n = spec.rotating, len(spec.attention)
    places = norm_places(design.norm_place, n)
    for layer, block, _, op in spec.layers():
        angles = None
        if rotating[block]:
            angles = hugging_face_rotary.canonical(design.rotary_of(op.algorithm))
        of_layer = _layer_function(spec, op) | {"rotary positions": angles}
        of_layer["norm_place"] = places[block]
        found |= {f"{name} of layer {layer}": value for name, value in of_layer.items()}
    return found


def _layer_function(spec: Spec, op: Op) -> dict[str, Any]:
    """What the attention of a layer computes."""
    a, design = spec.arguments, spec.design
    algorithm = op.algorithm
    kind, window = op.name, None
    if op.name in DENSE:
        kind = "attention"
    if op.name == "local" and op.option("window") and not op.option("shared_qk"):
        kind, window = "attention", op.option("window")
    found: dict[str, Any] = {"attention": kind, "window": window}
    if kind == "attention":
        scale = design.attention_scale or algorithm.scale or a["d_attention_key"] ** -0.5
        found["scale"] = float(f"{scale:.6g}")
        found["soft_cap"] = algorithm.soft_cap or design.soft_cap
        found["scale_by_length"] = algorithm.scale_by_length
        found["learned_sinks"] = getattr(algorithm, "learned_sinks", False)
        return found
    if op.name == "gated_delta":
        names = "gated", "normalized", "conv_size", "norm_epsilon", "negative_eigenvalues"
        found |= {name: getattr(algorithm, name) for name in names}
        found |= recurrent_sizes(spec)
    return found


def recurrent_sizes(spec: Spec) -> dict[str, int]:
    """The heads of recurrences, and their sizes."""
    a, design = spec.arguments, spec.design
    heads = design.recurrent_heads or a["n_heads"]
    return dict(
        recurrent_heads=heads,
        recurrent_qk_heads=design.recurrent_qk_heads or a["n_qk_heads"] or heads,
        recurrent_d_key=design.recurrent_d_key or a["d_attention_key"],
        recurrent_d_value=design.recurrent_d_value or a["d_attention_value"],
    )


def differences(spec: Spec, other: Spec) -> list[str]:
    """The differences of two models, a phrase for each."""
    ours, theirs = function_of(spec), function_of(other)
    names = dict.fromkeys([*ours, *theirs])
    return [
        f"{name} is {shown(ours.get(name))}, expected {shown(theirs.get(name))}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


# config.json


def decoder_of(spec: Spec) -> Decoder:
    """A model as families read it."""
    rotating = spec.rotating
    kinds, windows, recurrence = [], [], {}
    for _, _, _, op in spec.layers():
        found = _layer_function(spec, op)
        if op.name == "gated_delta":
            kinds.append(RECURRENT)
            recurrence = found
        else:
            kinds.append(FULL if found["window"] is None else WINDOW)
            windows.append(found["window"])
    window = next((x for x in windows if x is not None), None)
    return Decoder(spec, kinds, window, [rotating[b] for _, b, _, _ in spec.layers()], recurrence)


def config_of(family: Family, spec: Spec, like: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model.

    Args:
      family: what it goes out as.
      spec: the model.
      like: the config.json that it was read from, or {}: kept where it says the same.

    Raises:
      ValueError: a model of the family computes something else; the error says what.
    """
    known = {family.model_type, family.within}
    like = text_of(family, like) if like.get("model_type") in known else {}
    names = {"model_type": family.model_type, "architectures": [family.architecture]}
    if like and not differences(spec, spec_of(family, like)[0]):
        return {name: x for name, x in like.items() if name != "auto_map"} | names  # names code
    config = _written(family, decoder_of(spec)) | {k: like[k] for k in _KEPT if k in like}
    config |= {"bos_token_id": spec.arguments["first_token"]}
    try:
        found, _ = spec_of(family, config)
    except ValueError as error:  # the family has no such value
        raise ValueError(
            f"Hugging Face has no such model: {error}, of {family.architecture}"
        ) from None
    obstacles, a = differences(spec, found), spec.arguments
    if family.whole_heads and a["d_model"] % a["n_heads"]:
        obstacles.append(f"d_model is {a['d_model']}, expected a multiple of {a['n_heads']} heads")
    if obstacles:
        raise NoSuchModel(family, obstacles)
    return config


def of_length(config: Mapping[str, Any], length: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that says the longest text that its model was trained on.

    It says no less than the config.json that the model was read from. Where positions are scaled by
    lengths it stays as it is.
    """
    tables = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    tables += [table.get(FULL) or {} for table in tables]
    kinds = [table.get("rope_type", table.get("type", "default")) for table in tables]
    if any(kind != "default" for kind in kinds):
        return dict(config)
    known = config["max_position_embeddings"] if like else 0
    return {**config, "max_position_embeddings": max(length, known)}


class NoSuchModel(ValueError):
    """No model of a family is the same function."""

    def __init__(self, family: Family, obstacles: list[str]):
        self.obstacles = obstacles
        super().__init__(
            f"Hugging Face has no such model: {'; '.join(obstacles)} for the closest, "
            f"{family.architecture}"
        )


def _written(family: Family, decoder: Decoder) -> dict[str, Any]:
    """A config.json with the model's sizes and choices."""
    spec, design = decoder.spec, decoder.design
    a = spec.arguments
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "attention_dropout": a["attention_dropout"],
        "bos_token_id": a["first_token"],
        "eos_token_id": None,
        "pad_token_id": None,
        "head_dim": a["d_attention_key"],
        family.activation: activation_of(spec, None),
        "hidden_size": a["d_model"],
        "initializer_range": design.init_std or 0.02,
        "intermediate_size": a["d_ff"],
        "max_position_embeddings": 32768,
        "num_attention_heads": a["n_heads"],
        "num_hidden_layers": a["n_layers"],
        "num_key_value_heads": a["n_kv_heads"] or a["n_heads"],
        "rms_norm_eps": design.norm_epsilon,
        "tie_word_embeddings": a["tie_embeddings"],
        "vocab_size": a["vocab_size"],
    }
    return config | hugging_face_rotary.fields_of(family, design) | family.written(decoder)
