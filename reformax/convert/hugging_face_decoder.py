"""Decoders of `hugging_face_families`: the model of a config.json, and the config.json of a model.

A model goes out as the family whose config.json, read again, is the same function. Where none is,
the error says by which arguments the closest one differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reformax.convert.hugging_face_config import ACTIVATIONS, activation_of
from reformax.convert.hugging_face_families import FULL, RECURRENT, WINDOW, Family, Layer
from reformax.convert.spec import DENSE, OPS, Op, Spec, cycle_of
from reformax.declared import Size, check, shown
from reformax.layers.layer_norm import norm_places
from reformax.models.base import ROTARY
from reformax.models.designs import Design
from reformax.ops import AttentionOp
from reformax.ops.numerics.rotary import (
    TURNS,
    PairFactor,
    RotaryAngles,
    RotaryBase,
    RotaryFactor,
    Turns,
)
from reformax.ops.numerics.rotary import RotaryFraction as Fraction

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
    get = {name: config.get(name, field.default) for name, field in family.all_fields.items()}
    for name, field in family.all_fields.items():
        check(name, get[name], field.hint)
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
    design |= family.design(get) | _rotary(family, get, layers)
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
    notes += _notes_on_positions(get)
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


# Rotary positions. Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`,
# which may be one table for each kind of layers.


def _rotary(family: Family, get: Mapping[str, Any], layers: list[Layer]) -> dict[str, Any]:
    """The choices of the angles."""
    if not any(layer.rotates for layer in layers):
        return {}
    given, scaling = (get[name] or {} for name in ("rope_parameters", "rope_scaling"))
    whole, local = scaling or given, None
    nested = [given.get(kind) for kind in (FULL, WINDOW)]
    if any(isinstance(table, Mapping) for table in nested):
        for kind, table in zip((FULL, WINDOW), nested, strict=True):
            check(f"{kind} of rope_parameters", table, Mapping[str, Any] | None)
        whole, local = (table or {} for table in nested)
        whole = {**whole, **scaling}
        if family.local_theta is None:
            raise ValueError(
                f"rope_parameters is {shown(given)}: expected one table for all layers"
            )
    angles = _angles(family, get, whole, get["rope_theta"] or family.theta)
    design = {f"rotary_{name}": value for name, value in angles.items()}
    if family.local_theta is None or not any(layer.kind == WINDOW for layer in layers):
        return design
    theta = get.get("rope_local_base_freq") or family.local_theta
    if local is not None:
        near = _angles(family, get, local, theta)
        if near.keys() - {"base", "fraction"}:
            raise ValueError(
                f"rope_parameters of sliding_attention is {shown(local)}: expected rope_type "
                "'default'"
            )
        theta = near.get("base", RotaryAngles().base)
    if theta != angles["base"] or "scaling" in angles:
        design["rotary_local_base"] = theta
    return design


def _angles(family: Family, get, table: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Arguments of `RotaryAngles` of a table that says how positions rotate."""

    def number(name: str, hint: Any, default: Any = None) -> Any:
        value = table.get(name, default)
        return check(f"{name} of rope_parameters", value, hint)

    kind = table.get("rope_type", table.get("type", "default"))
    found: dict[str, Any] = {"base": float(number("rope_theta", RotaryBase, theta))}
    fraction = get["partial_rotary_factor"]
    fraction = number(
        "partial_rotary_factor", Fraction, family.fraction if fraction is None else fraction
    )
    if fraction != 1.0 and not family.partial:
        raise ValueError(
            f"partial_rotary_factor is {fraction}: expected 1.0 of {family.model_type}"
        )
    if fraction != 1.0:
        found["fraction"] = float(fraction)
    if kind == "default":
        return found
    if kind not in family.scalings:
        known = ", ".join(map(repr, ("default", *family.scalings)))
        raise ValueError(f"rope_type is {shown(kind)}: expected one of {known}")
    if kind == "longrope":
        return found | _longrope(get, table)
    factor = float(number("factor", RotaryFactor))
    if factor == 1.0 or kind == "dynamic":  # which stretches longer texts than the model's
        return found
    found |= {"scaling": kind, "factor": factor}
    if kind == "linear":
        return found
    length = get.get("original_max_position_embeddings") or get["max_position_embeddings"]
    found["trained_length"] = number("original_max_position_embeddings", Size, length)
    slow, fast = TURNS[kind]
    names = (
        ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    )
    for name, ours, usual in zip(names, ("slow_turns", "fast_turns"), (slow, fast), strict=True):
        value = table.get(name)
        value = float(check(f"{name} of rope_parameters", usual if value is None else value, Turns))
        if value != usual:
            found[ours] = value
    if kind == "yarn":
        _check_yarn(table, factor)
    return found


