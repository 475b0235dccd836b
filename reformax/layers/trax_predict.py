"""Refuses Trax's mode "predict".

Trax gives a mode to each layer's constructor, and nothing to the model around it. Its models of
mode "predict" read one position a call and keep the past as state, which these layers do not.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from reformax.declared import SettingError
from reformax.layers._trax import tl

USE_EVAL = (
    "build the model with mode='eval' and sample with autoregressive_sample(..., eval_mode=True)"
)


def check_predict(layer: tl.Layer) -> None:
    """Raises a `SettingError` for a layer that is initialised in a Trax model of mode "predict"."""
    enclosing = [_stated_modes(model) for model in _initialising() if model is not layer]
    if not enclosing or "predict" not in enclosing[-1]:
        return
    model = f"a Trax model with mode='predict' ({enclosing[-1]['predict']})"
    if layer.drops:
        raise SettingError(
            f"{layer.name} has mode='train' in {model}, where it would drop: give it mode='eval'"
        )
    # An encoder is read whole, and its layers have mode "eval". Attention is causal in no encoder.
    causal = getattr(layer, "causal", False)
    nearest = next(modes for modes in enclosing if modes.keys() & {"eval", "predict"})
    if layer.needs_past and (causal or "predict" in nearest):
        raise SettingError(f"{layer.name} is in {model}, and keeps no past there: {USE_EVAL}")


def refuse_one_position(layer: tl.Layer, x: Any) -> None:
    """Raises a `SettingError` for one position in training, which is a "predict" that was lost."""
    mode = getattr(layer, "mode", None)
    one = layer.needs_past and mode == "train" and x.ndim > 1 and x.shape[1] == 1
    if one and next(_initialising(), None) is None:
        raise SettingError(
            f"{layer.name} has mode='train' and reads a sequence of one position, of which it "
            f"keeps nothing for the next: {USE_EVAL}"
        )


def _initialising() -> Iterator[tl.Layer]:
    """The layers whose `init_weights_and_state` is running, innermost first.

    A Trax layer does not know the model that it is in: only the calls show it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        layer = frame.f_locals.get("self")
        if frame.f_code.co_name == "init_weights_and_state" and isinstance(layer, tl.Layer):
            yield layer
        frame = frame.f_back


def _stated_modes(layer: tl.Layer) -> dict[str, str]:
    """The modes of a layer and of all layers in it, each with the name of a layer that has it."""
    mode = getattr(layer, "mode", None) or getattr(layer, "_mode", None)
    mode = mode or _mode_in(getattr(layer, "_forward_fn", None))
    modes = {mode: layer.name} if isinstance(mode, str) else {}
    for sublayer in layer.sublayers:
        modes = _stated_modes(sublayer) | modes
    return modes


def _mode_in(forward: Any) -> Any:
    """The mode that a `tl.Fn`, such as `ShiftRight`, has from where its function was defined."""
    functions, depth = [forward], 2  # `Fn` wraps the function that has the mode
    for _ in range(depth):
        functions = [f for f in functions if inspect.isfunction(f)]
        held = [inspect.getclosurevars(f).nonlocals for f in functions]
        if mode := next((names["mode"] for names in held if "mode" in names), None):
            return mode
        functions = [value for names in held for value in names.values()]
    return None
