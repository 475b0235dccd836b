"""The base class of layers: two pure functions, and Trax's protocol around them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from reformax.declared import shown
from reformax.layers._trax import HAS_TRAX, NotInstalled, tl
from reformax.layers.trax_predict import check_predict, refuse_one_position
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
        """The weights without the output's bias, and the bias, which the next norm adds instead.

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
        check_predict(self)
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

    Names of these, and of no other weights but norms, begin with w or b.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"params is {shown(params)}: expected a dict, as of init_params")
    found, wanted = {x for x in params if x[0] in "wb" and x[-5:] != "_norm"}, set(wanted)
    if found != wanted:
        name = min(found ^ wanted)
        has = "no " if name in wanted else ""
        names = ", ".join(sorted(wanted))
        raise ValueError(f"params has {has}{name}: expected {names} of {layer}")
