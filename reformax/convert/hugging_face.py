"""Hugging Face's models and their files.

`FORMATS` has the models by their `model_type`. Each has tensors, and a config.json, of its own.

Logits at position t there are those of token t + 1: `encode` reads tokens as they are, while
`apply` shifts them right and puts token 0 in front, as the models were trained in Trax.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from reformax import devices
from reformax.convert import (
    hugging_face_bert,
    hugging_face_decoder,
    hugging_face_gpt2,
    hugging_face_reformer,
    hugging_face_tensors,
    tables,
)
from reformax.convert.hugging_face_families import FAMILIES
from reformax.convert.hugging_face_family import Family
from reformax.convert.hugging_face_files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    read_config,
    read_generation,
    read_vocabulary,
    save_tensors,
    stored_tensors,
)
from reformax.convert.spec import Spec
from reformax.convert.tables import Tensor
from reformax.declared import shown

# Modules around a model's own, anywhere in a tensor's name, or before it.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
_OUTER = {"module", "model"}


class HuggingFaceCheckpoint(NamedTuple):
    """A model of Hugging Face as a spec and parameters of this package."""

    spec: Spec
    params: Any
    config: dict[str, Any]  # config.json, unchanged
    notes: list[str]  # the differences, one line each
    vocabulary: bytes | None = None  # tokenizer.json, if there is one
    generation: dict[str, Any] | None = None  # generation_config.json, likewise


class Format(NamedTuple):
    """A model of Hugging Face.

    Attributes:
      name: the class of `transformers`.
      model: its name in reformax.
      spec_of: config.json -> the model, and notes.
      config_of: (the model, the config.json it was read from, or {}) -> config.json.
      table: the tensors of a model.
      without_copies: (tensors, where they are from, the model) -> those of `table`.
      prepared: (the model, weights) -> the weights that the table writes.
      completed: tensors of the table -> those of a file.
    """

    name: str
    model: str
    spec_of: Callable[[Mapping[str, Any]], tuple[Spec, list[str]]]
    config_of: Callable[[Spec, Mapping[str, Any]], dict[str, Any]]
    table: Callable[[Spec], list[Tensor]]
    without_copies: Callable[[Mapping[str, Any], str, Spec], dict[str, Any]]
    prepared: Callable[[Spec, Any], Any] = lambda spec, params: params
    completed: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda tensors: tensors


def _written(spec: Spec, like: Mapping[str, Any]) -> tuple[Format, dict[str, Any]]:
    """The format that a model goes out in, and its config.json.

    A decoder may be of several families: the one that it was read from is first. GPT-2 alone has
    learnt positions.

    Raises:
      ValueError: there is none; the error names what the closest one has not.
    """
    known = {kind: x for kind, x in FORMATS.items() if x.model == spec.model}
    if not known:
        models = " or ".join(dict.fromkeys(x.model for x in FORMATS.values()))
        raise ValueError(
            f"Hugging Face has no such model: the model is {spec.model}, expected {models}"
        )
    if spec.model == "TransformerLM":
        learnt = bool(spec.arguments["pos_axial_shape"])
        known = {kind: x for kind, x in known.items() if (kind == "gpt2") == learnt}
    first = like.get("model_type")
    errors = []
    for kind in sorted(known, key=lambda kind: kind != first):
        try:
            return known[kind], known[kind].config_of(spec, like)
        except ValueError as error:
            errors.append(error)
    raise min(errors, key=lambda error: len(getattr(error, "obstacles", "?" * 1000)))


def spec_of(config: Mapping[str, Any]) -> tuple[Spec, list[str]]:
    """The model that computes the function of a config.json, and notes on the differences.

    Raises:
      ValueError: the model is none of `FORMATS`, or a value is out of range in either format.
    """
    return _read_format(config).spec_of(config)


def _read_format(config: Mapping[str, Any]) -> Format:
    kind = config.get("model_type", "reformer")
    if not isinstance(kind, str) or kind not in FORMATS:
        names = ", ".join(map(repr, FORMATS))
        raise ValueError(f"model_type is {shown(kind)}: expected one of {names}")
    return FORMATS[kind]


def config_of(spec: Spec, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a model.

    Args:
      spec: the model.
      like: the config.json that the model was read from. Its other values are kept, such as the ids
        of special tokens and its name of an activation.

    Raises:
      ValueError: Hugging Face has no such model; the error names the argument.
    """
    return _written(spec, like or {})[1]


def class_of(spec: Spec, like: Mapping[str, Any] | None = None) -> str:
    """The name of the model in `transformers`."""
    return _format_of(spec, like).name


def table(spec: Spec, like: Mapping[str, Any] | None = None) -> list[Tensor]:
    """The tensors of Hugging Face's model, and which weight each one is."""
    return _format_of(spec, like).table(spec)


def _format_of(spec: Spec, like: Mapping[str, Any] | None) -> Format:
    """The only format of a model, or the one that it goes out in."""
    known = [x for x in FORMATS.values() if x.model == spec.model]
    return known[0] if len(known) == 1 else _written(spec, like or {})[0]


