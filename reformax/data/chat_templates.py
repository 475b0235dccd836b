"""How a conversation is written as tokens, and which of them a model learns to write.

A template has the text before and after what each role says. An answer ends in one token, which is
learnt too. What a prompt is written as in `reformax generate --chat` is what it is in training: an
answer's tokens are encoded apart from those before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int, Int64

from reformax.data.conversations import Conversation, Turn
from reformax.declared import SettingError

Name = Literal["auto", "text", "plain", "chatml", "llama3", "gemma", "nanochat"]
_CONTENT = "{content}"
_TOGETHER = 2**12  # conversations that are encoded together
_BYTE_END = 0  # as of documents


class Template(NamedTuple):
    """A way to write conversations.

    Attributes:
      name: its name, or 'your own'.
      roles: role -> the text before and after what it says. Where it has no system, what one says
        is at the beginning of the user's turn after it.
      first: precedes a conversation, where the vocabulary has it as a token.
      end: the token that an answer ends in; None: the vocabulary's end of a document.
      suffix: follows an answer's end.
    """

    name: str
    roles: Mapping[str, tuple[str, str]]
    first: str = ""
    end: str | None = None
    suffix: str = ""

    def prompt(self, text: str) -> str:
        """A user's message as it is written before an answer."""
        return next(_passages(self, (Turn("user", text), Turn("assistant", "", True)))).text


class Passage(NamedTuple):
    """A part of a conversation that is encoded alone, and whether the end of an answer follows."""

    text: str
    scored: bool = False
    ends: bool = False


def _of_roles(before: str, after: str, assistant: str = "assistant", **others: str) -> dict:
    """The roles of a template in which all are written alike."""
    names = {"user": "user", "assistant": assistant, **others}
    return {role: (before.format(role=name), after) for role, name in names.items()}


