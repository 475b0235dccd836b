"""Rotary positions of decoders in Hugging Face's format, and as choices of a design.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`, which may be one
table for each kind of layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from reformax.convert.hugging_face_family import FULL, WINDOW, Family, Layer
from reformax.declared import Size, check, shown
from reformax.models.designs import Design
from reformax.ops.numerics.rotary import (
    TURNS,
    PairFactor,
    RotaryAngles,
    RotaryBase,
    RotaryFactor,
    Turns,
)
from reformax.ops.numerics.rotary import RotaryFraction as Fraction


def design_of(family: Family, get: Mapping[str, Any], layers: list[Layer]) -> dict[str, Any]:
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


def notes(get: Mapping[str, Any]) -> list[str]:
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


def canonical(angles: RotaryAngles) -> RotaryAngles:
    """Angles with all numbers written out."""
    if angles.scaling not in TURNS:
        return angles
    slow, fast = TURNS[angles.scaling]
    turns = dict(slow_turns=angles.slow_turns or slow, fast_turns=angles.fast_turns or fast)
    return dataclasses.replace(angles, **turns)


def fields_of(family: Family, design: Design) -> dict[str, Any]:
    """The fields of rotary positions, as versions 4 and 5 of transformers read them."""
    table = _table(design.rotary)
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


def _table(angles: RotaryAngles) -> dict[str, Any]:
    """What `_angles` reads."""
    angles = canonical(angles)
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
