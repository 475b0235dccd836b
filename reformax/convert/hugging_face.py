"""Hugging Face's models: their files, and the tensors of `ReformerModelWithLMHead`.

`FORMATS` has the models by their `model_type`. Each has tensors, and a config.json, of its own.

Logits at position t there are those of token t + 1: `encode` reads tokens as they are, while
`apply` shifts them right and puts token 0 in front, as the models were trained in Trax.

A Reformer's logits add `lm_head.decoder.bias`, which version 4 of `transformers` keeps as
`lm_head.bias` too. Versions 5.0 to 5.23 have the latter alone and leave it out; in 5.24 the two are
apart, and only the former counts. The logits of reformax add it; files that are written have both.
"""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reformax.convert import hugging_face_bert, hugging_face_config, hugging_face_gpt2, tables
from reformax.convert.spec import Op, Spec
from reformax.convert.tables import Tensor, layer_norm
from reformax.data import files
from reformax.declared import shown

CONFIG, SAFETENSORS, TORCH = "config.json", "model.safetensors", "pytorch_model.bin"
TOKENIZER = "tokenizer.json"
_DECODER_BIAS = "lm_head.decoder.bias"
# Modules around a model's own, anywhere in a tensor's name, or in front of it.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
_OUTER = {"module", "model"}
# Keys of the tensors in a trainer's file, which also has the trainer's state.
_NESTED = ("state_dict", "model_state_dict", "model", "module")
_MAX_JSON, _MAX_VOCABULARY = 2**24, 2**28
# Those that NumPy has, too; `tables.check` takes those of floating point.
_DTYPES = ("F64", "F32", "F16", "BF16", *(f"{k}{n}" for k in "IU" for n in (8, 16, 32, 64)), "BOOL")


class HuggingFaceCheckpoint(NamedTuple):
    """A model of Hugging Face as a spec and parameters of this package."""

    spec: Spec
    params: Any
    config: dict[str, Any]  # config.json, unchanged
    notes: list[str]  # the differences, one line each
    vocabulary: bytes | None = None  # tokenizer.json, if there is one


class Format(NamedTuple):
    """A model of Hugging Face.

    Attributes:
      name: the class of `transformers`.
      model: its name in reformax.
      spec_of: config.json -> the model, and notes.
      config_of: (the model, the config.json it was read from, or {}) -> config.json.
      table: the tensors of a model.
      without_copies: (tensors, where they are from) -> those of `table`.
    """

    name: str
    model: str
    spec_of: Callable[[Mapping[str, Any]], tuple[Spec, list[str]]]
    config_of: Callable[[Spec, Mapping[str, Any]], dict[str, Any]]
    table: Callable[[Spec], list[Tensor]]
    without_copies: Callable[[Mapping[str, np.ndarray], str], dict[str, np.ndarray]]


def _format_of(spec: Spec) -> Format:
    """The format of a model; `ValueError` if there is none."""
    for known in FORMATS.values():
        if known.model == spec.model:
            return known
    models = " or ".join(known.model for known in FORMATS.values())
    raise ValueError(
        f"Hugging Face has no such model: the model is {spec.model}, expected {models}"
    )


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
    return _format_of(spec).config_of(spec, like or {})


def class_of(spec: Spec) -> str:
    """The name of the model in `transformers`."""
    return _format_of(spec).name


def table(spec: Spec) -> list[Tensor]:
    """The tensors of Hugging Face's model, and which weight each one is."""
    return _format_of(spec).table(spec)


def _reformer(spec: Spec) -> list[Tensor]:
    """The tensors of `ReformerModelWithLMHead`, and which weight each one is."""
    arguments = spec.arguments
    d, vocab = arguments["d_model"], arguments["vocab_size"]
    rows = [Tensor("reformer.embeddings.word_embeddings.weight", ("embedding",), (vocab, d))]
    rows += _positions(arguments["pos_axial_shape"], arguments["pos_d_axial_embs"])
    for layer, block, repeat, op in spec.layers():
        path = ("stack", f"block_{block}")
        rows += _block(f"reformer.encoder.layers.{layer}", path, repeat, op, arguments)
    rows += layer_norm("reformer.encoder.layer_norm", ("norm",), 2 * d)
    sizes = (vocab, 2 * d)
    rows.append(
        Tensor("lm_head.decoder.weight", ("logits", "w"), sizes, None, np.transpose, np.transpose)
    )
    return [*rows, Tensor("lm_head.bias", ("logits", "b"), (vocab,))]


