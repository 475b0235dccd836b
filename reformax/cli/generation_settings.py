"""How a converted model is sampled: the generation_config.json that its folder had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reformax.declared import Count, NonNegative, TopP, check

# What is read of it; flags come first.
FIELDS = {
    "do_sample": bool,
    "temperature": NonNegative,
    "top_k": Count,
    "top_p": TopP,
    "eos_token_id": Count | Sequence[Count],
}


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Raises `SettingError` for a field that is not what it may be."""
    for name, hint in FIELDS.items():
        if settings.get(name) is not None:
            check(f"{where}: {name}", settings[name], hint)


def of_checkpoint(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that a converted run's checkpoint keeps; {}: none."""
    source = info.get("source")
    found = source.get("generation") if isinstance(source, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    check_settings(found, "generation_config.json")
    return found


def sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the flags of `reformax generate`. Without `do_sample` the settings name none."""
    if settings.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_k", "top_p") if settings.get("do_sample") else ()
    return {name: settings[name] for name in names if settings.get(name) is not None}


def ends_of_checkpoint(info: Mapping[str, Any], vocab_size: int) -> list[int]:
    """The tokens that end a text of a converted run, below `vocab_size`; []: none.

    As in transformers, a model without a generation_config.json has those of its config.json.
    """
    name, found = "eos_token_id", of_checkpoint(info).get("eos_token_id")
    source = info.get("source")
    if found is None and isinstance(source, Mapping) and source.get("generation") is None:
        config = source.get("config") or {}
        found = config.get(name, (config.get("text_config") or {}).get(name))
        check(f"config.json: {name}", found, FIELDS[name] | None)
    found = [] if found is None else [found] if isinstance(found, int) else found
    return [token for token in found if token < vocab_size]
