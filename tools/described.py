"""Programs compiled for NVIDIA GPUs by a machine that has none.

XLA compiles for a described device. It does not search for the fastest products then, and sorts by
its own algorithm, where with a GPU it takes a library's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.experimental import topologies

from reformax.ops.calls import this_gpu


class Gpu(NamedTuple):
    """What a compiler is told of a GPU.

    Attributes:
      name: as its driver names it.
      capability: NVIDIA's compute capability.
      n_cores: streaming multiprocessors.
      ghz: their clock.
      bandwidth: bytes of memory read a second.
      memory: bytes.
      l2: bytes of the cache before it.
      shared: bytes of memory that the threads of a block may share; a core has 1,024 more.
    """

    name: str
    capability: str
    n_cores: int
    ghz: float
    bandwidth: float
    memory: float
    l2: int
    shared: int

    @property
    def description(self) -> str:
        """The text that XLA reads."""
        major, minor = self.capability.split(".")
        return f"""
platform_name: "CUDA"
device_description_str: "{self.name}"
dnn_version_info {{ major: 9 minor: 12 }}
gpu_device_info {{
  runtime_version: "{CUDA}"
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {self.n_cores}
  fpus_per_core: {64 if self.capability == "8.0" else 128}
  clock_rate_ghz: {self.ghz}
  memory_bandwidth: {self.bandwidth:.0f}
  device_memory_size: {self.memory:.0f}
  l2_cache_size: {self.l2}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {1536 if self.shared == _SMALL else 2048}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared}
  shared_memory_per_core: {self.shared + 1024}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
}}
"""


CUDA = "12.9.0"  # without a version XLA takes no library's products of FP8 numbers
_LARGE, _SMALL = 227 * 1024, 99 * 1024
# One of each capability that our kernels run on, by the name of the flag.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 1.41, 2.04e12, 80e9, 40 * 2**20, 163 * 1024),
    "3090": Gpu("NVIDIA GeForce RTX 3090", "8.6", 82, 1.70, 9.4e11, 24e9, 6 * 2**20, _SMALL),
    "4090": Gpu("NVIDIA GeForce RTX 4090", "8.9", 128, 2.52, 1.01e12, 24e9, 72 * 2**20, _SMALL),
    "h200": Gpu("NVIDIA H200", "9.0", 132, 1.98, 4.814e12, 150e9, 60 * 2**20, _LARGE),
    "b200": Gpu("NVIDIA B200", "10.0", 148, 1.97, 8e12, 180e9, 126 * 2**20, _LARGE),
    "5090": Gpu("NVIDIA GeForce RTX 5090", "12.0", 170, 2.41, 1.79e12, 32e9, 96 * 2**20, _SMALL),
}
# Triton's products would be chosen by a search.
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def devices(gpu: Gpu, n: int = 1) -> list[Any]:
    """GPUs that can be compiled for.

    Raises:
      NotImplementedError: JAX's compiler for NVIDIA GPUs is not installed.
    """
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of drivers
    sizes = dict(topology_name=gpu.name, topology=f"1x{n}x1", target_config=gpu.description)
    try:
        return list(topologies.get_topology_desc(platform="cuda", **sizes).devices)
    except NotImplementedError:
        raise NotImplementedError(
            "no compiler for NVIDIA GPUs is installed: pip install 'jax[cuda13]'"
        ) from None


@contextmanager
def assumed(gpu: Gpu) -> Iterator[None]:
    """What is traced within goes by such a GPU: implementations, and Pallas's lowering.

    A trace of arrays that lie on no device would be taken from JAX's cache, where another GPU's or
    this machine's is, so it is cleared before and after. Callbacks are compiled, and lead nowhere.

    Raises:
      NotImplementedError: JAX is older than 0.11, where a kernel is lowered for the GPU there is.
    """
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:
        raise NotImplementedError(
            f"JAX {jax.__version__} lowers kernels for the GPU there is alone: JAX 0.11 is needed"
        ) from None

    from jax._src import compiler
    from jax._src.interpreters import mlir

    compile_here = compiler.backend_compile_and_load

    def without_callbacks(*args):  # which no described device could make
        return compile_here(*args[:-1], [])

    capability = gpu.capability
    known = gpu_info.GpuInfo(
        gpu_version=None, arch_name=capability, compute_capability=int(capability.replace(".", ""))
    )
    with ExitStack() as patches:
        for target, name, value in (
            (jax, "default_backend", lambda: "gpu"),
            (this_gpu, "obstacle", lambda: None),
            (this_gpu, "shared_kib", lambda: gpu.shared // 1024),
            (this_gpu, "is_hopper", lambda: gpu.capability == "9.0"),
            (gpu_info, "get_gpu_info", lambda: known),
            (mlir.ModuleContext, "get_backend", lambda self, **_: None),
            (compiler, "backend_compile_and_load", without_callbacks),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        jax.clear_caches()
        try:
            yield
        finally:
            jax.clear_caches()
