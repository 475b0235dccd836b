"""The base class of layers: two pure functions, and Trax's protocol around them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from reformax.declared import SettingError, shown
from reformax.layers._trax import HAS_TRAX, NotInstalled, tl
from reformax.ops.base import AttentionOp

if HAS_TRAX:

    class _Base(tl.Layer):
        """Trax's layer."""

        def _set_weights(self, weights: Any) -> None:
            # JAX sorts the keys of a dict. Trax pairs weights with gradients, and with the arrays
            # of a file, by the order of insertion. The two orders must agree.
            tl.Layer.weights.fset(self, jax.tree.map(lambda leaf: leaf, weights))

        weights = tl.Layer.weights.setter(_set_weights)

else:

    class _Base:
        """Replaces Trax's layer where Trax is not installed: numbers of arrays, a name."""

        def __init__(self, n_in: int, n_out: int, name: str | None):
            self.n_in, self.n_out = n_in, n_out
            self.name = type(self).__name__ if name is None else name

        def __call__(self, *args, **kwargs):
            raise NotInstalled("trax", f"a call of {self.name}")

        def __getattr__(self, attribute: str) -> Any:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {attribute!r}, or it is one of "
                "Trax's layers: these need pip install 'reformax[trax]'"
            )

        def __repr__(self) -> str:
            counts = (("in", self.n_in), ("out", self.n_out))
            return "".join([self.name, *(f"_{what}{n}" for what, n in counts if n != 1)])


class Layer(_Base):
    """A Trax layer around two pure functions, which a subclass defines: `init_params`, `apply`.

    It works wherever Trax takes a layer. The two functions also work where Trax is not
    installed. Its weights are any tree of arrays, by convention a dict of names; a layer made of
    others keeps theirs under their names. It has no state.

    A constructor keeps an argument `x` as `self._x`, which `repr` then shows. A layer with many
    arguments is a dataclass: its fields are public.
    """

    def __init__(self, n_in: int = 1, n_out: int = 1, name: str | None = None):
        """Args:
        n_in: how many arrays `apply` takes after the parameters.
        n_out: how many it returns.
        name: shown in error messages and by `repr`; None is the class's name.
        """
        super().__init__(n_in=n_in, n_out=n_out, name=name)
        frame = sys._getframe(1)
        constructors = ("__init__", "__post_init__")
        while frame.f_code.co_name in constructors and frame.f_locals.get("self") is self:
            frame = frame.f_back
        # For Trax's error messages: the line that made this layer, not one in its constructor.
        self._caller = {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno}

    def _settable_attrs(self) -> tuple[str, ...]:
        """Trax's protocol: the public attributes that can be assigned."""
        return (*super()._settable_attrs(), *getattr(self, "__dataclass_fields__", ()))

    def without_output_bias(self, params) -> tuple[Any, Array | None]:
        """The weights by which the output has no bias, and the bias, for a norm that adds it.

        It is None where no norm may add it, as by default.
        """
        return params, None

    @property
    def needs_past(self) -> bool:
        """Whether an output depends on earlier positions, or on its index in the sequence.

        Such a layer cannot read one position at a time, as Trax's models of mode "predict" do.
        """
        return bool(getattr(self, "causal", False))

    @property
    def drops(self) -> bool:
        """Whether `apply` drops weights or features at random."""
        return False

    def init_params(self, rng, *shapes: tuple[int, ...]) -> Any:
        """Fresh float32 parameters for inputs of these shapes, batch included; the base class has
        none: `()`.
        """
        del rng, shapes
        return ()

    def apply(self, params, *inputs, rng=None) -> Any:
        """The layer's output for `n_in` inputs; a tuple if `n_out` is not 1."""
        raise NotImplementedError(f"{type(self).__name__} does not define apply")

    def init_weights_and_state(self, input_signature) -> None:
        """Trax's protocol: draws the weights for a `ShapeDtype`, or a tuple of `n_in` of them."""
        _check_predict(self)
        signatures = self._inputs_of(input_signature)
        self.weights = self.init_params(self.rng, *(tuple(s.shape) for s in signatures))

    def forward(self, inputs) -> Any:
        """Trax's protocol: `apply` with the weights and the rng that Trax has put in `self`."""
        inputs = self._inputs_of(inputs)
        refuse_one_position(self, inputs[0])
        return self.apply(self.weights, *inputs, rng=self.rng)

    def _inputs_of(self, inputs) -> tuple[Any, ...]:
        """The inputs, of which Trax passes one as it is.

        Raises:
          ValueError: other than `n_in`.
        """
        found = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        if len(found) != self.n_in:
            masked, several = getattr(self, "masked", None), self.n_in > 1
            fix = "pass a tuple" if several else "pass one array"
            fix += ", the mask of masked=True last" if masked else ""
            fix += ", or set masked=True to pass a mask" if masked is False else ""
            raise ValueError(
                f"{type(self).__name__} reads {self.n_in} input{'s' * several} and got "
                f"{len(found)}: {fix}"
            )
        return tuple(found)

    def __repr__(self) -> str:
        """The name, with the plain constructor arguments that differ from their defaults."""
        shown = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = getattr(self, f"_{name}", getattr(self, name, parameter.default))
            parts = value if isinstance(value, tuple) else (value,)
            plain = all(isinstance(part, (bool, int, float, str, AttentionOp)) for part in parts)
            if name != "name" and plain and value != parameter.default:
                shown.append(f"{name}={value!r}")
        return f"{super().__repr__()}({', '.join(shown)})"


def check_shape(shape: Any) -> None:
    """Raises `ValueError` unless `shape` is that of an input.

    Traced sizes pass, as in `jax.eval_shape(model.init_params, rng, (1, 16))`.
    """
    sizes = shape if isinstance(shape, tuple | list) else ()
    known = [n for n in sizes if not isinstance(n, jax.core.Tracer)]
    if not sizes or not all(isinstance(n, int | np.integer) and n > 0 for n in known):
        raise ValueError(
            f"shape is {shown(shape)}: expected that of an input without an axis of size 0, such "
            "as x.shape"
        )


def check_weights(layer: Layer, params: Any, wanted: Iterable[str]) -> None:
    """Raises `ValueError` unless these are the matrices and biases in `params`, all and no others.

    Names of these, and of no other weights, begin with w or b.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"params is {shown(params)}: expected a dict, as of init_params")
    found, wanted = {name for name in params if name[0] in "wb"}, set(wanted)
    if found != wanted:
        name = min(found ^ wanted)
        has = "no " if name in wanted else ""
        names = ", ".join(sorted(wanted))
        raise ValueError(f"params has {has}{name}: expected {names} of {layer}")


# Trax gives a mode to each layer's constructor, and nothing to the model around it. Its models of
# mode "predict" read one position a call and keep the past as state, which these layers do not.

USE_EVAL = (
    "build the model with mode='eval' and sample with autoregressive_sample(..., eval_mode=True)"
)


def _check_predict(layer: Layer) -> None:
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


def refuse_one_position(layer: Layer, x: Any) -> None:
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