def _positions(shape: Sequence[int], d_embs: Sequence[int]) -> list[Tensor]:
    """The table of positions, or one for each axis."""
    name = "reformer.embeddings.position_embeddings"
    if len(shape) == 1:
        sizes = (shape[0], d_embs[0])
        return [Tensor(f"{name}.embedding.weight", ("positions", "axis_0"), sizes)]
    return tables.axial(f"{name}.weights.{{axis}}", shape, d_embs)


def _block(
    name: str, path: tuple[str, ...], repeat: int, op: Op, arguments: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors of one layer: norm and attention, norm and feed-forward."""
    d, d_ff = arguments["d_model"], arguments["d_ff"]
    n, h = arguments["n_heads"], arguments["d_attention_key"]
    attention, feed_forward = (*path, "attention"), (*path, "feed_forward")

    def split(x):  # [N H, D] -> [N, D, H]
        return x.reshape(n, h, d).transpose(0, 2, 1)

    def joined(x):  # [N, D, H] -> [N H, D]
        return x.transpose(0, 2, 1).reshape(n * h, d)

    projections = {"w_q": "query_key", "w_v": "value"}
    if op.name == "local":
        projections = {"w_q": "query", "w_k": "key", "w_v": "value"}
    rows = layer_norm(f"{name}.attention.layer_norm", (*path, "attention_norm"), d, repeat)
    for weight, projection in projections.items():
        tensor = f"{name}.attention.self_attention.{projection}.weight"
        rows.append(Tensor(tensor, (*attention, weight), (n * h, d), repeat, split, joined))
    rows.append(
        Tensor(
            f"{name}.attention.output.dense.weight",
            (*attention, "w_o"),
            (d, n * h),
            repeat,
            lambda x: x.T.reshape(n, h, d),
            lambda x: x.reshape(n * h, d).T,
        )
    )
    rows += layer_norm(f"{name}.feed_forward.layer_norm", (*path, "feed_forward_norm"), d, repeat)
    for i, part, sizes in ((1, "dense", (d_ff, d)), (2, "output", (d, d_ff))):
        tensor, weight = f"{name}.feed_forward.{part}.dense", (*feed_forward, f"w{i}")
        rows.append(Tensor(f"{tensor}.weight", weight, sizes, repeat, np.transpose, np.transpose))
        rows.append(Tensor(f"{tensor}.bias", (*feed_forward, f"b{i}"), sizes[:1], repeat))
    return rows


def read(path: str | Path) -> HuggingFaceCheckpoint:
    """Reads a folder of `save_pretrained`, or a file of tensors in a folder with its config.json.

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
    tensors: dict[str, np.ndarray] = {}
    for file in _files(folder) if path.is_dir() else [path]:
        part = _tensors(file)
        if twice := tensors.keys() & part.keys():
            raise ValueError(f"{file} holds {shown(min(twice))}, which another file of it has too")
        tensors |= part
    tensors = tables.renamed(tensors, _unwrapped, str(path))
    tensors = known.without_copies(tensors, str(path))
    if tensors.get("lm_head.bias", np.zeros(1)).any():
        notes.append(
            "lm_head.bias is not zero: transformers 5.0 to 5.23 leave it out of their logits, and "
            "5.24 adds lm_head.decoder.bias alone; this model adds it, as transformers 4 did"
        )
    params = tables.read(known.table(spec), tensors, str(path))
    return HuggingFaceCheckpoint(spec, params, config, notes, _vocabulary(folder / TOKENIZER))


def _unwrapped(name: str) -> str:
    """A tensor's name without what torch.compile, DDP, FSDP, DeepSpeed and trainers put around."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _OUTER:
        del parts[0]
    return ".".join(parts)


def _vocabulary(path: Path) -> bytes | None:
    """The file, if there is one: a JSON object of at most 256 MiB."""
    if not path.exists():
        return None
    if (size := files.check_ordinary(path)) > _MAX_VOCABULARY:
        raise ValueError(f"{path} has {size:,} bytes: expected at most {_MAX_VOCABULARY:,}")
    content, found = path.read_bytes(), None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no object of JSON: copy it again, or delete it")
    return content


def read_config(path: Path) -> dict[str, Any]:
    """Reads a config.json of at most 16 MiB; raises `ValueError` if it holds no JSON object."""
    try:
        size = files.check_ordinary(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: put it next to the tensors") from None
    if size > _MAX_JSON:
        raise ValueError(f"{path} has {size:,} bytes: expected at most {_MAX_JSON:,}")
    try:
        config = json.loads(
            path.read_bytes(), parse_constant=_no_number, object_pairs_hook=_without_repetition
        )
    except RecursionError:
        raise ValueError(f"{path} is nested too deep: copy it again") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no object: copy it again")
    return config


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} is given twice")
        found[name] = value
    return found


def _files(folder: Path) -> list[Path]:
    for name in (SAFETENSORS, TORCH):
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            return [folder / part for part in _parts(index, Path(name).suffix)]
    raise FileNotFoundError(f"{folder} has no {SAFETENSORS} and no {TORCH}")


def _parts(index: Path, suffix: str) -> list[str]:
    """The names of the files that an index lists, which lie in its folder."""
    weight_map = read_config(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has weight_map {shown(weight_map)}: expected tensors' files")
    for tensor, part in weight_map.items():
        plain = isinstance(part, str) and Path(part).name == part and "\0" not in part
        if not plain or Path(part).suffix != suffix:
            raise ValueError(
                f"{index} has {shown(tensor)} in {shown(part)}: expected a {suffix} file of that "
                "folder"
            )
    return sorted(set(weight_map.values()))


def _tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        files.check_ordinary(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    if path.suffix == ".safetensors":
        return _from_safetensors(path)
    try:
        import torch
    except ImportError:
        raise ImportError(
            f"{path} is a file of PyTorch, which is not installed: pip install torch, or convert "
            "it to safetensors where it is"
        ) from None
    _check_not_packed(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile or damaged file may raise anything
        reason = str(error).strip().splitlines()
        reason = reason[0][:200] if reason else type(error).__name__
        raise ValueError(f"{path} is refused: it holds more than tensors ({reason})") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}: expected tensors by name")
    state = next((state[key] for key in _NESTED if isinstance(state.get(key), dict)), state)
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{path} has {shown(name)}, a {type(tensor).__name__}: expected tensors"
            )
        # A view may repeat what is stored, up to any size.
        dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
        stored = tensor.untyped_storage().nbytes() if dense else -1
        odd = tensor.is_complex() or tensor.is_quantized
        if tensor.numel() * tensor.element_size() > stored or odd:
            raise ValueError(f"{path} has {shown(name)} of {tensor.dtype}, which is no plain array")
    # NumPy lacks bfloat16; `tables.check` says of what is not of floating point.
    return {
        name: (x.float() if x.is_floating_point() else x).detach().numpy()
        for name, x in state.items()
    }


def _check_not_packed(path: Path) -> None:
    """Raises `ValueError` if a file of PyTorch unpacks to more than it has; PyTorch packs none."""
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        total, size = sum(part.file_size for part in archive.infolist()), path.stat().st_size
        if total > size:
            raise ValueError(f"{path} unpacks to {total:,} bytes from {size:,}: expected no more")


def _from_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load_file

    try:
        with safe_open(path, framework="numpy") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        for name, dtype in dtypes.items():
            if dtype not in _DTYPES:
                raise ValueError(
                    f"{shown(name)} has dtype {dtype}: expected one of {', '.join(_DTYPES)}"
                )
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{path} is damaged or of another kind ({reason}): copy it again"
        ) from None


def _without_copies(tensors: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """The tensors without constants of older versions; the bias that counts under one name."""
    del where
    tensors = {
        name: array
        for name, array in tensors.items()
        if not name.endswith(("mask_value_float16", "mask_value_float32"))
    }
    bias = tensors.pop(_DECODER_BIAS, None)
    return tensors if bias is None else tensors | {"lm_head.bias": bias}


def write(
    folder: str | Path,
    spec: Spec,
    params: Any,
    like: Mapping[str, Any] | None = None,
    vocabulary: bytes | None = None,
) -> Sequence[Path]:
    """Writes config.json and model.safetensors, for `from_pretrained` of the model's class.

    Args:
      folder: created if it does not exist.
      spec: the model.
      params: the weights.
      like: the config.json that the model was read from, if any; see `config_of`.
      vocabulary: a run's; written if it is a tokenizer.json.

    Raises:
      ValueError: Hugging Face has no such model.
    """
    from safetensors.numpy import save_file

    config = config_of(spec, like)
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tables.write(table(spec), params)
    if "lm_head.bias" in tensors:
        tensors[_DECODER_BIAS] = tensors["lm_head.bias"]
    save_file(tensors, folder / SAFETENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if vocabulary is not None and vocabulary.lstrip()[:1] == b"{":
        (folder / TOKENIZER).write_bytes(vocabulary)
    return [folder / CONFIG, folder / SAFETENSORS]


FORMATS = {
    "reformer": Format(
        "ReformerModelWithLMHead",
        "ReformerLM",
        hugging_face_config.spec_of,
        hugging_face_config.config_of,
        _reformer,
        _without_copies,
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
    ),
}
