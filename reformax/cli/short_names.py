"""The short names of settings that a config may set without saying whose they are.

`d_model = 512` of a config, and `--config=d_model=512`, is the argument `d_model` of the model, of
the models of its stages, and of `loop.train`, unless the config sets that argument itself. So a
file of sizes serves every model.
"""

from __future__ import annotations

from collections.abc import Iterator

from reformax.cli import lookup
from reformax.cli.lookup import TRAIN

_STAGE_MODEL = "reformax.training.stages.Stage.model"
# Arguments that share a short name: sizes of one head, of either stack, of either language.
_SHARED = {
    "d_head": ("d_attention_key", "d_attention_value"),
    "n_layers": ("n_encoder_layers", "n_decoder_layers"),
    "vocab_size": ("input_vocab_size",),
    "attention": (
        "attention_type",
        "encoder_attention_type",
        "decoder_attention_type",
        "cross_attention_type",
    ),
}
_OF = {argument: name for name, arguments in _SHARED.items() for argument in arguments}


def of(argument: str) -> str:
    """The short name of an argument of a model or of `loop.train`: `d_head` of d_attention_key."""
    return _OF.get(argument, argument)


def in_use() -> Iterator[tuple[str, str, str]]:
    """(function, argument, short name) of training and of its models."""
    for name in lookup.parameters(TRAIN):
        yield TRAIN, name, of(name)
    for selector in _models():  # found last: the caller may have bound `model`, one of training's
        for name in lookup.parameters(selector):
            yield selector, name, of(name)


def arguments() -> dict[str, str]:
    """'module.function.argument' of each short name."""
    return {short: f"{lookup.short(function)}.{name}" for function, name, short in in_use()}


def unset() -> set[str]:
    """The short names of arguments that the config does not set."""
    return {name for x, argument, name in in_use() if not lookup.is_set(f"{x}.{argument}")}


def _models() -> set[str]:
    """The models of the run and of its stages."""
    scopes = {scope for scope, _ in lookup.references_of(f"{TRAIN}.stages")}
    names = [
        f"{TRAIN}.model",
        _STAGE_MODEL,
        *(f"{scope}/{_STAGE_MODEL}" for scope in scopes if scope),
    ]
    return {selector for name in names for _, selector in lookup.references_of(name)}
