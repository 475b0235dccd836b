"""Your own conversations, or prompts and answers, to fine-tune a language model on the answers.

Conversations are packed into rows, as segments that do not see each other. A token of an answer has
weight 1, and so has the answer's end; all else has weight 0.
"""

from __future__ import annotations

import functools
import logging
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt8

from reformax.data import arrow_tables, chat_templates, conversations, files, tables, text_files
from reformax.data import splits as by_name
from reformax.data.base import SPLITS
from reformax.data.checks import check_sizes, check_split, check_windows
from reformax.data.conversations import Conversation, LeftOut
from reformax.data.packing import Rows, in_rows, laid_out, pack
from reformax.data.pieces import BYTES, PieceVocabulary
from reformax.data.rng import generator, in_epochs, philox
from reformax.declared import Called, Name, PathName, SettingError, VocabSize, checked
from reformax.task import Batch, Documents, Task

_OPTION = "chats.chats"
_KEY = 2**63  # of packing; no epoch
_TURN = 450  # bytes of memory that a turn takes besides its text, as it is and as ids
TooLong = Literal["cut", "left_out"]
OwnTemplate = Annotated[Mapping, Called("texts of user and assistant, each with {content}")]


@checked
def chats(
    data_dir: PathName,
    messages: Name | None = None,
    prompt: Name | None = None,
    answer: Name | None = None,
    template: chat_templates.Name | OwnTemplate = "auto",
    vocab_size: VocabSize = BYTES,
    vocabulary: PathName | None = None,
    too_long: TooLong = "cut",
    pattern: Name = "*",
    splits: by_name.By = "by_name",
) -> Task:
    """A language model's answers: prompts and turns of others are read and not predicted.

    Rows of tables are conversations, as `reformax.data.conversations` says, written by a template.
    A folder's own splits are kept: see `reformax.data.splits`. One that it does not have is every
    tenth row of train. Training takes the rows that conversations are packed into in an order of
    each epoch. Evaluation scores every token of an answer once: one of a conversation that is
    longer than a window from at least `length - stride` tokens before it.

    Args:
      data_dir: a table, such as .jsonl, .json, .csv or .parquet; a folder of tables; or one that
        `datasets` saved.
      messages: the field with the list of messages; None: messages or conversations.
      prompt: the field with the prompt; None: prompt, instruction or question.
      answer: the field with its answer; None: completion, answer, response or output.
      template: how roles are written: 'auto', by the vocabulary's own tokens if it has those of
        'nanochat', 'chatml', 'llama3' or 'gemma', else 'text', by words: "User:" and a newline, the
        message and an empty line, "Assistant:" and a newline; 'plain', what is said alone; or texts
        of your own, as {'user': 'Q: {content}\\n', 'assistant': 'A: {content}\\n'}.
      vocab_size: 256 for bytes, or of pieces that are learnt, as in `reformax.data.text.text`.
      vocabulary: a tokenizer.json, a sentencepiece model, or a folder with one, such as a run's.
      too_long: of a training conversation that is longer than a window: 'cut' at the window's end,
        or 'left_out'.
      pattern: the names of files to take.
      splits: 'by_name', a folder's own; or 'cut', all rows together.

    Raises:
      FileNotFoundError: data_dir does not exist.
      OSError: a file cannot be read.
      ValueError: no table has the fields, a row is wrong, a file is damaged, nothing is left to
        train on, or the template does not fit the vocabulary.
      ImportError: pyarrow or tokenizers is needed and not there.
    """
    if messages is not None and (prompt or answer) is not None:
        raise SettingError(
            f"{_OPTION}.messages is {messages!r} and {_OPTION}.prompt or .answer is set too: rows "
            "are one or the other, leave out what they are not"
        )
    if isinstance(template, Mapping):
        chat_templates.custom(template, _OPTION)
    path = files.existing(data_dir)
    found = text_files.find(path, pattern, None, False, splits, f"{_OPTION}.splits")
    rows, notes = _read(path, found, conversations.FieldNames(messages, prompt, answer))
    parts = by_name.with_cut(rows)
    if not parts["train"]:
        raise SettingError(f"{path} has no conversation to train on: give more than one")
    pieces = None
    if vocabulary is not None or vocab_size != BYTES:
        learnt_from = _joined(parts["train"]) if vocabulary is None else None
        pieces = PieceVocabulary(vocab_size, learnt_from, vocabulary, option=_OPTION)
    data = _Chats(parts, template, pieces, too_long)
    file_names = {split: found.files[split] for split in rows}
    return Task(
        "chats",
        BYTES if pieces is None else pieces.size,
        functools.partial(data.train_rows, rows=slice(None)),
        data.eval_batches,
        data.n_targets,
        fingerprint=data.fingerprint,
        vocabulary=pieces,
        n_bytes=None if pieces is None else lambda split: data.encoded(split).n_bytes,
        train_rows=data.train_rows,
        document_mask=True,
        in_order=True,
        summary=lambda: [_described(path, parts, file_names), data.template_line(), *notes],
        of_bytes=pieces is None,
    )


