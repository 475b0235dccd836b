"""What the gradient of a stack keeps of its layers: everything, attention's results, or nothing.

A policy has one of three names, from the least memory to the least arithmetic:

  * "nothing": only what joins the layers. The backward pass computes each layer again.
  * "attention": also what attention computed for its gradient: its output and, of a kernel, row
    maxima and sums, besides the plan. The backward pass computes the rest of the layer again:
    norms, projections and the feed-forward layer.
  * "all": every activation, as plain autodiff does.

Attention is a function of queries, keys and values. What its derivative stores besides these is
what "attention" keeps, so no implementation has to know of policies.

Kept values may lie in the host's memory between the passes (offloading; Rajbhandari et al. 2021,
ZeRO-Infinity, sec. 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from reformax.declared import SettingError

RematPolicy = Literal["nothing", "attention", "all"]
# Names of values in a layer, by which policies of `jax.checkpoint` find them.
STREAM, ATTENTION = "stream", "attention"
_NAMES = {"nothing": (STREAM,), "attention": (STREAM, ATTENTION)}


def check_policy(policy: RematPolicy, offload: bool) -> None:
    """Raises `SettingError` for a policy whose values cannot be offloaded."""
    if offload and policy == "all":
        raise SettingError(
            "offload_activations is True and remat_policy is 'all': set "
            "remat_policy='attention' or 'nothing', which name what to offload"
        )


def check_offload() -> None:
    """Raises `SettingError` on a backend whose devices have no memory besides the host's."""
    backend = jax.default_backend()
    if backend == "cpu":
        raise SettingError(
            "offload_activations is True and the backend is cpu, whose memory is the host's: set "
            "offload_activations=False, or train on a GPU"
        )


def checkpointed(layer: Callable, policy: RematPolicy, offload: bool) -> Callable:
    """A layer whose gradient keeps what the policy says."""
    if policy == "all":
        return layer
    if offload:
        keep = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(_NAMES[policy]),
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(layer, policy=keep)
    if policy == "nothing":
        return jax.checkpoint(layer)
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(ATTENTION))


def to_host(tree: Any) -> Any:
    """The arrays in the memory of the host."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Any) -> Any:
    """The arrays in the memory of the device."""
    return jax.device_put(tree, jax.memory.Space.Device)


# How a layer calls attention, `run(function, *arguments)`.

Run = Callable[..., Array]


def direct(function: Callable[..., Array], *arguments: Any) -> Array:
    """`function(*arguments)`."""
    return function(*arguments)


def named(function: Callable[..., Array], *arguments: Any) -> Array:
    """`function(*arguments)`; plans and what its derivative stores have the name `ATTENTION`."""
    function, arrays = _of_arrays(function, arguments)
    arrays = [checkpoint_name(x, ATTENTION) if _is_integer(x) else x for x in arrays]

    def forward(*arrays):
        stored, restore = _stored(function, arrays)
        out, *stored = (checkpoint_name(x, ATTENTION) for x in stored)
        return out, restore([out, *stored])

    call = jax.custom_vjp(function)
    call.defvjp(forward, lambda vjp, d_out: vjp(d_out))
    return call(*arrays)


def stored(function: Callable[..., Array], *arguments: Any) -> list[Array]:
    """`function(*arguments)`, and after it what its derivative stores besides the arguments."""
    function, arrays = _of_arrays(function, arguments)
    return _stored(function, arrays)[0]


def recalled(kept: list[Array]) -> Run:
    """Calls of a function whose results and stored values are known, from `stored`.

    The derivative is traced once more for its form. Nothing reads what that computes, so the
    compiler removes it.
    """

    def run(function: Callable[..., Array], *arguments: Any) -> Array:
        function, arrays = _of_arrays(function, arguments)

        def backward(arrays, d_out):
            _, restore = _stored(function, arrays)
            return restore(kept)(d_out)

        call = jax.custom_vjp(lambda *arrays: kept[0])
        call.defvjp(lambda *arrays: (kept[0], arrays), backward)
        return call(*arrays)

    return run


def _of_arrays(function: Callable, arguments: tuple) -> tuple[Callable, list[Array]]:
    """The function of the arrays in its arguments, and these arrays."""
    leaves, tree = jax.tree.flatten(arguments)
    is_array = [isinstance(x, jax.Array) for x in leaves]

    def of_arrays(*arrays):
        given = iter(arrays)
        filled = [next(given) if a else x for a, x in zip(is_array, leaves, strict=True)]
        return function(*tree.unflatten(filled))

    # What is no array is no tracer, so that `of_arrays` can be called after this trace has ended.
    arrays = [x for a, x in zip(is_array, leaves, strict=True) if a]
    leaves = [None if a else x for a, x in zip(is_array, leaves, strict=True)]
    return of_arrays, arrays


def _is_integer(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


def _stored(
    function: Callable[..., Array], arrays: list[Array]
) -> tuple[list[Array], Callable[[list[Array]], Callable]]:
    """The result and what the derivative stores besides `arrays`, each array once.

    Also returned is the derivative by `jax.vjp` as a function of these.
    """

    def forward(*arrays):
        out, vjp = jax.vjp(function, *arrays)
        return out, *jax.tree.leaves(vjp)

    # In a program what is one array is one variable; tracers of it may be several.
    program = jax.make_jaxpr(forward)(*arrays).jaxpr
    given, index = {id(x) for x in program.invars}, {}
    for x in program.outvars:
        if id(x) not in given:
            index.setdefault(id(x), len(index))
    indices = [index.get(id(x)) for x in program.outvars]

    out, vjp = jax.vjp(function, *arrays)
    leaves, tree = jax.tree.flatten(vjp)
    found = dict(zip(reversed(indices), reversed([out, *leaves]), strict=True))

    def restore(values: list[Array]) -> Callable:
        filled = [x if i is None else values[i] for i, x in zip(indices[1:], leaves, strict=True)]
        return tree.unflatten(filled)

    return [found[i] for i in range(len(index))], restore
