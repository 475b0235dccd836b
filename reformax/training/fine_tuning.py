"""Fine-tuning of some weights, or of low-rank changes of matrices (LoRA).

Both are transformations of an optimizer: the optimizer sees, and has a state for, what is trained.
A run's parameters stay those of its model, with changes of matrices added in. So every checkpoint
is scored, averaged, exported and begun with (`init_from`) as any other.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from reformax.declared import Pattern, Positive, Seed, SettingError, Size, check_fields
from reformax.training.muon_matrices import MATRICES, axes_of_matrix
from reformax.training.named_tensors import n_axes_of, name_of
from reformax.training.optimizer import Optimizer, scheduled

# Weights of several axes that are no matrices, such as biases of heads.
_NO_MATRIX = re.compile(r"norm|bias|scale|(^|\.)b(\d|_\w+)?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Changes `alpha / rank * down @ up` of matrices (Hu et al. 2021, "LoRA", section 4.1).

    `down`, `[inputs, rank]`, is drawn and `up`, `[rank, outputs]`, begins as zeros. A projection of
    all heads is one matrix. The gradient of each whole matrix is computed, as in full training. The
    optimizer's state is smaller.

    Args:
      rank: of the change.
      alpha: its factor, times the rank; None: `rank`.
      matrices: a regular expression, found in the names of the matrices.
      seed: of the first values of `down`.
    """

    rank: Size = 8
    alpha: Positive | None = None
    matrices: Pattern = MATRICES
    seed: Seed = 0

    def __post_init__(self):
        check_fields(self)

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank

    def changes(self, path, leaf) -> bool:
        """Whether a weight, by its path in the parameters, is one of the matrices."""
        name = name_of(path)
        is_matrix = n_axes_of(name, leaf) >= 2 and not _NO_MATRIX.search(name)
        return is_matrix and bool(re.search(self.matrices, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning:
    """The weights that are trained; all others stay as they are.

    Args:
      only: regular expressions: weights with one of them in their names are trained, such as
        `('block_1', 'norm')`. Names are as in errors: `stack.block_0.attention.w_q`.
      lora: the matrices that low-rank changes are trained of, besides those of `only`, which are
        trained whole; None: of none.
    """

    only: Sequence[Pattern] = ()
    lora: Lora | None = None

    def __post_init__(self):
        check_fields(self)
        if not self.only and self.lora is None:
            raise SettingError(
                "FineTuning has neither only nor lora, so nothing would be trained: set one of them"
            )

    def of(self, optimizer: optax.GradientTransformation) -> Optimizer:
        """The optimizer of what is trained, with the schedules of the one given."""
        if isinstance(optimizer, Optimizer):
            rates = optimizer.schedules
            found = scheduled(rates, lambda *rates: self._of(optimizer.of_rates(*rates)))
        else:
            found = Optimizer(*self._of(optimizer))
        found.reads = self.trained
        return found

    def _of(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        inner = (
            optimizer if self.lora is None else by_factors(optimizer, self.lora, self._by_factors)
        )
        parts = {"trained": inner, "frozen": optax.set_to_zero()}
        return optax.partition(
            parts,
            lambda params: jax.tree.map(
                lambda x: "trained" if x else "frozen", self.are_trained(params)
            ),
        )

    def are_trained(self, params: Any) -> Any:
        """Whether each weight is trained.

        Raises:
          SettingError: a pattern that no weight's name has.
        """
        named = jax.tree_util.tree_leaves_with_path(params)
        names = [name_of(path) for path, _ in named]
        such = f"names are such as {', '.join(names[:3])}"
        for pattern in self.only:
            if not any(re.search(pattern, name) for name in names):
                raise SettingError(
                    f"fine_tuning.FineTuning.only has {pattern!r}, which no weight's name has: "
                    f"{such}"
                )
        if self.lora is not None and not any(self._by_factors(*x) for x in named):
            others = " besides those of FineTuning.only" if self.only else ""
            raise SettingError(
                f"fine_tuning.Lora.matrices is {self.lora.matrices!r}, which no matrix's name "
                f"has{others}: {such}"
            )
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._is_whole(path) or self._by_factors(path, leaf), params
        )

    def _is_whole(self, path) -> bool:
        """Whether a weight is one of `only`."""
        return any(re.search(pattern, name_of(path)) for pattern in self.only)

    def _by_factors(self, path, leaf) -> bool:
        """Whether a weight is trained by a low-rank change."""
        low_rank = self.lora is not None and self.lora.changes(path, leaf)
        return low_rank and not self._is_whole(path)

    def trained(self, tree: Any) -> Any:
        """The tree with None for each weight that is not trained."""
        return jax.tree.map(
            lambda x, is_trained: x if is_trained else None, tree, self.are_trained(tree)
        )

    def zeros_elsewhere(self, tree: Any) -> Any:
        """The tree, gradients or updates of weights, with zeros for each that is not trained."""
        return jax.tree.map(
            lambda x, is_trained: x if is_trained else jnp.zeros_like(x),
            tree,
            self.are_trained(tree),
        )


class FactorsState(NamedTuple):
    """The state of `by_factors`."""

    factors: dict[str, dict[str, Array]]  # by a matrix's name its "down" and "up"
    inner: Any  # the optimizer's


def by_factors(
    optimizer: optax.GradientTransformation, lora: Lora, changes: Callable[[Any, Any], bool]
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that trains matrices by the two factors of a change of theirs.

    It sees the factors in the place of matrices, with the gradients that these have by the chain
    rule, and all other weights as they are.

    Args:
      optimizer: of the factors and the other weights.
      lora: the changes' rank, factor and seed.
      changes: whether a weight is such a matrix, by its path in the parameters and itself.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params) -> FactorsState:
        factors = {}

        def first(path, leaf):
            if not changes(path, leaf):
                return leaf
            name = name_of(path)
            *outer, n_in, n_out = jax.eval_shape(
                lambda x: _Matrices(path, x.ndim).of(x), leaf
            ).shape
            key = jax.random.fold_in(jax.random.key(lora.seed), zlib.crc32(name.encode()))
            down = jax.random.normal(key, (*outer, n_in, lora.rank), leaf.dtype) / math.sqrt(n_in)
            up = jnp.zeros((*outer, lora.rank, n_out), leaf.dtype)
            factors[name] = {"down": down, "up": up}
            return factors[name]

        view = jax.tree_util.tree_map_with_path(first, params)
        return FactorsState(factors, inner.init(view))

    def update(gradients, state: FactorsState, params=None, **extra):
        named, tree = jax.tree_util.tree_flatten_with_path(gradients)
        weights, factors = tree.flatten_up_to(params), state.factors
        names = [name_of(path) for path, _ in named]
        matrices = {
            name: _Matrices(path, x.ndim)
            for name, (path, x) in zip(names, named, strict=True)
            if name in factors
        }

        def gradient(name, x):
            if name not in factors:
                return x
            down, up = factors[name]["down"], factors[name]["up"]
            whole = lora.scale * matrices[name].of(x)
            return {
                "down": _product(whole, _transposed(up)),
                "up": _product(_transposed(down), whole),
            }

        gradients = [gradient(name, x) for name, (_, x) in zip(names, named, strict=True)]
        view = [factors.get(name, x) for name, x in zip(names, weights, strict=True)]
        updates, after = inner.update(
            tree.unflatten(gradients), state.inner, tree.unflatten(view), **extra
        )
        updates, moved = tree.flatten_up_to(updates), {}

        def change(name, x, like):
            if name not in factors:
                return x
            before = factors[name]
            moved[name] = optax.apply_updates(before, x)
            # The difference of the products, without the cancellation.
            both = _product(x["down"], moved[name]["up"]) + _product(before["down"], x["up"])
            return matrices[name].back(lora.scale * both, like.shape)

        whole = [change(*x) for x in zip(names, updates, weights, strict=True)]
        return tree.unflatten(whole), FactorsState(moved, after)

    return optax.GradientTransformationExtraArgs(init, update)


class _Matrices:
    """A weight as matrices `[..., inputs, outputs]`, such as a projection of all heads as one."""

    def __init__(self, path, n_axes: int):
        axes = axes_of_matrix(path)
        groups = [
            [axis % n_axes for axis in (group if isinstance(group, tuple) else (group,))]
            for group in (axes.reduction_axis, axes.output_axis)
        ]
        others = [axis for axis in range(n_axes) if axis not in sum(groups, [])]
        self._order, self._n_outer, self._n_inputs = (
            sum(groups, others),
            len(others),
            len(groups[0]),
        )

    def of(self, x: Array) -> Float[Array, "*d I O"]:
        """The matrices of a weight."""
        x = x.transpose(self._order)
        sizes = x.shape[self._n_outer :]
        inputs, outputs = sizes[: self._n_inputs], sizes[self._n_inputs :]
        return x.reshape(*x.shape[: self._n_outer], math.prod(inputs), math.prod(outputs))

    def back(self, x: Float[Array, "*d I O"], shape: Sequence[int]) -> Array:
        """The weight of this shape that has these matrices."""
        x = x.reshape([shape[axis] for axis in self._order])
        return x.transpose(np.argsort(self._order))


def _product(a, b):
    return jnp.matmul(a, b, precision="highest")  # small; rounded, they would add up in weights


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)