_CHATML = "<|im_start|>{role}\n", "<|im_end|>\n"
_LLAMA3 = "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"
TEMPLATES = {
    "nanochat": Template(
        "nanochat",
        {
            "user": ("<|user_start|>", "<|user_end|>"),
            "assistant": ("<|assistant_start|>", "<|assistant_end|>"),
        },
        "<|bos|>",
        "<|assistant_end|>",
    ),
    "chatml": Template(
        "chatml", _of_roles(*_CHATML, system="system", tool="tool"), end="<|im_end|>", suffix="\n"
    ),
    "llama3": Template(
        "llama3",
        _of_roles(*_LLAMA3, system="system", tool="ipython"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "gemma": Template(
        "gemma",
        _of_roles("<start_of_turn>{role}\n", "<end_of_turn>\n", "model"),
        "<bos>",
        "<end_of_turn>",
        "\n",
    ),
    "text": Template(
        "text",
        _of_roles("{role}:\n", "\n\n", "Assistant", user="User", system="System", tool="Tool"),
    ),
    "plain": Template("plain", dict.fromkeys(("user", "assistant", "system", "tool"), ("", ""))),
}


class TextEncoder(Protocol):
    """An encoder of text to ids."""

    def encode_all(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """The ids of each text."""

    def token(self, text: str) -> int | None:
        """The id of a text that is one token by its name; None for another."""

    @property
    def end(self) -> tuple[int, str] | None:
        """The id of a document's end, and its name where it is in text."""


class ByteEncoder:
    """Text as bytes, byte 0 the end of an answer."""

    end = _BYTE_END, ""

    def token(self, text: str) -> None:
        """No text of a template is a byte."""

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text."""
        end = chr(_BYTE_END)
        texts = [text.replace(end, "\ufffd") for text in texts]
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]


class Written(NamedTuple):
    """A template in a vocabulary.

    Attributes:
      template: the template.
      encoder: of text to the vocabulary's ids.
      end: the id that an answer ends in.
      tokens: texts that are tokens of the template, and so nothing that anyone says.
    """

    template: Template
    encoder: TextEncoder
    end: int
    tokens: Sequence[str]

    def prompt(self, text: str) -> list[int]:
        """The ids of a user's message before an answer, as training has them.

        Raises:
          SettingError: training would leave it out.
        """
        turns = Turn("user", text), Turn("assistant", "", True)
        if reason := _unwritable(turns, self):
            raise SettingError(
                f"prompt is {text!r}: it has {reason}, which training leaves out; write it "
                "otherwise"
            )
        return [int(i) for i in self.encoder.encode_all([self.template.prompt(text)])[0]]


class EncodedConversations(NamedTuple):
    """Conversation p is `ids[starts[p]:starts[p + 1]]`.

    Attributes:
      ids: of all conversations.
      scored: whether an id is one of an answer.
      starts: where each begins.
      n_bytes: of the answers, the end of each as one.
      left_out: conversations that the template cannot write, by the reason.
    """

    ids: Int[np.ndarray, " n"]
    scored: Bool[np.ndarray, " n"]
    starts: Int64[np.ndarray, " P+1"]
    n_bytes: int
    left_out: Mapping[str, int]


def chosen(name: str | Mapping[str, str], encoder: TextEncoder, option: str) -> Written:
    """The template of a name, or of the user's own texts, in a vocabulary.

    Args:
      name: a `Name`; 'auto' is the first whose tokens the vocabulary has, else 'text'. Or the
        user's own: role -> text with {content}.
      encoder: of text to the vocabulary's ids.
      option: the factory whose setting this is, for errors.

    Raises:
      SettingError: the vocabulary lacks the template's tokens, or has no end of a document.
    """
    if isinstance(name, Mapping):
        template = custom(name, option)
    elif name == "auto":
        of_tokens = (x for x in TEMPLATES.values() if x.end is not None)
        fits = (x for x in of_tokens if not _lacking(x, encoder))
        template = next(fits, TEMPLATES["text"])
    else:
        template = TEMPLATES[name]
        if lacking := _lacking(template, encoder):
            raise SettingError(
                f"{option}.template is {name!r} and the vocabulary has no token {lacking[0]!r}: "
                "give one that has, or template='text'"
            )
    if template.end is not None:
        first = template.first if encoder.token(template.first) is not None else ""
        tokens = [*_tokens(template), *[first] * bool(first)]
        end = encoder.token(template.end)
        return Written(template._replace(first=first), encoder, end, tokens)
    if encoder.end is None:
        raise SettingError(
            f"{option}.vocabulary has no id for the end of an answer, such as <|endoftext|> or "
            "</s>: give one that has"
        )
    return Written(template, encoder, encoder.end[0], [x for x in encoder.end[1:] if x])


def custom(texts: Mapping[str, str], option: str) -> Template:
    """The template of the user's own texts; raises `SettingError` for what is none."""
    wrong = next(
        (
            f"{role!r}: {text!r}"
            for role, text in texts.items()
            if role not in TEMPLATES["text"].roles
            or not isinstance(text, str)
            or text.count(_CONTENT) != 1
        ),
        None,
    )
    if wrong or not {"user", "assistant"} <= set(texts):
        raise SettingError(
            f"{option}.template has {wrong or 'no user or no assistant'}: expected a text for user "
            f"and assistant, and maybe for system and tool, each with one {_CONTENT}"
        )
    parts = {role: text.partition(_CONTENT) for role, text in texts.items()}
    roles = {role: (before, after) for role, (before, _, after) in parts.items()}
    return Template("your own", roles, suffix=roles["assistant"][1])


def _tokens(template: Template) -> list[str]:
    """The texts of a template that are tokens: those in angle brackets."""
    texts = [part for pair in template.roles.values() for part in pair]
    found = {f"<{x.partition('>')[0]}>" for text in texts for x in text.split("<")[1:]}
    return sorted(found | {template.end} - {None})


def _lacking(template: Template, encoder: TextEncoder) -> list[str]:
    """The tokens of a template that a vocabulary does not have."""
    if template.end is None:
        return []
    return [token for token in _tokens(template) if encoder.token(token) is None]


def encoded(
    conversations: Sequence[Conversation], written: Written, dtype: Any
) -> EncodedConversations:
    """The ids of conversations in a template."""
    ids, scored, lengths = [np.zeros(0, dtype)], [np.zeros(0, bool)], [0]
    n_bytes, left_out = 0, {}
    for first in range(0, len(conversations), _TOGETHER):
        passages: list[Passage] = []
        counts = []
        for conversation in conversations[first : first + _TOGETHER]:
            if reason := _unwritable(conversation, written):
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            of_one = list(_passages(written.template, conversation))
            passages += of_one
            counts.append(len(of_one))
        found = written.encoder.encode_all([passage.text for passage in passages])
        each = iter(zip(passages, found, strict=True))
        for count in counts:
            n = 0
            for passage, encoded_passage in itertools.islice(each, count):
                end = [written.end] * passage.ends
                ids.append(np.array([*encoded_passage, *end], dtype))
                scored.append(np.full(len(ids[-1]), passage.scored))
                n += len(ids[-1])
                n_bytes += (len(passage.text.encode("utf-8")) + 1) * passage.scored
            lengths.append(n)
    starts = np.cumsum(lengths, dtype=np.int64)
    return EncodedConversations(
        np.concatenate(ids), np.concatenate(scored), starts, n_bytes, left_out
    )


def _unwritable(conversation: Sequence[Turn], written: Written) -> str | None:
    """Why a template cannot write a conversation; None if it can."""
    roles, lacks = written.template.roles, f"which template {written.template.name!r} lacks"
    for turn, later in itertools.zip_longest(conversation, conversation[1:]):
        if turn.role not in roles and turn.role != "system":
            return f"a turn of {turn.role}, {lacks}"
        if turn.role not in roles and (later is None or later.role not in ("system", "user")):
            return f"a turn of system, {lacks}, and no user's turn after it to take it"
        if any(token in turn.text for token in written.tokens):
            return "a token of the template in what someone says"
    return None


def _passages(template: Template, conversation: Iterable[Turn]) -> Iterator[Passage]:
    """The parts of a conversation, up to its last answer."""
    waiting, of_system = template.first, ""
    for role, text, is_scored in conversation:
        if role == "system" and role not in template.roles:
            of_system += f"{text}\n\n"
            continue
        if role == "user":
            text, of_system = of_system + text, ""
        before, after = template.roles[role]
        if role != "assistant":
            waiting += before + text + after
            continue
        if is_scored:
            yield Passage(waiting + before)
            yield Passage(text, True, True)
        else:
            yield Passage(waiting + before + text, False, True)
        waiting = template.suffix