def _read(
    path: Path, found: text_files.Found, names: conversations.FieldNames
) -> tuple[dict[str, list[Conversation]], list[str]]:
    """The conversations of each split, and lines on what is left out."""
    rows, no_tables, notes, total = {}, [], [], 0
    for split, paths in found.paths.items():
        left, kept = Counter(), []
        for file in paths:
            is_saved = found.kind == "datasets"
            reader = arrow_tables.arrow if is_saved else tables.reader(file, None)
            if reader is None:
                no_tables.append(file)
                continue
            for one in conversations.read(file, reader, names, _OPTION):
                if isinstance(one, LeftOut):
                    left[one.reason] += 1
                    continue
                total += sum(_TURN + sys.getsizeof(turn.text) for turn in one)
                files.check_room(path, total, "text and turns in memory")
                kept.append(one)
        notes += [f"left out: {n:,} rows of {split} ({why})" for why, n in left.items()]
        if kept:
            rows[split] = kept
    if no_tables and path.is_dir():
        notes += by_name.left_out_lines(path, {"no table": no_tables})
    if "train" not in rows:
        reason = f": {notes[0]}" if notes else ""
        raise SettingError(
            f"{path} has no conversations to train on{reason}; give tables, such as .jsonl, whose "
            "rows have messages, or prompt and answer"
        )
    return rows, [*found.notes, *notes]


def _joined(parts: Sequence[Conversation]) -> UInt8[np.ndarray, " n"]:
    """What all say, to learn a vocabulary from."""
    text = "\0".join(turn.text for conversation in parts for turn in conversation)
    return files.as_array(text.encode("utf-8"))


def _described(
    path: Path, parts: Mapping[str, Sequence[Conversation]], file_names: Mapping[str, str]
) -> str:
    """A line on the conversations and answers of each split, and their files."""
    words = []
    for split in SPLITS:
        n_answers = sum(turn.scored for one in parts[split] for turn in one)
        counts = f"{len(parts[split]):,} conversations with {n_answers:,} answers"
        words.append(f"{split} {counts} ({file_names.get(split, 'every tenth of train')})")
    return f"{path}: {'; '.join(words)}"


class _Spans(NamedTuple):
    """Parts of conversations, by positions in the array of ids; `[scored_from, end)` counts."""

    begins: Int64[np.ndarray, " P"]
    ends: Int64[np.ndarray, " P"]
    scored_from: Int64[np.ndarray, " P"]


