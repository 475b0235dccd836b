"""Programs compiled for an NVIDIA H200 by a machine that has none.

XLA compiles for a described device. It does not search for the fastest products then, and sorts by
its own algorithm, where with a GPU it takes a library's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

from reformax.ops.calls import dispatch

NAME = "NVIDIA H200"
_DESCRIPTION = f"""
platform_name: "CUDA"
device_description_str: "{NAME}"
dnn_version_info {{ major: 9 minor: 12 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4814000000000
  device_memory_size: 150000000000
  l2_cache_size: 62914560
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
}}
"""
# Triton's products would be chosen by a search.
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def devices(n: int = 1) -> list[Any]:
    """H200s that can be compiled for.

    Raises:
      NotImplementedError: JAX's compiler for NVIDIA GPUs is not installed.
    """
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of drivers
    sizes = dict(topology_name=NAME, topology=f"1x{n}x1", target_config=_DESCRIPTION)
    try:
        return list(topologies.get_topology_desc(platform="cuda", **sizes).devices)
    except NotImplementedError:
        raise NotImplementedError(
            "no compiler for NVIDIA GPUs is installed: pip install 'jax[cuda13]'"
        ) from None


@contextmanager
def assumed() -> Iterator[None]:
    """What is traced within goes by an H200: implementations, and Pallas's lowering."""
    from jax._src.pallas.triton import gpu_info

    def known() -> Any:
        return gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H200)

    with ExitStack() as patches:
        for target, name, value in (
            (jax, "default_backend", lambda: "gpu"),
            (dispatch, "gpu_obstacle", lambda: None),
            (gpu_info, "get_gpu_info", known),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        yield
