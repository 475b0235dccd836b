"""Which weights Muon updates, as which matrices, and at what rates in models of another width."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import jax
import optax
import optax.contrib

from reformax.declared import SettingError
from reformax.training.named_tensors import name_of

# The matrices of a stack's linear maps: queries, keys, values, gates, outputs, hidden layers.
MATRICES = r"(attention|feed_forward)\.w(\d|_\w+)$"
# The matrix that logits are made by: one of its own, or else the tied embedding.
READOUTS = r"(^|\.)logits\.w$", r"(^|\.)embedding$"


def rates_by_width(width: int, base_width: int, rms: float | None) -> tuple[float, float]:
    """What Muon's rate, and that of the matrix of logits, are multiplied by in a wider model.

    An update's spectral norm should stay the root of outputs / inputs at every width (Yang et al.
    2023, "A Spectral Condition for Feature Learning", condition 1). A matrix of equal singular
    values and a given root mean square has the root of its size, so that Muon's rate falls with the
    root of the width; without `rms` the norm is that already. Adam's updates of the matrix of
    logits add up along the features, so that its rate falls with the width; it stays for
    embeddings that are not tied, norms and biases (Yang et al. 2022, "Tensor Programs V", table 3).
    """
    ratio = base_width / width
    return 1.0 if rms is None else math.sqrt(ratio), ratio


def times(factor: float, rate: float | optax.Schedule) -> float | optax.Schedule:
    """A rate, or a schedule of it, times a factor."""
    if factor == 1:
        return rate
    return (lambda count: factor * rate(count)) if callable(rate) else factor * rate


def groups(matrices: str, readouts: Sequence[str], params):
    """The name of each parameter's optimizer: "muon", "adam", or "readout" for Adam of logits."""
    names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found = (x for x in readouts if any(re.search(x, name) for name in names))
    readout = next(found, None)

    def group(path, leaf):
        if leaf.ndim >= 2 and re.search(matrices, name_of(path), re.IGNORECASE):
            return "muon"
        return "readout" if readout and re.search(readout, name_of(path)) else "adam"

    groups = jax.tree_util.tree_map_with_path(group, params)
    if "muon" not in jax.tree.leaves(groups):
        raise SettingError(
            f"muon.matrices is {matrices!r}, which no trained parameter's name has: expected that "
            "of matrices, or another optimizer, as for the factors of fine_tuning.Lora"
        )
    return groups


def axes_of_matrix(path) -> optax.contrib.MuonDimensionNumbers:
    """Which axes of a weight are a matrix's inputs and outputs; others are of other matrices.

    Args:
      path: of the weight, in the model's parameters.
    """
    *_, layer, name = (str(getattr(key, "key", key)) for key in (None, *path))
    if not layer.endswith("attention"):
        return optax.contrib.MuonDimensionNumbers(-2, -1)
    if name == "w_o":  # [N, V, D]
        return optax.contrib.MuonDimensionNumbers((-3, -2), -1)
    return optax.contrib.MuonDimensionNumbers(-2, (-3, -1))  # [N, D, H]
