"""Recognises configs of Trax by their names, and names the config of the same model in reformax.

Trax's gin files name functions that Trax registers, such as `ReformerLM`, and modules of Trax. Ours
import what they name. A config of Trax is read as data, and Trax is never imported for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from reformax.declared import SettingError


class Counterpart(NamedTuple):
    """The same model in reformax: its name, its config, and configs by a word of the file."""

    model: str
    config: str
    by_word: Mapping[str, str] = {}


MODELS = {
    "ReformerLM": Counterpart(
        "lm.ReformerLM",
        "reformer_enwik8.gin",
        {"imagenet": "images.gin", "copy": "reformer_duplication.gin", "c4": "reformer_text.gin"},
    ),
    "TransformerLM": Counterpart(
        "lm.TransformerLM", "transformer_enwik8.gin", {"lm1b": "transformer_text.gin"}
    ),
    "Reformer": Counterpart("seq2seq.Reformer", "reformer_wmt_ende.gin"),
    "Transformer": Counterpart("seq2seq.Transformer", "transformer_wmt_ende.gin"),
    "TransformerEncoder": Counterpart(
        "encoder.TransformerEncoder", "listops.gin", {"imdb": "reviews.gin"}
    ),
    "BERT": Counterpart("encoder.TransformerMaskedLM", "bert.gin"),
}
# Of Trax's other names, those that its published configs and its runs' configs set.
_OTHERS = {
    "SelfAttention",
    "LSHSelfAttention",
    "PureLSHSelfAttention",
    "MixedLSHSelfAttention",
    "multifactor",
    "warmup_and_rsqrt_decay",
    "data_streams",
    "batcher",
    "batch_fn",
    "ReformerShortenLM",
    "TransformerDecoder",
    "Transformer2",
    "ConfigurableTransformer",
    "ConfigurableTransformerLM",
    "Terraformer",
    "ConfigurableTerraformer",
    "HourglassLM",
    "MLP",
    "RNNLM",
}


def is_trax(statements) -> bool:
    """Whether a config, read by `statements.read`, is one of Trax."""
    if any(module.split(".")[0] in ("trax", "tensor2tensor") for module in statements.imports):
        return True
    if "__gin__.dynamic_registration" in statements.imports:
        return False
    ours = {found.model for found in MODELS.values()}
    selectors = {name.rpartition("/")[2].rpartition(".")[0] for name in statements.values}
    return any(x.rpartition(".")[2] in MODELS.keys() | _OTHERS for x in selectors - ours)


def last(setting: str) -> tuple[str, str]:
    """('ReformerLM', 'd_model') of 'scope/trax.models.ReformerLM.d_model'."""
    *_, function, argument = ["", *setting.rpartition("/")[2].split(".")]
    return function, argument


def function_of(reference: str) -> str:
    """'SelfAttention' of '@scope/trax.layers.SelfAttention()'."""
    return reference.lstrip("@").removesuffix("()").rpartition("/")[2].rpartition(".")[2]


def model_of(statements) -> str | None:
    """The name of the model that a config of Trax trains; None if it says none."""
    values = statements.values
    for setting, value in values.items():
        if last(setting) == ("train", "model") and not isinstance(value, int | float):
            return function_of(resolved(values, value))
    found = [last(setting)[0] for setting in values if "." in setting]
    return next((name for name in found if name in MODELS), None)


def resolved(values: Mapping[str, Any], value: Any) -> Any:
    """A value, or that of the macro which it names."""
    seen = set()
    while isinstance(value, str) and value.startswith("%") and value not in seen:
        seen.add(value)
        value = values.get(value[1:], values.get(f"{value[1:]}/macro.value", value))
    return value


def refuse(source: str, statements) -> None:
    """Raises `SettingError` for a config of Trax; the line names the counterpart."""
    if not is_trax(statements):
        return
    name = model_of(statements)
    if name is None or name not in MODELS:
        said = "names no model" if name is None else f"has the model {name}"
        raise SettingError(
            f"{source} is a config of Trax and {said}: reformax has {', '.join(MODELS)}; "
            "`reformax configs` lists the configs"
        )
    found = MODELS[name]
    text = " ".join([source, *map(str, statements.values.values())]).lower()
    config = next((c for word, c in found.by_word.items() if word in text), found.config)
    read = "; `reformax convert --from=RUN_FOLDER` reads a trained one"
    raise SettingError(
        f"{source} is a config of Trax, whose {name} is {found.model} here: train it with "
        f"--config_file={config}{read if name in ('ReformerLM', 'TransformerLM') else ''}"
    )
