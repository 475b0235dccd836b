"""The tiny models of hugging_face.npz, as files and as arrays."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
FIXTURE = np.load(HERE / "hugging_face.npz")
CONFIGS = json.loads(str(FIXTURE["configs"]))
PUBLISHED = {
    name: json.loads((HERE / f"reformer_{name}.json").read_text())
    for name in ("enwik8", "crime_and_punishment")
}


def weights(name: str) -> dict[str, np.ndarray]:
    """The tensors of a model, by Hugging Face's names."""
    prefix = f"{name}/weights/"
    return {key.removeprefix(prefix): FIXTURE[key] for key in FIXTURE if key.startswith(prefix)}


def saved(folder: Path, name: str, config=None, tensors=None) -> Path:
    """A folder of a model, or of another config and tensors."""
    config = CONFIGS[name] if config is None else config
    return write(folder, config, weights(name) if tensors is None else tensors)


def write(folder: Path, config, tensors) -> Path:
    """A folder as `save_pretrained` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def in_parts(folder: Path, tensors, n: int) -> None:
    """Writes the tensors of a folder anew, as `n` files and their index."""
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{i % n}.safetensors" for i, name in enumerate(names)}
    for i in range(n):
        save_file({name: tensors[name] for name in names[i::n]}, folder / f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