def _longrope(get, table: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `RotaryAngles` of two factors for each pair."""
    name = "original_max_position_embeddings"
    trained = check(f"{name} of rope_parameters", table.get(name, get.get(name)), Size)
    factor = table.get("factor")
    factor = get["max_position_embeddings"] / trained if factor is None else factor
    factor = float(check("factor of rope_parameters", factor, RotaryFactor))
    if factor == 1.0:
        raise ValueError("factor of rope_parameters is 1: expected more of rope_type 'longrope'")
    found = {"scaling": "longrope", "factor": factor, "trained_length": trained}
    for key, ours in (("short_factor", "short_factors"), ("long_factor", "long_factors")):
        values = check(f"{key} of rope_parameters", table.get(key), Sequence[PairFactor])
        found[ours] = tuple(map(float, values))
    usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if trained > 1 else math.inf
    _check_attention_factor(
        table, usual, "sqrt(1 + ln factor / ln original_max_position_embeddings)"
    )
    return found


def _notes_on_positions(get: Mapping[str, Any]) -> list[str]:
    """A line on a longer text, where this package's positions are others."""
    tables = [get[name] or {} for name in ("rope_scaling", "rope_parameters")]
    kinds = [table.get("rope_type", table.get("type")) for table in tables]
    if "dynamic" not in kinds:
        return []
    return [
        f"rope_type is 'dynamic': up to max_position_embeddings={get['max_position_embeddings']:,} "
        "tokens positions are the same; transformers stretches those of longer texts, and this "
        "model does not"
    ]


def _check_attention_factor(table: Mapping[str, Any], usual: float, formula: str) -> None:
    """Raises `ValueError` for another multiple of queries and keys than the usual one."""
    given = table.get("attention_factor")
    close = isinstance(given, float | int) and abs(given - usual) < 1e-6
    if given is not None and not close:
        raise ValueError(
            f"attention_factor of rope_parameters is {shown(given)}: expected {usual:.9g}, which "
            f"is {formula}"
        )


def _check_yarn(table: Mapping[str, Any], factor: float) -> None:
    """Raises `ValueError` for options that `RotaryAngles` does not have."""
    _check_attention_factor(table, 0.1 * math.log(factor) + 1, "0.1 ln factor + 1")
    for name, wanted in (("truncate", True), ("mscale", None), ("mscale_all_dim", None)):
        if table.get(name, wanted) not in (wanted, None):
            raise ValueError(
                f"{name} of rope_parameters is {shown(table[name])}: expected {wanted}"
            )


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
    rotating, n = rotating_of(spec), len(spec.attention)
    places = norm_places(design.norm_place, n)
    for layer, block, _, op in spec.layers():
        angles = None
        if rotating[block]:
            angles = _canonical(design.rotary_of(algorithm_of(op)))
        of_layer = _layer_function(spec, op) | {"rotary positions": angles}
        of_layer["norm_place"] = places[block]
        found |= {f"{name} of layer {layer}": value for name, value in of_layer.items()}
    return found


def algorithm_of(op: Op) -> AttentionOp:
    """The algorithm of a layer."""
    return OPS[op.name](**op.options)


def rotating_of(spec: Spec) -> list[bool]:
    """Whether each layer of the cycle rotates queries and keys."""
    ops = [algorithm_of(op) for op in spec.attention]
    return spec.design.rotating(spec.arguments["pos_type"], ops)


def _canonical(angles: RotaryAngles) -> RotaryAngles:
    """Angles with all numbers written out."""
    if angles.scaling not in TURNS:
        return angles
    slow, fast = TURNS[angles.scaling]
    turns = dict(slow_turns=angles.slow_turns or slow, fast_turns=angles.fast_turns or fast)
    return dataclasses.replace(angles, **turns)


def _layer_function(spec: Spec, op: Op) -> dict[str, Any]:
    """What the attention of a layer computes."""
    a, design = spec.arguments, spec.design
    algorithm = algorithm_of(op)
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
    rotating = rotating_of(spec)
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
    own = {"model_type": family.model_type, "architectures": [family.architecture]}
    if like and not differences(spec, spec_of(family, like)[0]):
        return {name: x for name, x in like.items() if name != "auto_map"} | own  # names code
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
        more = f" (and {len(obstacles) - 1} more differences)" if len(obstacles) > 1 else ""
        super().__init__(
            f"Hugging Face has no such model: {obstacles[0]}{more} for the closest, "
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
    return config | _rope_fields(family, decoder) | family.written(decoder)


def _rope_fields(family: Family, decoder: Decoder) -> dict[str, Any]:
    """The fields of rotary positions, as versions 4 and 5 of transformers read them."""
    design = decoder.design
    table = _rope_table(design.rotary)
    theta = design.rotary.base
    whole = table | {"rope_theta": theta}
    found: dict[str, Any] = {"rope_parameters": whole, "rope_theta": theta}
    if (fraction := design.rotary.fraction) != family.fraction:
        found |= {"partial_rotary_factor": fraction}
        whole["partial_rotary_factor"] = fraction
    if design.rotary.scaling is not None:
        found["rope_scaling"] = table
    if family.local_theta is not None:
        local = design.rotary_local_base or theta
        near = {"rope_type": "default", "rope_theta": local}
        found |= {"rope_parameters": {FULL: whole, WINDOW: near}, "rope_local_base_freq": local}
    return found


def _rope_table(angles: RotaryAngles) -> dict[str, Any]:
    """What `_angles` reads."""
    angles = _canonical(angles)
    table: dict[str, Any] = {"rope_type": angles.scaling or "default"}
    if angles.scaling is not None:
        table["factor"] = angles.factor
    if angles.scaling == "longrope":
        table |= {
            "short_factor": list(angles.short_factors),
            "long_factor": list(angles.long_factors),
            "original_max_position_embeddings": angles.trained_length,
        }
    if angles.scaling in TURNS:
        table["original_max_position_embeddings"] = angles.trained_length
        yarn = angles.scaling == "yarn"
        names = ("beta_slow", "beta_fast") if yarn else ("low_freq_factor", "high_freq_factor")
        table |= dict(zip(names, (angles.slow_turns, angles.fast_turns), strict=True))
    return table
