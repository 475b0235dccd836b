"""Attention to the tiles of a layout in kernels, for all ops that have one."""

from __future__ import annotations

from types import ModuleType

from jaxtyping import Array, Float, Int

from reformax.ops.softmax.block_lists import FullLayout, Layout


def kernels() -> ModuleType:
    """The kernels of a layout's attention: `forward`, `backward`, and `attend` with both."""
    from reformax.ops.kernels.triton import block_sparse

    return block_sparse


def attend(
    layout: Layout | FullLayout,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N V"],
    segment_ids: tuple[Int[Array, "B _"] | None, ...],
    seed: Int[Array, 6] | None,
    sinks: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
    """Attention by `kernels`, and each row's sum of weights, which has no gradient.

    Args:
      layout: which queries see which keys.
      interpret: from `dispatch.choose_kernels`.
      q, k, v, segment_ids, seed: as in `forward` of the kernels.
      sinks: of `softmax.learned_sinks`. Gradients of padding's outputs must then be zeros.
    """
    return kernels().attend(layout, interpret, q, k, v, segment_ids, seed, sinks=sinks)
