"""A logger for Weights & Biases, where the package wandb is installed."""

from __future__ import annotations

import html
import importlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from gin.config_parser import BindingStatement, ConfigParser, ParserDelegate

from reformax import durable
from reformax.declared import Name, SettingError, checked

# In the run's folder: the same run of Weights & Biases goes on where training does.
ID_FILE = "wandb_id"


@checked
def wandb_log(
    project: Name | None = None,
    entity: Name | None = None,
    name: Name | None = None,
    group: Name | None = None,
    tags: Sequence[Name] | None = None,
    mode: Literal["online", "offline", "disabled"] | None = None,
) -> WandbLogger:
    """A logger of a run's lines, for `loop.train.loggers`.

    A resumed run goes on in the same run of Weights & Biases, which ignores the steps that it has.
    Its end waits until wandb has sent what is left; `mode='offline'` sends nothing.

    Args:
      project, entity, group, tags, mode: as `wandb.init` takes them; None: its default.
      name: of the run; None: that of its folder.

    Raises:
      SettingError: wandb is not installed.
    """
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        raise SettingError("wandb_log needs the package wandb: pip install wandb") from None
    options = dict(project=project, entity=entity, name=name, group=group, tags=tags, mode=mode)
    return WandbLogger(wandb, options)


class WandbLogger:
    """Logs `train/bits_per_dim` and the like by step; see `wandb_log`."""

    def __init__(self, wandb: Any, options: dict[str, Any]):
        """Takes the module and arguments of its `init`."""
        self._wandb, self._options = wandb, options
        self._run: Any = None

    def open(self, folder: Path, step: int, config: str | None) -> None:
        """Begins a run, or goes on with the one that the folder names."""
        options = self._options | {"name": self._options["name"] or folder.name}
        config_of_run = None if config is None else settings_of(config) | {"gin": config}
        self._run = self._wandb.init(
            dir=str(folder), id=_id(folder), resume="allow", config=config_of_run, **options
        )

    def write(
        self, step: int, split: str, values: dict[str, Any], timing: dict[str, float]
    ) -> None:
        """Logs the numbers of a line, and texts as a page."""
        found = {f"{split}/{name}": x for name, x in {**values, **timing}.items()}
        if "texts" in values:
            page = "<hr>".join(f"<pre>{html.escape(text)}</pre>" for text in values["texts"])
            found[f"{split}/texts"] = self._wandb.Html(page)
        self._run.log(found, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class _Macro(str):
    """The name of a macro in a value."""


class _Texts(ParserDelegate):
    """References as the config writes them."""

    def configurable_reference(self, name: str, evaluate: bool) -> str:
        return f"@{name}{'()' * evaluate}"

    def macro(self, name: str) -> _Macro:
        return _Macro(name)


def settings_of(text: str) -> dict[str, Any]:
    """The settings of a config by their names, macros by their values; references are text."""
    found, macros = {}, {}
    for statement in ConfigParser(text, _Texts()):
        if isinstance(statement, BindingStatement):
            scope, selector, argument, value, _ = statement
            name = f"{scope}/{selector}" if scope else selector
            found[f"{name}.{argument}" if argument else name] = value
            macros |= {} if argument else {name: value}

    def resolved(value: Any, seen: frozenset = frozenset()) -> Any:
        if isinstance(value, _Macro):  # one of itself stays its name
            known = value in macros and value not in seen
            return resolved(macros[value], seen | {value}) if known else f"%{value}"
        if isinstance(value, dict):
            return {str(key): resolved(x, seen) for key, x in value.items()}
        return [resolved(x, seen) for x in value] if isinstance(value, list | tuple) else value

    return {name: resolved(value) for name, value in found.items()}


def _id(folder: Path) -> str:
    path = folder / ID_FILE
    if not path.is_file():
        durable.write(path, uuid.uuid4().hex[:12].encode())
    return path.read_text().strip()
