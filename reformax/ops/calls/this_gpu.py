"""The NVIDIA GPU of this machine, and what kernels can use of it."""

from __future__ import annotations

import jax

# KiB that a block of threads may share, by compute capability: graphics cards' chips have 99.
SHARED_KIB = {
    8.0: 163,
    8.6: 99,
    8.7: 163,
    8.9: 99,
    9.0: 227,
    10.0: 227,
    10.3: 227,
    12.0: 99,
    12.1: 99,
}
# On graphics cards' chips, and on the newest of a data centre.
SMALL_CHIP, LARGE_CHIP = 99, 227


def obstacle() -> str | None:
    """The reason why kernels for NVIDIA GPUs do not run on this machine; None where they run."""
    if jax.default_backend() != "gpu":
        return f"the backend {jax.default_backend()!r}"
    device = jax.local_devices()[0]
    if compute_capability(device) < 8.0:
        return f"the device {device.device_kind!r}, which is not an NVIDIA GPU of Ampere or later"
    return None


def shared_kib() -> int:
    """KiB that a block of threads may share on this machine's GPU.

    Without a GPU, and on one that came later, as many as on the newest of a data centre.
    """
    if jax.default_backend() != "gpu":
        return LARGE_CHIP
    return SHARED_KIB.get(compute_capability(jax.local_devices()[0]), LARGE_CHIP)


def on_small_chip() -> bool:
    """Whether kernels run on a GPU whose blocks of threads share less than a data centre's do."""
    return shared_kib() <= SMALL_CHIP


def is_hopper() -> bool:
    """Whether the GPU is of NVIDIA's Hopper generation."""
    if jax.default_backend() != "gpu":
        return False
    return compute_capability(jax.local_devices()[0]) == 9.0


def compute_capability(device: jax.Device) -> float:
    """NVIDIA's compute capability of a device, 9.0 for Hopper; 0 for other vendors' devices."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except (TypeError, ValueError):  # AMD's are text, such as gfx942
        return 0.0
