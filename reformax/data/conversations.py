"""Conversations from the rows of tables, as data sets of fine-tuning have them.

Three layouts are known, by the names of fields:

* Messages: a list of objects with `role` and `content`, as OpenAI and Hugging Face have it, or with
  `from` and `value`, as ShareGPT has it.
* A prompt and its answer, two texts. Alpaca's `input` and Dolly's `context` belong to the prompt.
* The same of two lists of messages, TRL's "conversational prompt-completion": the answer's alone
  are scored.

What cannot be meant is an error that names the line. Rows without an answer are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from reformax.data import files, tables
from reformax.data.arrow_tables import ANSWERS, MESSAGES, PROMPTS, Column, NoField
from reformax.declared import SettingError

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"developer": "system", "human": "user", "prompter": "user"}
_ROLES |= dict.fromkeys(("gpt", "bot", "model", "chatgpt"), "assistant")
_ROLES |= dict.fromkeys(("tool", "function", "ipython", "observation"), "tool")
# Fields besides these, which rows may have.
_CONTEXTS, _SYSTEMS = ("input", "context"), ("system", "system_prompt")
_KNOWN = (
    "messages or conversations, or prompt, instruction or question with completion, answer, "
    "response or output"
)


class Turn(NamedTuple):
    """A message of a conversation, and whether a model learns to write it."""

    role: Role
    text: str
    scored: bool = False


Conversation = tuple[Turn, ...]


class LeftOut(NamedTuple):
    """Why a row is no conversation to learn from."""

    reason: str


class FieldNames(NamedTuple):
    """The fields that the user names; None: the known ones."""

    messages: str | None = None
    prompt: str | None = None
    answer: str | None = None


class _Wrong(Exception):
    """A row that cannot be meant; what it has, what is expected, and the fix."""


def read(
    path: Path, rows: tables.Reader, names: FieldNames, option: str
) -> Iterator[Conversation | LeftOut]:
    """The conversations of a table, in order.

    Args:
      path: the file.
      rows: reads it.
      names: the fields, where the user names them.
      option: the factory whose settings these are, for errors.

    Raises:
      ValueError: the table has no such fields; a message has no role or content, or a role that is
        none; or the file is damaged.
      OSError: it cannot be read.
    """
    most = files.most_unpacked(files.check_ordinary(path))
    fields = _fields(path, rows, names, option, most)
    for number, row in enumerate(rows(path, fields, most), start=1):
        values = {field.name: value for field, value in zip(fields, row, strict=True)}
        try:
            found = _of_row(fields, values)
        except _Wrong as error:
            raise SettingError(f"{tables.place_of(path, rows, number)}: {error}") from None
        yield found if isinstance(found, LeftOut) else _trimmed(found)


def _fields(
    path: Path, rows: tables.Reader, names: FieldNames, option: str, most: int
) -> list[Column]:
    """The first of the layouts whose fields the first row has, and the others that it uses."""
    there: Sequence[str] = ()
    for layout in _layouts(names, option):
        try:
            next(rows(path, layout, most), None)
        except NoField as error:
            there = error.others
            continue
        taken = {field.name for field in layout}
        return [
            *layout,
            *(
                Column(name, option, is_text=False, nested=True, optional=True)
                for name in ((*_CONTEXTS, *_SYSTEMS) if len(layout) > 1 else _SYSTEMS)
                if name not in taken
            ),
        ]
    asked = " and ".join(repr(name) for name in names if name is not None)
    found = ", ".join(there[:9]) or "none"
    raise SettingError(
        f"{path} has no rows with {asked or _KNOWN}: it has {found}; name its fields by "
        f"{option}.messages, or {option}.prompt and {option}.answer"
    )


def _layouts(names: FieldNames, option: str) -> Iterator[list[Column]]:
    if names.prompt is None and names.answer is None:
        for name in [names.messages] if names.messages else MESSAGES:
            yield [Column(name, f"{option}.messages", nested=True)]
    if names.messages is None:
        prompts = [names.prompt] if names.prompt else PROMPTS
        answers = [names.answer] if names.answer else ANSWERS
        for prompt, answer in itertools.product(prompts, answers):
            yield [
                Column(prompt, f"{option}.prompt", nested=True),
                Column(answer, f"{option}.answer", nested=True),
            ]


def _of_row(fields: Sequence[Column], values: Mapping[str, Any]) -> list[Turn] | LeftOut:
    """The turns of a row, of which the first one or two fields are the layout."""
    is_pair = fields[0].setting.endswith(".prompt")
    main = [values[field.name] for field in fields[: 1 + is_pair]]
    if any(value is None for value in main):
        missing = next(f.name for f, value in zip(fields, main, strict=False) if value is None)
        return LeftOut(f"no {missing}")
    if not is_pair:
        turns = _of_messages(fields[0].name, main[0], scored=True)
    elif all(isinstance(value, list) for value in main):
        prompt = _of_messages(fields[0].name, main[0], scored=False)
        turns = [*prompt, *_of_messages(fields[1].name, main[1], scored=True)]
    else:
        prompt, answer = (_text(f.name, value) for f, value in zip(fields, main, strict=False))
        context = _of_further_fields(_CONTEXTS, fields, values)
        prompt = "\n\n".join([prompt, context] if context else [prompt])
        turns = [Turn("user", prompt), Turn("assistant", answer, True)]
    system = _of_further_fields(_SYSTEMS, fields, values)
    if system and not any(turn.role == "system" for turn in turns):
        turns = [Turn("system", system), *turns]
    return turns


def _of_further_fields(
    names: Iterable[str], fields: Sequence[Column], values: Mapping[str, Any]
) -> str:
    """The text of the first of some fields that a row has, none of which is one of its layout."""
    option_of = {field.name: field.setting for field in fields if field.optional}
    for name in names:
        value = values[name] if name in option_of else None
        if value in (None, b"", [], {}) or value != value:  # as of an empty cell
            continue
        if isinstance(value, bool | int | float):
            return str(value)
        try:
            return _text(name, value)
        except _Wrong as error:
            fix = f"or name it otherwise, as {option_of[name]} reads it too"
            raise _Wrong(f"{error}, {fix}") from None
    return ""


def _of_messages(field: str, value: Any, scored: bool) -> list[Turn]:
    """The turns of a list of messages."""
    if not isinstance(value, list):
        raise _Wrong(f"{field!r} is no list: expected messages, each with a role and a content")
    return [_turn(f"{field}[{i}]", message, scored) for i, message in enumerate(value)]


def _turn(where: str, message: Any, scored: bool) -> Turn:
    if not isinstance(message, dict):
        raise _Wrong(f"{where} is no object: expected one with role and content")
    name = next((name for name in ("role", "from") if message.get(name) is not None), None)
    if name is None:
        raise _Wrong(f"{where} has no 'role' and no 'from': name who says it")
    role = _ROLES.get(str(message[name]).strip().lower())
    if role is None:
        raise _Wrong(
            f"{where} has {name} {message[name]!r}: expected system, user, assistant or tool (or "
            "human and gpt); rename it, or take the row out"
        )
    content = next((name for name in ("content", "value") if name in message), None)
    if content is None:
        raise _Wrong(f"{where} has no 'content' and no 'value': write what the {role} says")
    text = "" if message[content] is None else _text(f"{where}.{content}", message[content])
    # OpenAI's: an assistant's message of weight 0 is part of the context alone.
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise _Wrong(f"{where} has weight {weight!r}: expected 0 or 1")
    return Turn(role, text, scored and role == "assistant" and weight != 0)


def _text(where: str, value: Any) -> str:
    """The text of a value: its own, or that of its parts."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
    ):
        value = "".join(part["text"] for part in value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise _Wrong(f"{where} is {type(value).__name__}: expected text")
    return value.encode("utf-8", "replace").decode("utf-8")  # JSON may hold halves of characters


def _trimmed(turns: Sequence[Turn]) -> Conversation | LeftOut:
    """The turns up to the last answer, after which nothing is learnt."""
    scored = [i for i, turn in enumerate(turns) if turn.scored]
    if not scored:
        return LeftOut("no answer of an assistant")
    if not all(turns[i].text.strip() for i in scored):
        return LeftOut("an empty answer")
    return tuple(turns[: scored[-1] + 1])
