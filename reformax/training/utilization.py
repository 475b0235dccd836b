"""Model FLOP/s utilization: the share of a device's stated peak that a model's arithmetic takes.

From PaLM (Chowdhery et al. 2022), appendix B: what the model needs counts, and not what is computed
again. A step needs three times the products of matrices of one forward pass; those in kernels are
not seen.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.sharding import Mesh

from reformax import devices
from reformax.task import TaskModel
from reformax.training.forecast import products

# Dense products of bfloat16 matrices, in operations per second, as the makers state them. A device
# has the name whose words, one after the other, are all in its own; the longest of several.
PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L4": 121e12,
    "TPU v6 lite": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


def peak(model: TaskModel) -> float | None:
    """The stated operations per second of a device for a model's products.

    None for a device without, such as a CPU or a slice of a GPU, and for a model whose `dtype` is
    not 'bfloat16': of other products no peak is listed.
    """
    if model.dtype != "bfloat16":
        return None
    words = re.split(r"[\s-]+", jax.devices()[0].device_kind)
    if "MIG" in words:
        return None
    names = [name for name in PEAKS if _has(words, name.split())]
    names = [name for name in names if ("lite" in words) == ("lite" in name)]
    return PEAKS[max(names, key=len)] if names else None


def _has(words: list[str], part: list[str]) -> bool:
    """Whether some words are those of the part, one after the other."""
    return any(words[i : i + len(part)] == part for i in range(len(words)))


def flops_of_step(model, params: Any, inputs: Any, mesh: Mesh) -> int:
    """The operations that a step of the model needs on these inputs; nothing is computed."""

    def forward(params, inputs, rng):
        return model.logits(params, model.features(params, inputs, rng=rng))

    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return 3 * products(jax.make_jaxpr(devices.on(mesh, forward))(params, inputs, key)).flops
