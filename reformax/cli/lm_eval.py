"""Scores a run by lm-evaluation-harness.

    python -m reformax.cli.lm_eval --model reformax --model_args run=DIR --tasks hellaswag

It is the harness's own command, with `reformax` among its models. The harness is installed with
`pip install 'reformax[evals]'`. Its flags follow, such as --tasks, --limit and --output_path.

Of --model_args:

    run=DIR             the folder of a run
    checkpoint=best     or latest, a step, or average:5
    max_length=N        context in tokens (default: the run's length)
    seed=N              of the hashes
    add_bos_token=False the first token precedes empty contexts alone, as the harness has
                        it for GPT-2 (default: before each, as in training)
    trust_config=True   the run's config may name any module, which is code that runs

--batch_size=auto computes about 16,384 tokens together. Temperatures above 0 draw by the seed and a
row's index in its batch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from reformax.cli import compilation_cache, generation_settings, prompts, saved_run
from reformax.declared import AnySeed, PathName, SettingError, Size, check, shown
from reformax.evals.harness import HarnessRequests
from reformax.evals.likelihood import LanguageScorer
from reformax.generation import tokenizers

NAME = "reformax"
_DEVICE = "cuda:0"  # what the harness's command says where --device is not given


def main(argv: Sequence[str] | None = None) -> int:
    """Registers the model and calls the harness."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments in (["-h"], ["--help"]):
        print(f"{__doc__.strip()}\n\nlm_eval --help lists the harness's own flags.")
        return 0
    check_installed()
    from lm_eval.api.registry import register_model

    register_model(NAME)(model_class())
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    return 0


@functools.cache
def model_class(requests: type[HarnessRequests] | None = None) -> type:
    """A class of requests as the harness's model; None: `RunRequests`."""
    from lm_eval.api.model import LM

    # The harness would fork for standard errors, which may hang next to the threads of JAX.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")

    class Reformax(requests or RunRequests, LM):
        """A run as the harness's model."""

    return Reformax


def check_installed() -> None:
    """Raises `ImportError` with the way to install the harness where it is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ImportError(
            "lm-evaluation-harness is not there: pip install 'reformax[evals]'"
        ) from None


class RunRequests(HarnessRequests):
    """The harness's requests of a run's folder, by the arguments of --model_args."""

    def __init__(
        self,
        run: str | None = None,
        checkpoint: Any = "best",
        max_length: int | None = None,
        batch_size: int | str | None = None,
        seed: int = 0,
        add_bos_token: bool = True,
        trust_config: bool = False,
        max_batch_size: None = None,
        device: str | None = None,
        **others: Any,
    ):
        if others:
            name = min(others)
            raise SettingError(
                f"model_args has {name}={shown(others[name])}: expected run, checkpoint, "
                "max_length, seed, add_bos_token or trust_config"
            )
        if run is None:
            raise SettingError("model_args has no run: give the folder of a run, as run=DIR")
        if device not in (None, _DEVICE):
            raise SettingError(
                f"device is {shown(device)}: reformax computes on all devices that JAX sees, leave "
                "it out, and set JAX_PLATFORMS for others"
            )
        if max_batch_size is not None:
            raise SettingError(
                f"max_batch_size is {shown(max_batch_size)}: give batch_size as a number"
            )
        check("run", str(run), PathName)
        check("seed", seed, AnySeed)
        check("add_bos_token", add_bos_token, bool)
        check("trust_config", trust_config, bool)
        compilation_cache.use()
        saved = saved_run.load(str(run), str(checkpoint), trusted=trust_config)
        parts = parts_of(
            saved, max_length=max_length, batch_size=batch_size, seed=seed, progress=True
        )
        super().__init__(*parts, prefixed=add_bos_token)


def parts_of(
    saved: saved_run.Saved,
    *,
    max_length: int | None,
    batch_size: int | str | None,
    seed: int,
    progress: bool,
    typed: str | None = None,
) -> tuple:
    """The arguments of `HarnessRequests` for a run that was read.

    Args:
      saved: the run.
      max_length: the longest row; None: the run's length.
      batch_size: rows together; "auto" or None: as many as make a number of tokens.
      seed: of the hashes.
      progress: whether to show it.
      typed: the flag that gives `max_length`, as the user typed it, in errors.

    Raises:
      SettingError: the model reads no text, or its positions hold fewer tokens.
    """
    if batch_size in (None, "auto"):
        batch_size = None
    else:
        batch_size = int(batch_size) if str(batch_size).isdigit() else batch_size
        check("batch_size", batch_size, Size)
    model = saved.model
    max_length = (
        saved.run["length"] if max_length is None else check("max_length", max_length, Size)
    )
    if model.max_length is not None and max_length > model.max_length:
        raise SettingError(
            f"{typed or f'max_length={max_length}'}: the model's positions hold "
            f"{model.max_length} tokens: lower {max_length} to that"
        )
    scorer = LanguageScorer(
        model,
        saved.params,
        max_length,
        batch_size=batch_size,
        seed=seed,
        mesh=saved.mesh,
        progress=progress,
    )
    vocabulary = saved_run.vocabulary_of(saved)
    tokenizer = prompts.tokenizer(model.vocab_size, vocabulary)
    if isinstance(tokenizer, tokenizers.NumberTokenizer):
        raise SettingError(
            f"output_dir={saved.folder} is of a model with {model.vocab_size} ids and no "
            "vocabulary, which reads no text: give a run of bytes or of pieces"
        )
    ends = generation_settings.ends_of_checkpoint(saved.info, model.vocab_size)
    if vocabulary is None:
        ends.append(prompts.offset(model.vocab_size))  # byte 0, a document's end
    elif vocabulary.end is not None:
        ends.append(vocabulary.end[0])

    def decode(prompt: Sequence[int], new: Sequence[int]) -> str:
        text = tokenizer.stream()
        text(list(prompt), False)  # whether a space is written depends on what is before
        return text(list(new), True)

    return scorer, lambda text: tokenizer.encode(text.encode()), decode, ends


if __name__ == "__main__":
    from reformax.cli import errors

    sys.exit(errors.exit_code(main))
