"""reformax: efficient transformers for JAX and Trax.

`reformax.ops` holds the attention algorithms as pure functions, `reformax.layers` wraps them as
Trax layers, `reformax.models` assembles the layers. Importing `reformax` itself loads nothing; a
part of it, such as `reformax.layers`, is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__version__ = "0.2.0"
_PARTS = ("convert", "data", "flax", "generation", "layers", "models", "nn", "ops", "training")


def __getattr__(name: str) -> ModuleType:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return ["__version__", "load_run", *_PARTS]


def load_run(
    folder: str | os.PathLike,
    checkpoint: str = "best",
    *,
    mode: str = "eval",
    overrides: Sequence[str] = (),
    trust_config: bool = False,
) -> tuple[Any, Any]:
    """The model of a run's folder and its parameters: to generate, score or train with.

    The model is built from the checkpoint's own config, which is gin's config afterwards. No code
    of the folder runs unless it is trusted.

    Args:
      folder: a folder of `reformax train` or of `reformax convert`.
      checkpoint: "best", "latest", a step, or "average:N" for the mean of the last N.
      mode: "eval"; "train" for a model with its dropout and its settings for training.
      overrides: settings in place of the config's, as of --config: "lsh.lsh.n_hashes=8".
      trust_config: whether the config may name any module, and so run its code.

    Returns:
      The model, one of `reformax.models` unless the config is trusted, and its parameters: their
      moving average if the run has one.

    Raises:
      ValueError: there is no such checkpoint, it is damaged, or its config names more than models,
        attentions, tasks and optimizers of reformax and functions of jax.nn and optax.
    """
    from reformax.cli import errors, saved_run
    from reformax.declared import SettingError
    from reformax.durable import user_path

    options = {"mode": mode, "trusted": trust_config}
    try:
        folder = user_path("folder", folder)
        saved = saved_run.load(folder, str(checkpoint), overrides, **options)
    except SettingError as error:
        line = errors.named_as_typed(errors.one_line(error), error, flags_of=_OF_LOAD_RUN)
        if line == str(error):
            raise
        raise SettingError(line) from error
    return saved.model, saved.params


_OF_LOAD_RUN = ("folder", "checkpoint", "mode", "overrides", "trust_config", "output_dir")
