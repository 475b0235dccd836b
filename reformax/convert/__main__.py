"""Converts a checkpoint: `reformax convert --from=PATH --to=PATH`.

    --from=FOLDER_OR_FILE.safetensors    Hugging Face's ReformerModelWithLMHead, GPT2LMHeadModel,
                                         BertForMaskedLM or decoder of today (Llama, Mistral, Qwen,
                                         Gemma, OLMo, SmolLM3, Phi-3), with config.json, and
                                         tokenizer.json and generation_config.json if they are there
    --from=TRAX_RUN                      a run of Trax, with config.gin and model.pkl.gz, of
                                         ReformerLM or TransformerLM
    --from=model.pkl.gz --config_file=FILE.gin    the weights alone; the gin file, Trax's or one as
                                         for `reformax train`, says which model
    --from=RUN                           a folder of `reformax train` or of this command

--attention='asymmetric_lsh(n_hashes=8)' puts another attention in the place of dense layers, or of
those of --layers=0,2-4, and writes a run. It is not trained, so it costs bits: they are measured on
--data_dir, or on the source of Python's library, in rows of --length, of --tokens in all, and
printed for each layer and by the number of hashes. --attention=dense puts dense layers back.

A model from elsewhere becomes a run's folder, which `reformax evaluate` reads. A run becomes a
folder for Hugging Face. --to=NAME.pkl.gz writes any model for Trax. The command then reads the
result and compares its logits of random tokens with the source's. What it wrote has its name after
that: a command that fails leaves nothing. The last line says the seconds and the memory that this
took.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reformax import memory
from reformax.cli import config, errors, flags
from reformax.declared import Count, Name, PathName, SettingError, Size
from reformax.shell import user_path

# The command fails if logits differ by more than this share of the largest.
TOLERANCE = 1e-4
TENSORS = (".safetensors", ".bin", ".pt", ".pth")  # files of them


class SourceModel(NamedTuple):
    """A model as it was read."""

    kind: str  # "hugging_face", "trax" or "run"; "other_attention" of none of them any more
    spec: Any
    params: Any
    details: dict[str, Any]  # the origin, as a run keeps it
    notes: list[str]  # differences from the original, one line each
    vocabulary: bytes | None = None  # what its tokens are, if that is known
    weights: Path | None = None  # Trax's file
    length: int | None = None  # of the rows that a run was trained on


def main(argv: Sequence[str] | None = None) -> int:
    """Reads, writes and checks; returns the exit code."""
    start = time.perf_counter()
    args = parser().parse_args(argv)
    source_path, target_path = user_path("from", args.source), user_path("to", args.target)
    to_trax = target_path.name.endswith(".pkl.gz")
    empty = not to_trax and target_path.is_dir() and not any(target_path.iterdir())
    if target_path.exists() and not empty:
        raise SettingError(f"--to={target_path} exists: give another name, or delete it")
    above = next(parent for parent in target_path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise SettingError(
            f"--to={target_path} is in {above}, which is no folder: give another name"
        )
    import jax

    with errors.reading_input():
        source, kind = _source_and_kind(source_path, to_trax, args)
    with _aside(target_path) as path:
        notes = [*source.notes, *_write(kind, path, source, args.length)]
        for note in notes:
            print(f"note: {note}")
        n_params = sum(x.size for x in jax.tree.leaves(source.params))
        print(f"{source.spec.model}, {n_params:,} parameters: {source_path} -> {target_path}")
        source_path = source.weights or source_path
        _check(source, {source.kind: source_path, kind: path}, kind, str(target_path))
    print(f"{time.perf_counter() - start:.1f} s, {memory.peaks_in_words()}")
    return 0


def _source_and_kind(
    path: Path, to_trax: bool, args: argparse.Namespace
) -> tuple[SourceModel, str]:
    """The model to write and the kind of what is written; refuses what cannot be."""
    from reformax.training.named_tensors import check_finite

    source = _read(path, args)
    check_finite(source.params, f"--from={path}")
    kind = "run" if source.kind != "run" or args.attention else "hugging_face"
    kind = "trax" if to_trax else kind
    _check_flags(args, source.kind, kind)
    if args.attention is not None:
        source = _with_attention(source, args)
    _check_target(kind, source)
    return source, kind


@contextlib.contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A path to write to; it becomes `target` at the end, or is deleted if there is an error."""
    target = target.resolve()
    there = next(parent for parent in target.parents if parent.is_dir())
    folder = Path(tempfile.mkdtemp(prefix=".reformax.", dir=there))
    try:
        yield folder / target.name
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / target.name).replace(target)
    finally:
        shutil.rmtree(folder)


