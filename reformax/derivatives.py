"""Functions whose backward pass is written out, and which `jax.jvp` differentiates as well.

`jax.custom_vjp` refuses forward mode. A `CustomDerivatives` has both: reverse mode runs its
backward pass and stores the residuals of its forward pass alone; forward mode runs its tangent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad, batching, mlir

KERNEL_REFUSAL = (
    "jax.jvp (forward-mode differentiation) of an attention kernel is not implemented: set "
    "impl='xla' of the op, which has it, or use jax.grad"
)


class CustomDerivatives:
    """A function with a backward pass and a tangent of its own, to be called like the function.

    `define` gives both, as `defvjp` of `jax.custom_vjp` does.

    Args:
      function: of `n_static` hashable arguments, and then of trees of arrays.
      n_static: the number of the former.
    """

    def __init__(self, function: Callable, n_static: int = 0):
        functools.update_wrapper(self, function)
        self.function = function
        self._n_static = n_static
        self._call = jax.custom_jvp(function, nondiff_argnums=tuple(range(n_static)))

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def define(
        self, forward: Callable, backward: Callable, tangent: Callable | None = None
    ) -> None:
        """Sets the passes; each takes the static arguments first.

        Args:
          forward: `(*arrays) -> (out, residuals)`.
          backward: `(residuals, d_out) -> gradients`, a tuple of one for each tree of arrays; None
            for a tree without a gradient.
          tangent: `(residuals, tangents) -> tangent of out`, where `tangents` has a tree for each
            tree of arrays, of float0 for integers. None refuses forward mode; a forward pass with
            loops needs one that refuses, for the sake of memory.
        """

        def jvp(*args):
            static, (primals, tangents) = args[: self._n_static], args[self._n_static :]
            run = functools.partial(forward, *static)
            # Policies of `jax.checkpoint` see the names in a kernel's pass, which has no loops.
            out, residuals = _as_one_call(run, primals) if tangent else run(*primals)
            passes = (functools.partial(f, *static) if f else None for f in (backward, tangent))
            return out, _linear(*passes, primals, residuals, tangents, out)

        self._call.defjvp(jvp, symbolic_zeros=True)


def tangent_of(function: Callable, primals: tuple, tangents: tuple) -> Any:
    """The tangent of `function`, which JAX differentiates."""
    return jax.jvp(function, primals, tangents)[1]


def _linear(backward, tangent, primals, residuals, tangents, out) -> Any:
    """The tangent of `out` as a primitive, linear in those tangents that are not zero."""
    tangents, tree = jax.tree.flatten(tangents, is_leaf=_is_zero)
    residuals, residual_tree = jax.tree.flatten(residuals)
    out, out_tree = jax.tree.flatten(out)
    given = [not _is_zero(t) and jax.typeof(t).dtype != jax.dtypes.float0 for t in tangents]
    avals = [jax.typeof(x).to_tangent_aval() for x in jax.tree.leaves(primals)]

    def forward(residuals, linear):
        if tangent is None:
            raise NotImplementedError(KERNEL_REFUSAL)
        linear = iter(linear)
        leaves = [next(linear) if g else _zeros(a) for g, a in zip(given, avals, strict=True)]
        arguments = residual_tree.unflatten(residuals), tree.unflatten(leaves)
        return jax.tree.leaves(tangent(*arguments))

    def transpose(residuals, d_out):
        gradients = backward(residual_tree.unflatten(residuals), out_tree.unflatten(d_out))
        leaves = []  # a None stands for those of a whole tree

        def add(gradient, part):
            leaves.extend([gradient] * len(jax.tree.leaves(part)))

        jax.tree.map(add, gradients, tree.unflatten(given), is_leaf=lambda x: x is None)
        kept = [(x, a) for x, a, g in zip(leaves, avals, given, strict=True) if g]
        for x, a in kept:
            if x is not None and x.dtype != a.dtype:
                raise TypeError(f"a backward pass returns {x.dtype} for an input of {a.dtype}")
        return [_zeros(a) if x is None else x for x, a in kept]

    linear = [t for t, g in zip(tangents, given, strict=True) if g]
    out_avals = tuple(jax.typeof(x).to_tangent_aval() for x in out)
    if not linear:
        return out_tree.unflatten(map(_zeros, out_avals))
    settings = dict(forward=forward, transpose=transpose, out_avals=out_avals)
    found = _linear_p.bind(*residuals, *linear, n_residuals=len(residuals), **settings)
    return out_tree.unflatten(found)


def _as_one_call(forward: Callable, primals: tuple) -> tuple:
    """`forward(*primals)` as one call, which JAX's partial evaluation in reverse mode leaves whole.

    It would move constants out of loops, where they take memory. Residuals that are arguments or
    outputs stay these, so nothing is stored twice.
    """
    leaves, tree = jax.tree.flatten(primals)
    found = {}

    def run(*leaves):
        out, residuals = forward(*tree.unflatten(leaves))
        residuals, found["tree"] = jax.tree.flatten(residuals)
        known = [*leaves, *jax.tree.leaves(out)]
        index = {id(x): i for i, x in reversed(list(enumerate(known)))}
        found["known"] = [index.get(id(x)) for x in residuals]
        return out, [x for x in residuals if id(x) not in index]

    call = jax.custom_jvp(run)
    call.defjvp(lambda primals, tangents: jax.jvp(run, primals, tangents))
    out, computed = call(*leaves)
    known, computed = [*leaves, *jax.tree.leaves(out)], iter(computed)
    residuals = [next(computed) if i is None else known[i] for i in found["known"]]
    return out, found["tree"].unflatten(residuals)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _zeros(aval: Any) -> Any:
    """Zeros of a tangent, which of integers are NumPy's."""
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    return ad.instantiate_zeros(ad.Zero(aval))


