"""A run's folder for `reformax evaluate`: config.gin, and the weights as a checkpoint of step 0.

A converted model has no optimizer's state. It can be scored, but training cannot resume from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reformax import durable
from reformax.cli import parsed, saved_run
from reformax.convert.spec import Spec
from reformax.data import pieces
from reformax.data.vocabulary import FILE
from reformax.declared import shown
from reformax.training import loop
from reformax.training.checkpoint import CheckpointReader, Checkpoints
from reformax.training.step import TrainState

# The context that a converted model is scored with, unless --length says otherwise.
LENGTH = 2048
_MASKED_IMPORT = "from reformax.data import masked"


class ConvertibleRun(NamedTuple):
    """The model of a run's folder."""

    spec: Spec
    params: Any
    source: dict[str, Any]  # the origin of a converted model; empty if reformax trained it
    vocabulary: bytes | None = None  # what the run keeps, if its tokens are pieces
    length: int | None = None  # of the rows that it was trained on, if it was


def read(folder: str | Path, step: int | None = None, trusted: bool = False) -> ConvertibleRun:
    """Reads the model of a run and its weights, the moving average if there is one.

    Args:
      folder: a folder of `reformax train` or of `write`.
      step: the checkpoint's step; None: the best, or the latest if none has a score.
      trusted: whether the checkpoint's config may name any module, and so run its code.

    Raises:
      ValueError: the folder has no run or no checkpoint, or its model is not of this package.
      ConfigError: the config names more than `reformax.cli.trust` allows.
    """
    checkpoints = CheckpointReader(Path(folder).expanduser())

    def choose() -> dict[int, str | None]:
        chosen = saved_run.choose(checkpoints, "best" if step is None else str(step))
        return {chosen: checkpoints.config(chosen)}

    def restored(configs: dict[int, str | None]) -> ConvertibleRun:
        ((chosen, text),) = configs.items()
        saved_run.parse(checkpoints, chosen, text, trusted=trusted)
        spec = Spec.of_config()
        params, info = checkpoints.restore_params(chosen, spec.shapes())
        kept = Path(folder).expanduser() / FILE
        vocabulary = kept.read_bytes() if kept.is_file() else None
        length = parsed.bindings(loop.train, ("length",))["length"] if chosen else None
        return ConvertibleRun(spec, params, info.get("source", {}), vocabulary, length)

    return saved_run.steadily(checkpoints, choose, restored)


def write(
    folder: str | Path,
    spec: Spec,
    params: Any,
    source: dict[str, Any],
    note: str,
    vocabulary: bytes | None = None,
) -> Path:
    """Writes a model and its weights.

    Args:
      folder: created if it does not exist; must not hold a run.
      spec: the model.
      params: its weights.
      source: JSON values that `read` returns.
      note: one line for config.gin that says where the model is from.
      vocabulary: a tokenizer.json, which the run keeps.

    Raises:
      ValueError: the folder holds a run already, or the vocabulary is none.
    """
    folder = Path(folder).expanduser()
    checkpoints = Checkpoints(folder)
    if (folder / "config.gin").exists() or checkpoints.steps():
        raise ValueError(f"{folder} holds a run already: give another folder, or delete it")
    kept, info = None, {"source": source}
    if vocabulary is not None:
        folder.mkdir(parents=True, exist_ok=True)
        durable.write(folder / FILE, vocabulary)
        kept = pieces.PieceVocabulary(0)
        info["vocabulary"] = kept.keep_in(folder, begun=True)
    n_ids = kept and min(kept.size, spec.arguments["vocab_size"])
    text = gin(spec, note, n_ids, kept and kept.mask_id)
    state = TrainState(np.int32(0), params, (), None)
    checkpoints.save(0, state, config=text, **info)
    checkpoints.wait()
    durable.write(folder / "config.gin", text.encode())
    return folder


def notes(folder: str | Path, spec: Spec) -> list[str]:
    """A line on the tokens of a run's vocabulary that its model has no rows for."""
    if not (Path(folder) / FILE).is_file():
        return []
    size = spec.arguments["vocab_size"]
    more = pieces.load(folder).beyond(size)
    if not more:
        return []
    names = ", ".join(map(shown, more[:3]))
    return [
        f"the tokenizer has ids from {size:,} on, such as {names}, and the model vocab_size={size}:"
        " a text that has one of them is refused, every other is read"
    ]


def gin(spec: Spec, note: str, n_pieces: int | None = None, mask_id: int | None = None) -> str:
    """The config of a converted model: its arguments, and a text to score it on.

    The text is of pieces if the run keeps a vocabulary of so many, and of bytes otherwise. A
    vocabulary of 257 or 258 ids has its bytes at the end, like google/reformer-enwik8, where
    bytes begin at id 2.
    """
    length = min(LENGTH, spec.max_length() or LENGTH)
    n_ids, model = spec.arguments["vocab_size"], spec.gin()
    n_of_text, offset = n_pieces or n_ids, n_ids - 256
    if n_of_text == n_ids:
        setting = f"{spec.module}.{spec.model}.vocab_size = "
        model = model.replace(f"{setting}{n_ids}\n", f"{setting}%vocab_size\n")
    lines = [
        f"# {note}",
        "#",
        "# reformax evaluate --output_dir=THIS_FOLDER --data_dir=TEXT",
        "# reformax train --config_file=THIS_FOLDER/config.gin --config_file=lora.gin "
        "--init_from=THIS_FOLDER --data_dir=TEXT",
        "from __gin__ import dynamic_registration",
        "from reformax.data import text",
        "from reformax.training import loop",
        f"vocab_size = {n_of_text}",  # chats.gin and lora.gin have these by their names
        "batch_size = 1",
        f"length = {length}",
        model,
        f"loop.train.model = @{spec.module}.{spec.model}",
        "loop.train.task = @text.text()",
        "loop.train.batch_size = %batch_size",
        "loop.train.length = %length",
    ]
    masks = spec.model == "TransformerMaskedLM"
    if masks:
        lines[lines.index("loop.train.task = @text.text()")] = "loop.train.task = @masked.masked()"
        lines.insert(lines.index("from reformax.data import text"), _MASKED_IMPORT)
        lines += ["masked.masked.task = @text.text()", "masked.masked.length = %length"]
        lines += [] if mask_id is None else [f"masked.masked.mask_id = {mask_id}"]
    if n_pieces is not None:
        lines.append("text.text.vocab_size = %vocab_size")
    elif masks:
        lines.append("text.text.offset = 1")
    elif 0 < offset <= 2:
        lines.append(f"text.text.offset = {offset}")
    return "\n".join(lines) + "\n"