def parser():
    """The flags."""
    parser = flags.parser(__doc__, prog="reformax convert")
    parser.add_argument(
        "--from", required=True, dest="source", type=flags.of(PathName), help="what to read"
    )
    parser.add_argument(
        "--to", required=True, dest="target", type=flags.of(PathName), help="what to write"
    )
    parser.add_argument(
        "--config_file",
        action="append",
        default=[],
        type=flags.of(PathName),
        help="from Trax: the model's config; repeatable",
    )
    parser.add_argument(
        "--config",
        action="append",
        type=flags.of(flags.Override),
        default=[],
        metavar="NAME=VALUE",
        help="one setting of it",
    )
    parser.add_argument(
        "--step", type=flags.of(Count), help="from a run: a checkpoint (default: the best)"
    )
    parser.add_argument(
        "--length",
        type=flags.of(Size),
        help="to Trax: of the input signature (default: two chunks, or all axial positions); with "
        "--attention: of the rows that bits are measured on (default: 1,024)",
    )
    parser.add_argument(
        "--attention", type=flags.of(Name), help="to a run: in the place of dense layers"
    )
    parser.add_argument(
        "--layers", type=flags.of(Name), help="with --attention: their numbers, as 0,2-4"
    )
    parser.add_argument(
        "--data_dir", type=flags.of(PathName), help="with --attention: the text to measure bits on"
    )
    parser.add_argument(
        "--tokens",
        type=flags.of(Size),
        help="with --attention: of the text, from its beginning (default: 4,096, or a row)",
    )
    flags.add_trust(parser)
    flags.add_traceback(parser)
    return parser


def _check_flags(args: argparse.Namespace, source: str, target: str) -> None:
    """Raises `SettingError` for a flag that this conversion does not read."""
    for name, is_read, where in (
        ("config_file", source == "trax", "--from=model.pkl.gz"),
        ("config", source == "trax", "--from=model.pkl.gz"),
        ("step", source == "run", "--from=RUN"),
        ("trust_config", source == "run", "--from=RUN"),
        ("length", target == "trax" or args.attention, "--to=NAME.pkl.gz or --attention"),
        ("attention", target == "run", "a run as --to"),
        ("layers", args.attention is not None, "--attention"),
        ("data_dir", args.attention is not None, "--attention"),
        ("tokens", args.attention is not None, "--attention"),
    ):
        value = getattr(args, name)
        if value not in (None, [], False) and not is_read:
            raise SettingError(f"--{name} is {value}: it goes with {where} alone, leave it out")


def _with_attention(source: SourceModel, args: argparse.Namespace) -> SourceModel:
    """The model with the attention of the flags; says what it costs."""
    from reformax.convert import other_attention

    op = other_attention.op_of(args.attention)
    layers = other_attention.layers_of(args.layers, source.spec, op)
    spec, params = other_attention.replaced(source.spec, source.params, op, layers)
    data_dir, sizes = args.data_dir and Path(args.data_dir), (args.length, args.tokens)
    tokens = other_attention.tokens_of(source.spec, source.vocabulary, data_dir, *sizes)
    model = source.spec, source.params
    bits = other_attention.measure(*model, op, layers, tokens, lambda line: print(line, flush=True))
    done = {"attention": args.attention, "layers": layers, "bits": bits}
    return source._replace(
        kind="other_attention", spec=spec, params=params, details=source.details | {"changed": done}
    )


def _check_target(kind: str, source: SourceModel) -> None:
    """Raises `ValueError` for a model that the format lacks, before anything is written."""
    if kind == "hugging_face":
        from reformax.convert import hugging_face

        hugging_face.config_of(source.spec, source.details.get("config"))
    if kind == "trax":
        from reformax.convert import trax_models

        trax_models.table(source.spec)


def _read(path: Path, args: argparse.Namespace) -> SourceModel:
    if not path.exists():
        raise FileNotFoundError(
            f"--from={path} does not exist: download a model of Hugging Face, and give its folder"
        )
    from reformax.convert import trax_gin

    weights = trax_gin.weights_of(path) if path.is_dir() else None
    if weights is None and path.is_file() and path.name.endswith((".pkl.gz", ".pkl")):
        weights = path
    if weights is not None:
        return _read_trax(weights, args)
    if (path / "config.gin").is_file() or (path / "checkpoints").is_dir():
        from reformax.convert import run_folder

        run = run_folder.read(path, args.step, args.trust_config)
        given = run.spec, run.params, run.source, [], run.vocabulary
        return SourceModel("run", *given, length=run.length)
    from reformax.convert import hugging_face

    files = [path, *path.parent.glob("config.json")] if path.is_file() else path.iterdir()
    if not any(file.name == "config.json" or file.suffix in TENSORS for file in files):
        raise ValueError(
            f"--from={path} holds no model: give a folder of Hugging Face with config.json and "
            "model.safetensors, a run's folder, or weights of Trax, a .pkl.gz"
        )
    read = hugging_face.read(path)
    details = {"format": "hugging_face", "config": read.config}
    details |= {} if read.generation is None else {"generation": read.generation}
    return SourceModel("hugging_face", read.spec, read.params, details, read.notes, read.vocabulary)