# The primitive: `forward(residuals, linear)`, whose transpose is `transpose(residuals, d_out)`.
# JAX's own `linear_call` traces both at once, cannot be batched, and has no derivative.

_linear_p = core.Primitive("linear_with_transpose")
_linear_p.multiple_results = True


def _evaluate(*operands, n_residuals, forward, **_):
    return forward(operands[:n_residuals], operands[n_residuals:])


def _transpose(d_out, *operands, n_residuals, transpose, **_):
    d_out = [ad.instantiate_zeros(d) for d in d_out]
    gradients = transpose(operands[:n_residuals], d_out)
    linear = zip(operands[n_residuals:], gradients, strict=True)
    return [None] * n_residuals + [g if ad.is_undefined_primal(x) else None for x, g in linear]


def _differentiate(primals, tangents, *, n_residuals, **settings):
    bind = functools.partial(_linear_p.bind, n_residuals=n_residuals, **settings)
    if all(type(t) is ad.Zero for t in tangents[:n_residuals]):
        linear = map(ad.instantiate_zeros, tangents[n_residuals:])
        return bind(*primals), bind(*primals[:n_residuals], *linear)
    evaluate = functools.partial(_evaluate, n_residuals=n_residuals, **settings)
    tangents = [_zeros(t.aval) if type(t) is ad.Zero else t for t in tangents]
    return jax.jvp(evaluate, tuple(primals), tuple(tangents))


def _batch(operands, axes, *, n_residuals, forward, transpose, out_avals):
    """Linear operands that are not batched become so: their gradients are then summed."""
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    residuals, of_residuals = operands[:n_residuals], list(axes[:n_residuals])
    linear = [
        jnp.broadcast_to(x, (size, *jnp.shape(x))) if a is None else jnp.moveaxis(x, a, 0)
        for x, a in zip(operands[n_residuals:], axes[n_residuals:], strict=True)
    ]
    settings = dict(in_axes=(of_residuals, 0), axis_size=size)
    found = _linear_p.bind(
        *residuals,
        *linear,
        n_residuals=n_residuals,
        forward=_on_lists(jax.vmap(forward, **settings)),
        transpose=_on_lists(jax.vmap(transpose, **settings)),
        out_avals=tuple(core.unmapped_aval(size, 0, a) for a in out_avals),
    )
    return found, [0] * len(found)


def _on_lists(function: Callable) -> Callable:
    return lambda *arguments: function(*map(list, arguments))


_linear_p.def_impl(_evaluate)
_linear_p.def_abstract_eval(lambda *_, out_avals, **__: out_avals)
ad.primitive_transposes[_linear_p] = _transpose
ad.primitive_jvps[_linear_p] = _differentiate
batching.primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(_evaluate, multiple_results=True))
