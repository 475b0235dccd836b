"""The files of a folder of Hugging Face: config.json, tokenizer.json, tensors in one file or many.

Nothing of a folder is trusted: sizes are checked before files are read, and no code runs. Tensors
are known by shape and dtype first. Those of safetensors are read one at a time when they are asked
for; a file of PyTorch is read whole, and kept until another one is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from reformax.cli.generation_settings import check_settings
from reformax.data import files, piece_codecs
from reformax.declared import shown

CONFIG, SAFETENSORS, TORCH = "config.json", "model.safetensors", "pytorch_model.bin"
TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
_ADAPTER, _POINTER = "adapter_config.json", b"version https://git-lfs.github.com/spec/"
# Keys of the tensors in a trainer's file, which also has the trainer's state.
_NESTED = ("state_dict", "model_state_dict", "model", "module")
_MAX_JSON, _MAX_VOCABULARY = 2**24, 2**28
_LARGEST_FILE = 2**32  # bytes of the tensors that a file is written with
# Those that NumPy has, too; `tables.check` takes those of floating point.
_DTYPES = {f"F{n}": f"float{n}" for n in (64, 32, 16)} | {"BF16": "bfloat16", "BOOL": "bool"}
_DTYPES |= {f"{k}{n}": f"{v}{n}" for k, v in (("I", "int"), ("U", "uint")) for n in (8, 16, 32, 64)}


def read_vocabulary(path: Path) -> bytes | None:
    """The file, if there is one: a tokenizer of at most 256 MiB."""
    if not path.exists():
        return None
    if (size := _size_of(path)) > _MAX_VOCABULARY:
        raise ValueError(f"{path} has {size:,} bytes: expected at most {_MAX_VOCABULARY:,}")
    content, found = path.read_bytes(), None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no object of JSON: copy it again, or delete it")
    with contextlib.suppress(ImportError):  # without tokenizers a run is not written either
        piece_codecs.codec_of(content, path)
    return content


def read_config(path: Path) -> dict[str, Any]:
    """Reads a config.json of at most 16 MiB; raises `ValueError` if it holds no JSON object."""
    try:
        size = _size_of(path)
    except FileNotFoundError:
        if path.name == CONFIG and path.with_name(_ADAPTER).exists():
            raise FileNotFoundError(
                f"{path.parent} is an adapter without its model: merge it by peft's "
                "merge_and_unload, and save that"
            ) from None
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


def read_generation(path: Path) -> dict[str, Any] | None:
    """Reads a generation_config.json, if any; raises `ValueError` for odd values."""
    if not path.exists():
        return None
    settings = read_config(path)
    check_settings(settings, str(path))
    return settings


def _size_of(path: Path) -> int:
    """The bytes of an ordinary file that holds what its name says, and not where that is."""
    size = files.check_ordinary(path)
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"{path} is a pointer of Git LFS: run git lfs pull in its folder")
    return size


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} is given twice")
        found[name] = value
    return found


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: an array of NumPy is made when it is asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], np.ndarray]
    whole_file: bool  # whether the file is read for it, and others of the file are then in memory

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.load(), dtype)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder, or of one file of tensors, by name.

    Raises:
      ValueError: a file is damaged, holds more than tensors, or names one that another file has.
      OSError: a file does not exist.
      ImportError: a file is PyTorch's, which is not installed.
    """
    found: dict[str, StoredTensor] = {}
    last: dict[Path, dict[str, np.ndarray]] = {}
    for file in _files(path) if path.is_dir() else [path]:
        part = _tensors(file, last)
        if twice := found.keys() & part.keys():
            raise ValueError(f"{file} holds {shown(min(twice))}, which another file of it has too")
        found |= part
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


def _tensors(path: Path, last: dict[Path, dict[str, np.ndarray]]) -> dict[str, StoredTensor]:
    """The tensors of a file; `last` holds the file of PyTorch that was read last."""
    try:
        _size_of(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    if path.suffix == ".safetensors":
        return _from_safetensors(path)

    def content() -> dict[str, np.ndarray]:
        if path not in last:
            last.clear()
            last[path] = _from_pytorch(path)
        return last[path]

    return {
        name: StoredTensor(x.shape, x.dtype, lambda name=name: content()[name], True)
        for name, x in content().items()
    }


def _from_pytorch(path: Path) -> dict[str, np.ndarray]:
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


def _from_safetensors(path: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    @contextlib.contextmanager
    def named_damage():
        try:
            yield
        except (SafetensorError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{path} is damaged or of another kind ({reason}): copy it again"
            ) from None

    with named_damage():
        # What has been opened stays mapped into memory for as long as its tensors are known.
        file = safe_open(path, framework="numpy").__enter__()

        def load(name: str) -> np.ndarray:
            with named_damage():
                return file.get_tensor(name)

        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        stored = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    found = {}
    for name, (dtype, shape) in stored.items():
        if dtype not in _DTYPES:
            raise ValueError(
                f"{path}: {shown(name)} has dtype {dtype}: expected one of {', '.join(_DTYPES)}, "
                "as in the model before it was quantized"
            )
        load_one = functools.partial(load, name)
        found[name] = StoredTensor(shape, jnp.dtype(_DTYPES[dtype]), load_one, False)
    return found


def save_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> list[Path]:
    """Writes tensors in files of at most `_LARGEST_FILE`, with an index if there are several."""
    from safetensors.numpy import save_file

    parts: list[dict[str, np.ndarray]] = [{}]
    size = total = 0
    for name, array in tensors.items():
        if parts[-1] and size + array.nbytes > _LARGEST_FILE:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size, total = size + array.nbytes, total + array.nbytes
    names = [SAFETENSORS]
    if len(parts) > 1:
        stem, suffix = SAFETENSORS.split(".")
        names = [f"{stem}-{i + 1:05}-of-{len(parts):05}.{suffix}" for i in range(len(parts))]
        weight_map = {n: file for file, part in zip(names, parts, strict=True) for n in part}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{SAFETENSORS}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    return [folder / name for name in names]