def _read_trax(path: Path, args: argparse.Namespace) -> SourceModel:
    """Weights of Trax, and the model that a config of Trax or of this package says."""
    from reformax.convert import trax_files, trax_gin, trax_models
    from reformax.convert.spec import Spec

    given = [Path(file) for file in args.config_file]
    neighbour = path.with_name(trax_gin.CONFIG)
    if not given and trax_gin.is_config(neighbour):
        given = [neighbour]
    if not given:
        raise ValueError(
            f"--from={path} holds weights without names: say what model it is with "
            "--config_file=FILE.gin, Trax's own config or one as for training"
        )
    notes = []
    if len(given) == 1 and trax_gin.is_config(given[0]):
        if args.config:
            raise ValueError(
                f"--config is {args.config[0]}: {given[0]} is a config of Trax, set it there"
            )
        spec, notes = trax_gin.read(given[0], trax_files.n_ids(path))
    else:
        config.parse(args.config_file, args.config)
        spec = Spec.of_config()
    params = trax_models.read_params(path, spec)
    notes += trax_models.notes(spec)
    details = {"format": "trax"}
    return SourceModel("trax", spec, params, details, notes, weights=path)


def _write(kind: str, path: Path, source: SourceModel, length: int | None) -> list[str]:
    """Writes a model; returns notes on the differences."""
    if kind == "hugging_face":
        from reformax.convert import hugging_face

        like = source.details.get("config") if source.kind == "run" else None
        generation = source.details.get("generation")
        model = source.spec, source.params
        hugging_face.write(path, *model, like, source.vocabulary, generation, source.length)
        return []
    if kind == "trax":
        from reformax.convert import trax_models

        length = length or trax_models.length_of(source.spec)
        trax_models.write_params(path, source.spec, source.params, length)
        return trax_models.notes(source.spec) if source.kind != "trax" else []
    from reformax.convert import run_folder

    names = {"hugging_face": "Hugging Face's", "trax": "Trax's"}
    note = f"Converted by reformax.convert from a checkpoint of {names.get(source.kind)} format."
    if (changed := source.details.get("changed")) is not None:
        note = f"Converted by reformax.convert with --attention={changed['attention']}."
    vocabulary = source.vocabulary
    run_folder.write(path, source.spec, source.params, source.details, note, vocabulary)
    return run_folder.notes(path, source.spec)


def _check(source: SourceModel, paths: dict[str, Path], kind: str, target: str) -> None:
    """Compares the model that was written with its source.

    Args:
      source: the model.
      paths: what it was read from and what was written, by kind.
      kind: of the latter.
      target: the name that it will have.

    Raises:
      ValueError: logits differ, or are not finite.
    """
    from reformax.convert import check, hugging_face, run_folder, trax_files, trax_models

    if kind == "trax":
        spec, reread = None, trax_models.read_params(paths[kind], source.spec)
    else:
        read = {"run": run_folder.read, "hugging_face": hugging_face.read}[kind](paths[kind])
        spec, reread = read.spec, read.params
    other = f"{target} as read again"
    found = [check.against_params(source.spec, source.params, reread, other, spec)]
    if "hugging_face" in paths:
        if check.has_transformers():
            path = paths["hugging_face"]
            found.append(check.against_transformers(source.spec, reread, path))
        else:
            print("check: not against transformers, which is not installed with torch")
    if "trax" in paths:
        compared = None
        if not trax_files.HAS_TRAX:
            print(
                "check: not against Trax's own model, which is not installed: "
                "pip install 'reformax[trax]'"
            )
        elif (compared := check.against_trax(source.spec, reread, paths["trax"])) is None:
            print("check: not against Trax's own model, whose length is too long for this check")
        else:
            found.append(compared)
    for comparison in found:
        print(
            f"check: logits differ by at most {comparison.difference:.2g}, the largest being "
            f"{comparison.scale:.3g}, from {comparison.what}"
        )
    if not all(comparison.agrees(TOLERANCE) for comparison in found):
        why = "that is a fault of this command"
        if not all(map(math.isfinite, (x for c in found for x in (c.difference, c.scale)))):
            why = "its logits are not finite"
        raise ValueError(
            f"the converted model computes something else: {why}; {target} is not written"
        )


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))