class _Chats:
    """The functions of the task; a split is encoded when it is needed."""

    def __init__(
        self,
        parts: Mapping[str, Sequence[Conversation]],
        template: str | Mapping[str, str],
        vocabulary: PieceVocabulary | None,
        too_long: TooLong,
    ):
        self._parts, self._template, self._too_long = parts, template, too_long
        self._vocabulary = vocabulary
        self._log = logging.getLogger(__name__)
        # A vocabulary is known when the run has it, so after this.
        self.written = functools.cache(self._written)
        self.encoded = functools.cache(self._encoded)
        # Each step of pieces asks for it, to say bits per byte.
        self.n_targets = functools.cache(lambda split: int(self.encoded(split).scored.sum()))
        self.fingerprint = functools.cache(self._fingerprint)
        self._packed = functools.lru_cache(maxsize=4)(self._packed_rows)

    def template_line(self) -> str:
        """A line on how a prompt is written, and how an answer ends."""
        template, _, end, _ = self.written()
        shown = template.end or ("byte 0" if self._vocabulary is None else f"id {end}")
        return (
            f"template {template.name}: a prompt is {template.prompt('PROMPT')!r}, an answer ends "
            f"in {shown}"
        )

    def _written(self) -> chat_templates.Written:
        encoder = chat_templates.ByteEncoder() if self._vocabulary is None else self._vocabulary
        return chat_templates.chosen(self._template, encoder, _OPTION)

    def _encoded(self, split: str) -> chat_templates.EncodedConversations:
        check_split("chats", split, SPLITS)
        dtype = np.uint8 if self._vocabulary is None else self._vocabulary.dtype
        found = chat_templates.encoded(self._parts[split], self.written(), dtype)
        for reason, n in found.left_out.items():
            self._log.warning(
                f"chats: {n:,} of {len(self._parts[split]):,} conversations of {split} are left "
                f"out ({reason})"
            )
        if not len(found.ids):
            raise SettingError(f"chats has no conversation of {split}: give some, or another split")
        return found

    def _fingerprint(self, split: str) -> str:
        """The number of conversations and the CRC-32 of what all say, and the template."""
        check_split("chats", split, SPLITS)
        crc = 0
        for conversation in self._parts[split]:
            for turn in conversation:
                words = f"{turn.role}\0{turn.text}\0{int(turn.scored)}\0"
                crc = zlib.crc32(words.encode("utf-8"), crc)
            crc = zlib.crc32(b"\1", crc)
        template = self._template
        shown = template if isinstance(template, str) else sorted(template.items())
        count = f"{len(self._parts[split]):,} conversations of CRC-32 {crc:08x}"
        return f"{count}, template {shown}"

    def train_rows(
        self, seed: int, step: int, batch_size: int, length: int, rows: np.ndarray | slice
    ) -> Batch:
        check_sizes(batch_size=batch_size, length=length)
        generator(seed, step)  # checks the range of both
        spans, packed = self._packed(seed, length)
        # The epochs' rows are one endless sequence, and each step takes its next batch.
        numbers = step * batch_size + np.arange(batch_size)[rows]
        chosen = in_epochs(numbers, len(packed), seed)
        return _batch(self.encoded("train"), spans, packed, chosen, len(chosen), length)

    def _packed_rows(self, seed: int, length: int) -> tuple[_Spans, Rows]:
        """The training conversations that fit, in rows."""
        data = self.encoded("train")
        begins, whole = data.starts[:-1], data.starts[1:]
        ends = np.minimum(begins + length, whole)
        n_scored = np.concatenate([[0], np.cumsum(data.scored)])
        is_long = whole - begins > length
        fits = ~is_long if self._too_long == "left_out" else n_scored[ends] > n_scored[begins]
        if n_long := int(is_long.sum()):
            out = int((~fits).sum())
            how = f"{n_long - out:,} are cut and {out:,}, whose answers come later, are left out"
            self._log.warning(
                f"chats: {n_long:,} of {len(begins):,} training conversations are longer than "
                f"length={length} tokens, up to {(whole - begins).max():,}: "
                f"{how if self._too_long == 'cut' else 'they are left out'}"
            )
        if not fits.any():
            raise SettingError(
                f"length={length} is too short for the {len(begins):,} conversations of chats, of "
                f"{(whole - begins).min():,} tokens and more: raise it"
            )
        order = philox(seed, _KEY).permutation(np.flatnonzero(fits))
        lengths = (ends - begins)[:, None]
        return _Spans(begins, ends, begins), pack(lengths, order, length)

    def eval_batches(
        self, split: str, batch_size: int, length: int, stride: int
    ) -> Iterator[Batch]:
        check_windows(batch_size, length, stride)
        data = self.encoded(split)
        spans = _windows(data.starts, length, stride)
        n_scored = np.concatenate([[0], np.cumsum(data.scored)])
        counts = np.flatnonzero(n_scored[spans.ends] > n_scored[spans.scored_from])
        packed = pack((spans.ends - spans.begins)[:, None], counts, length)

        def batches() -> Iterator[Batch]:
            for first in range(0, len(packed), batch_size):
                chosen = np.arange(first, min(first + batch_size, len(packed)))
                yield _batch(data, spans, packed, chosen, batch_size, length)

        return batches()


def _windows(starts: Int64[np.ndarray, " P+1"], length: int, stride: int) -> _Spans:
    """The windows that score every token of all conversations once.

    One of a long conversation moves by `stride` and is scored from where the one before ends.
    """
    begins, ends, scored_from = [], [], []
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        end = before = first
        while end < last:
            before, end = end, min(last, first + length if end == first else end + stride)
            ends.append(end)
            begins.append(max(first, end - length))
            scored_from.append(before)
    return _Spans(*(np.array(x, np.int64) for x in (begins, ends, scored_from)))


def _batch(
    data: chat_templates.EncodedConversations,
    spans: _Spans,
    rows: Rows,
    chosen: Int[np.ndarray, " B"],
    batch_size: int,
    length: int,
) -> Batch:
    """The chosen rows as a batch, filled with empty rows."""
    layout = laid_out(rows, chosen, spans.begins, spans.ends, length)
    counts: Bool[np.ndarray, " n"] = layout.sources >= spans.scored_from[layout.items]
    values = data.ids[layout.sources], layout.segment_ids, data.scored[layout.sources] & counts
    tokens, segment_ids, weights = (
        in_rows(layout, value, batch_size, length, dtype)
        for value, dtype in zip(values, (np.int32, np.int32, np.float32), strict=True)
    )
    return Batch(Documents(tokens, segment_ids), tokens, weights)