def read(path: str | Path, mesh: Mesh | None = None) -> HuggingFaceCheckpoint:
    """Reads a folder of `save_pretrained`, or a file of tensors in a folder with its config.json.

    Args:
      path: the folder or the file.
      mesh: the devices of a run: each gets its part of a weight as soon as that is read, so that
        the host never has the whole model. None: one device.

    Raises:
      ValueError: the model is none of `FORMATS`, a file is damaged, or tensors do not fit
        config.json.
      OSError: a file does not exist.
      ImportError: the tensors are in a file of PyTorch, which is not installed.
    """
    path = Path(path).expanduser()
    folder = path if path.is_dir() else path.parent
    config = read_config(folder / CONFIG)
    known = _read_format(config)
    spec, notes = known.spec_of(config)
    tensors = tables.renamed(stored_tensors(path), _unwrapped, str(path))
    tensors = known.without_copies(tensors, str(path), spec)
    if np.any(tensors.get("lm_head.bias", 0)):
        notes.append(
            "lm_head.bias is not zero: transformers 5.0 to 5.23 leave it out of their logits, and "
            "5.24 adds lm_head.decoder.bias alone; this model adds it, as transformers 4 did"
        )
    put = jnp.asarray
    if mesh is not None:
        put = lambda array: jax.device_put(array, devices.placement(array, mesh))  # noqa: E731
    params = tables.read(known.table(spec), tensors, str(path), put)
    settings = read_generation(folder / GENERATION)
    vocabulary = read_vocabulary(folder / TOKENIZER)
    return HuggingFaceCheckpoint(spec, params, config, notes, vocabulary, settings)


def _unwrapped(name: str) -> str:
    """A tensor's name without what torch.compile, DDP, FSDP, DeepSpeed and trainers put around."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _OUTER:
        del parts[0]
    return ".".join(parts)


def write(
    folder: str | Path,
    spec: Spec,
    params: Any,
    like: Mapping[str, Any] | None = None,
    vocabulary: bytes | None = None,
    generation: Mapping[str, Any] | None = None,
    length: int | None = None,
) -> Sequence[Path]:
    """Writes config.json and model.safetensors, for `from_pretrained` of the model's class.

    More than 4 GiB of tensors are in several files, with an index.

    Args:
      folder: created if it does not exist.
      spec: the model.
      params: the weights.
      like: the config.json that the model was read from, if any; see `config_of`.
      vocabulary: a run's; written if it is a tokenizer.json.
      generation: a generation_config.json; None: there is none.
      length: of the rows that the model was trained on, which a decoder's config.json then allows.

    Raises:
      ValueError: Hugging Face has no such model.
    """
    known, config = _written(spec, like or {})
    if length is not None and known.name == DECODER:
        config = hugging_face_decoder.of_length(config, length, like or {})
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = known.completed(tables.write(known.table(spec), known.prepared(spec, params)))
    dtype = _dtype_of(config, tensors)
    if dtype != np.float32:
        tensors = {name: array.astype(dtype) for name, array in tensors.items()}
    if "torch_dtype" in config or "dtype" in config or known.name == DECODER:
        config = {k: x for k, x in config.items() if k != "torch_dtype"} | {"dtype": dtype.name}
    written = save_tensors(folder, tensors)
    content = {CONFIG: config} | ({} if generation is None else {GENERATION: dict(generation)})
    for name, value in content.items():
        (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    if vocabulary is not None and vocabulary.lstrip()[:1] == b"{":
        (folder / TOKENIZER).write_bytes(vocabulary)
    return [folder / CONFIG, *written]


def _dtype_of(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> np.dtype:
    """The dtype of the source's file, if it has all of these numbers; or else float32."""
    name = config.get("dtype", config.get("torch_dtype"))
    if name not in ("bfloat16", "float16"):
        return np.dtype(np.float32)
    dtype = jnp.dtype(name)
    with np.errstate(over="ignore"):
        kept = all(np.array_equal(x.astype(dtype).astype(x.dtype), x) for x in tensors.values())
    return dtype if kept else np.dtype(np.float32)


def _decoder(family: Family) -> Format:
    """The format of a family of decoders."""
    return Format(
        DECODER,
        "TransformerLM",
        functools.partial(hugging_face_decoder.spec_of, family),
        functools.partial(hugging_face_decoder.config_of, family),
        functools.partial(hugging_face_tensors.table, family),
        hugging_face_tensors.without_copies,
        functools.partial(hugging_face_tensors.prepared, family),
    )


DECODER = "AutoModelForCausalLM"
FORMATS = {
    "reformer": Format(
        "ReformerModelWithLMHead",
        "ReformerLM",
        hugging_face_reformer.spec_of,
        hugging_face_reformer.config_of,
        hugging_face_reformer.table,
        hugging_face_reformer.without_copies,
        completed=hugging_face_reformer.completed,
    ),
    "gpt2": Format(
        "GPT2LMHeadModel",
        "TransformerLM",
        hugging_face_gpt2.spec_of,
        hugging_face_gpt2.config_of,
        hugging_face_gpt2.table,
        hugging_face_gpt2.without_copies,
    ),
    "bert": Format(
        "BertForMaskedLM",
        "TransformerMaskedLM",
        hugging_face_bert.spec_of,
        hugging_face_bert.config_of,
        hugging_face_bert.table,
        hugging_face_bert.without_copies,
        completed=hugging_face_bert.completed,
    ),
} | {
    name: _decoder(family)
    for family in FAMILIES
    for name in (family.model_type, family.within)
    if name is not None
}
