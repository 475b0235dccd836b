"""The task of modelling the bytes or the tokens of a text.

Letters in the shapes: B batch, T length. A text is its bytes, 256 symbols. A loss of l nats a byte
is l / ln 2 bits per dim, which the literature on enwik8 calls bits per character.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt, UInt8

from reformax.data.lengths import Lengths, Range, check_enough, ranges
from reformax.data.stored import crc32_of, windows_of
from reformax.declared import SettingError
from reformax.task import Batch, Documents, Task

T = TypeVar("T")
SPLITS = ("train", "valid", "test")
# Tokens of a held-out split that is drawn, not read.
MOST_HELD_OUT = 2**27
# Where training windows of a text begin; see `document_starts` and `each_once`.
Windows = Literal["anywhere", "documents", "each_once"]

# The first ids of every vocabulary of sentences. 0 also precedes the first token.
PAD, EOS, UNKNOWN = 0, 1, 2


class WindowSettings(NamedTuple):
    """How a text is divided into windows.

    Attributes:
      where: where training windows begin.
      document_mask: whether a window's documents are hidden from each other.
      lengths: how often a training window is of documents of each range of lengths; None: they are
        of the whole text.
    """

    where: Windows = "anywhere"
    document_mask: bool = False
    lengths: Lengths | None = None


ANYWHERE = WindowSettings()


def split_bytes(data: UInt8[np.ndarray, " n"], source: str) -> dict[str, UInt8[np.ndarray, " n"]]:
    """The first 90% of `data` to train on, the next 5% to choose by, the last 5% to report.

    This is the usual split of enwik8: 90, 5 and 5 million bytes. The remainder goes to train.

    Args:
      data: the bytes of the text, in order.
      source: the name of the text in errors.

    Returns:
      {'train': ..., 'valid': ..., 'test': ...}, views of `data`.

    Raises:
      ValueError: a split would be empty.
    """
    held_out = len(data) * 5 // 100
    if not held_out:
        raise ValueError(
            f"{source}: {len(data)} bytes are too few to split 90/5/5, give a text of 20 or more"
        )
    train, valid, test = np.split(data, [len(data) - 2 * held_out, len(data) - held_out])
    return {"train": train, "valid": valid, "test": test}


def split_borders(
    begins: Mapping[str, Int64[np.ndarray, " d"]], splits: Mapping[str, UInt8[np.ndarray, " n"]]
) -> dict[str, Int64[np.ndarray, " d"]] | None:
    """Where documents begin in each split of a text.

    Args:
      begins: where they begin in each text, sorted. Splits without one of their own are cut, in
        order, from that of 'train'.
      splits: the bytes of each split.

    Returns:
      The positions in each split, which may begin within a document; None for one document.
    """
    if max(map(len, begins.values())) < 2:
        return None
    found, whole, first = dict(begins), begins["train"], 0
    for split in SPLITS:
        if split == "train" or split not in begins:
            end = first + len(splits[split])
            found[split] = whole[slice(*whole.searchsorted([first, end]))] - first
            first = end
    return found


def byte_language_model(
    name: str,
    splits: Mapping[str, UInt8[np.ndarray, " n"]],
    offset: int = 0,
    borders: Mapping[str, Int64[np.ndarray, " d"]] | None = None,
    windows: WindowSettings = ANYWHERE,
    segments: Mapping[str, Int64[np.ndarray, " d"]] | None = None,
) -> Task:
    """The task of predicting each byte of a text from those before it.

    Training batches are windows of `splits['train']`, at uniformly random positions or as
    `document_starts` has them. Evaluation moves a window of `length` by `stride` <= `length` and
    scores its last `stride` bytes, so every byte is predicted once, and from at least
    `length - stride` bytes after the first window. The first window is scored whole; the last is
    moved back to lie inside the split. Rows that fill the last batch have weight 0, and so has the
    padding of a split that is shorter than a window.

    With `document_mask` a byte is predicted from those of its own document alone, in training and
    in evaluation: the inputs are `Documents`. Where windows lie stays as it is.

    Args:
      name: the task's name in logs and errors.
      splits: the bytes of 'train', 'valid' and 'test', none of them empty.
      offset: a byte's id is the byte plus this; lower ids are reserved.
      borders: the bytes, by position, that documents begin with, sorted; None: one document. Those
        after a split's end are left out.
      windows: how the text is divided into windows.
      segments: as `borders`, of what the mask hides from each other; None: the documents.

    Returns:
      A Task with vocab_size 256 + offset. Its functions raise ValueError for an unknown split, a
      stride outside 1..length, another size below 1, and a training length above the text's.

    Raises:
      ValueError: an offset out of range, or settings by the documents of a text without.
    """
    if not 0 <= offset < 2**16:
        raise SettingError(f"offset={offset} must be from 0 to {2**16 - 1}")
    borders, segments = (
        x and {s: positions[: positions.searchsorted(len(splits[s]))] for s, positions in x.items()}
        for x in (borders, segments)
    )
    masks_documents = windows.document_mask and segments is None
    check_documents(borders, windows._replace(document_mask=masks_documents))
    bytes_of = functools.partial(of_split, name, splits)
    task = language_model(
        *(name, 256 + offset, bytes_of, offset),
        borders_of=None if borders is None else functools.partial(of_split, name, borders),
        windows=windows,
        segments_of=None if segments is None else functools.partial(of_split, name, segments),
    )
    made_by = text_fingerprint(bytes_of, windows.document_mask)
    return task.replace(fingerprint=made_by, of_bytes=True)


def language_model(
    name: str,
    vocab_size: int,
    tokens_of: Callable[[str], UInt[np.ndarray, " n"]],
    offset: int = 0,
    borders_of: Callable[[str], Int64[np.ndarray, " d"]] | None = None,
    windows: WindowSettings = ANYWHERE,
    segments_of: Callable[[str], Int64[np.ndarray, " d"]] | None = None,
) -> Task:
    """The task of predicting each token of a text from those before it, by windows.

    Tokens and borders may be a `StoredArray`: then a batch reads its own windows alone.
    `byte_language_model` says how windows lie and what is read in them.

    Args:
      name: the task's name in logs and errors.
      vocab_size: ids are below it.
      tokens_of: split -> its tokens, in order; checks the split's name.
      offset: is added to each token.
      borders_of: split -> the tokens, by position, that documents begin with, sorted; keeps them.
      windows: how the text is divided into windows.
      segments_of: as `borders_of`, of what the mask hides from each other; None: the documents.
    """
    segments_of = segments_of or borders_of
    where, document_mask, lengths = windows

    @functools.cache
    def ranges_of_train() -> list[Range]:
        return ranges(borders_of("train"), len(tokens_of("train")), lengths.borders)

    def train_batch(seed: int, step: int, batch_size: int, length: int) -> Batch:
        return train_rows(seed, step, batch_size, length, slice(None))

    def train_rows(seed: int, step: int, batch_size: int, length: int, rows) -> Batch:
        check_sizes(batch_size=batch_size, length=length)
        data = tokens_of("train")
        if length > len(data):
            unit = "bytes" if data.dtype == np.uint8 else "tokens"
            raise SettingError(
                f"length={length} must be at most {len(data)}, the {unit} that {name} trains on"
            )
        segments = segments_of("train") if document_mask else None
        request = seed, step, batch_size, length, rows
        borders = None if where == "anywhere" else borders_of and borders_of("train")
        if lengths is None:
            found = _whole_text(where, borders, data, segments, *request)
        else:
            found = _by_length(ranges_of_train(), lengths, borders, data, segments, *request)
        tokens, ids, scored_from = found
        tokens = tokens.astype(np.int32) + offset
        inputs = tokens if ids is None else Documents(tokens, ids)
        weights = np.ones(tokens.shape, np.float32)
        if scored_from is not None:
            weights[np.arange(length) < scored_from[:, None]] = 0
        return Batch(inputs, tokens, weights)

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        check_windows(batch_size, length, stride)
        data = tokens_of(split)
        n = len(data)
        if n < length:
            data = np.pad(np.asarray(data), (0, length - n))
        n_windows = 1 + max(0, -(-(n - length) // stride))
        # Window k is scored from where window k - 1 ends up to its own end.
        ends = np.minimum(length + stride * np.arange(n_windows), len(data))
        scored_from = np.concatenate([[0], ends[:-1]])

        def batches() -> Iterator[Batch]:
            for first in range(0, n_windows, batch_size):
                rows = slice(first, first + batch_size)
                starts = ends[rows] - length
                positions = starts[:, None] + np.arange(length)
                weights = (positions >= scored_from[rows, None]) & (positions < n)
                tokens = windows_of(data, starts, length).astype(np.int32) + offset
                segment_ids = None
                if document_mask:
                    segment_ids = segment_ids_of(segments_of(split), starts, length) * (
                        positions < n
                    )
                yield full_batch(tokens, weights, batch_size, segment_ids)

        return batches()

    task = Task(name, vocab_size, train_batch, eval_batches, lambda split: len(tokens_of(split)))
    return task.replace(
        train_rows=train_rows,
        borders=segments_of,
        document_mask=document_mask,
        in_order=where == "each_once",
    )


def _whole_text(
    where: Windows,
    borders: Int64[np.ndarray, " d"] | None,
    data: UInt[np.ndarray, " n"],
    segments: Int64[np.ndarray, " d"] | None,
    *request,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The tokens of windows of a whole text, their segments, and where their targets begin."""
    seed, step, batch_size, length, rows = request
    rng, n, scored_from = generator(seed, step), len(data), None
    if where == "each_once":
        numbers = step * batch_size + np.arange(batch_size)[rows]
        starts, scored_from = each_once(n, length, seed, numbers)
    elif where == "anywhere":
        starts = rng.integers(n - length + 1, size=batch_size)[rows]
    else:
        positions, back = (rng.integers(end, size=batch_size)[rows] for end in (n, length))
        starts = document_starts(borders, n, length, positions, back)
    ids = None if segments is None else segment_ids_of(segments, starts, length)
    return windows_of(data, starts, length), ids, scored_from


def _by_length(
    found: Sequence[Range], lengths: Lengths, borders, data, segments, *request
) -> tuple[np.ndarray, np.ndarray | None, None]:
    """As `_whole_text`, of documents by their lengths."""
    length = request[3]
    check_enough(found, lengths, length)
    drawn = range_starts(found, lengths, borders, len(data), *request)
    return *range_windows(found, *drawn, data, segments, length), None


def each_once(
    n: int, length: int, seed: int, numbers: Int[np.ndarray, " B"]
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """Where windows begin, by their numbers, and from which of their tokens on they are targets.

    An epoch has the windows that cover the text one after the other, in an order of its own. Each
    token is a target once in it: the last window is moved back to end with the text, and what
    another one has counts there alone.

    Args:
      n: tokens of the text, at least `length`.
      length: of a window.
      seed: of all orders.
      numbers: of windows since the first step.
    """
    n_windows = -(-n // length)
    found = in_epochs(numbers, n_windows, seed)
    starts = np.minimum(found * length, n - length)
    return starts, found * length - starts


def in_epochs(numbers: Int[np.ndarray, " B"], n: int, seed: int) -> Int64[np.ndarray, " B"]:
    """Which of n examples come at some numbers, since the first step: each once an epoch."""
    epochs, indices = np.divmod(numbers, n)
    found = np.zeros(len(numbers), np.int64)
    for epoch in np.unique(epochs):
        own = epochs == epoch
        found[own] = permuted(indices[own], n, generator(seed, int(epoch)))
    return found


def permuted(indices: Int[np.ndarray, " B"], n: int, rng: np.random.Generator) -> np.ndarray:
    """Where a permutation of n takes some indices: by a key, in no memory.

    A Feistel network of four rounds permutes the numbers of 2 b bits, and is applied again to what
    is not below n (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 3).
    """
    bits = max(1, (int(n - 1).bit_length() + 1) // 2)
    mask = np.uint64(2**bits - 1)
    keys = rng.integers(2**63, size=(4, 2), dtype=np.uint64)
    found = np.asarray(indices).astype(np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():
        left, right = found[outside] >> np.uint64(bits), found[outside] & mask
        for key, factor in keys:
            mixed = (right ^ key) * (factor | np.uint64(1))  # modulo 2^64
            mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> np.uint64(32)) & mask
        found[outside] = left << np.uint64(bits) | right
        outside = found >= np.uint64(n)
    return found.astype(np.int64)


def document_starts(
    borders: Int64[np.ndarray, " d"],
    n: int,
    length: int,
    positions: Int[np.ndarray, " B"],
    back: Int[np.ndarray, " B"],
) -> Int64[np.ndarray, " B"]:
    """Where windows begin by documents, each by a position in the text.

    The document that holds the position decides:

    * One of at most `length` tokens is seen from its begin: the window begins at the nearer end of
      the document, which is its own begin or the next one's. Were it always its own, a short
      document after one of about `length` tokens would hardly be a target.
    * Of a longer one any window that holds the position is as likely: the window begins `back`
      tokens before the position, but not before the document. So (length + 1) / 2 in D windows of a
      document of D tokens begin with it, and its middle is seen no less.

    Windows have `length` tokens, so what follows a document goes on in them. With `positions`
    uniform in [0, n) and `back` in [0, length), a token that is at least `length` from the text's
    ends is a target at least 3/8 and at most twice as often as the mean token, whatever the lengths
    of documents; as often as the mean where a document is longer than two windows and the token a
    window from its ends. A window that would pass the text's end ends there.

    Args:
      borders: the tokens, by position, that documents begin with, sorted.
      n: tokens of the text, at least `length`.
      length: of a window.
      positions: in the text, below n.
      back: below `length`.
    """
    begin, end = document_bounds(borders, n, positions)
    return np.minimum(_starts_within(begin, end, length, positions, back), n - length)


def document_bounds(
    borders: Int64[np.ndarray, " d"], n: int, positions: Int[np.ndarray, " B"]
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """The begins and ends of the documents that hold some positions."""
    after = borders.searchsorted(positions, "right")
    begin = np.where(after > 0, borders[after - 1], 0)
    end = np.where(after < len(borders), borders[np.minimum(after, len(borders) - 1)], n)
    return begin, end


def _starts_within(begin, end, length: int, positions, back) -> Int64[np.ndarray, " B"]:
    """`document_starts` of documents whose bounds are known, before the text's end counts."""
    nearer = np.where(positions - begin < end - positions, begin, end)
    return np.where(end - begin <= length, nearer, np.maximum(begin, positions - back))


def range_starts(
    found: Sequence[Range],
    lengths: Lengths,
    borders: Int64[np.ndarray, " d"] | None,
    n: int,
    seed: int,
    step: int,
    batch_size: int,
    length: int,
    rows: np.ndarray | slice,
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """The range of lengths of each row, and where in the range's text its window begins.

    Args:
      found: the ranges of the text.
      lengths: how often a row is of each.
      borders: where documents begin, by which windows begin; None: windows begin anywhere.
      n: tokens of the text.
      seed, step: of the draws.
      batch_size, length: rows of the batch, and tokens of one.
      rows: the rows that are drawn, by number.
    """
    rng = generator(seed, step)
    # The stream after the step's is a mixture's own.
    draw = np.random.Generator(rng.bit_generator.jumped(2))
    chosen = draw.choice(len(found), size=batch_size, p=lengths.shares())
    sizes = np.array([len(one) for one in found])[chosen]
    if borders is None:
        return chosen[rows], rng.integers(sizes - length + 1)[rows]
    indices, back = rng.integers(sizes)[rows], rng.integers(length, size=batch_size)[rows]
    chosen, sizes = chosen[rows], sizes[rows]
    positions = [found[k].positions(index) for k, index in zip(chosen, indices, strict=True)]
    before = np.array(positions, np.int64) - indices
    begin, end = (x - before for x in document_bounds(borders, n, indices + before))
    return chosen, np.minimum(_starts_within(begin, end, length, indices, back), sizes - length)


def range_windows(
    found: Sequence[Range],
    chosen: Int64[np.ndarray, " B"],
    starts: Int64[np.ndarray, " B"],
    data: UInt[np.ndarray, " n"],
    segments: Int64[np.ndarray, " d"] | None,
    length: int,
) -> tuple[UInt[np.ndarray, "B {length}"], Int32[np.ndarray, "B {length}"] | None]:
    """The tokens of windows of ranges, and their segments where documents are hidden."""
    tokens = np.empty((len(starts), length), data.dtype)
    ids = None if segments is None else np.empty((len(starts), length), np.int32)
    for row, (k, start) in enumerate(zip(chosen, starts, strict=True)):
        at = last = 0
        for first, n in found[k].spans(int(start), length):
            own, position = slice(at, at + n), np.array([first])
            tokens[row, own] = windows_of(data, position, n)[0]
            if ids is not None:  # what follows a run is another document
                ids[row, own] = segment_ids_of(segments, position, n)[0] + last
                last = ids[row, at + n - 1]
            at += n
    return tokens, ids


def segment_ids_of(
    borders: Int64[np.ndarray, " d"], starts: Int64[np.ndarray, " B"], length: int
) -> Int32[np.ndarray, "B {length}"]:
    """The segments of windows: tokens of a row's first document have id 1, and so on upwards.

    Args:
      borders: the tokens, by position, that documents begin with, sorted.
      starts: the positions that windows begin at.
      length: of a window.
    """
    first, last = (borders.searchsorted(starts + n, "right") for n in (0, length - 1))
    ids = [
        np.asarray(borders[a:b]).searchsorted(start + np.arange(length), "right")
        for a, b, start in zip(first, last, starts, strict=True)
    ]
    return np.array(ids, np.int32).reshape(len(starts), length) + 1


def check_documents(borders: Mapping[str, np.ndarray] | None, windows: WindowSettings) -> None:
    """Raises `SettingError` for settings by documents if the training text has none, or one."""
    asked = {
        "windows is 'documents'": windows.where == "documents",
        "document_mask is True": windows.document_mask,
        "length_weights is set": windows.lengths is not None,
    }
    setting = next((words for words, is_asked in asked.items() if is_asked), None)
    if setting is not None and (borders is None or len(borders["train"]) < 2):
        raise SettingError(
            f"{setting}: the text to train on is one document, give a table or a folder of files, "
            "or leave it out"
        )


def text_fingerprint(
    bytes_of: Callable[[str], UInt8[np.ndarray, " n"]], document_mask: bool
) -> Callable[[str], str]:
    """Split -> the fingerprint of its bytes, and whether its documents are predicted apart."""
    mask = ", document_mask=True" * document_mask
    return functools.cache(lambda split: fingerprint(bytes_of(split)) + mask)


def fingerprint(data: UInt8[np.ndarray, " n"]) -> str:
    """The length and the CRC-32 of bytes, in words.

    Of the checksums in the standard library CRC-32 costs least: 0.2 seconds for 1 GB, or 1 second
    with a zlib that has no instructions for it. It finds accidents, not forgeries.
    """
    return f"{len(data):,} bytes of CRC-32 {crc32_of(data):08x}"


def generator(seed: int, step: int) -> np.random.Generator:
    """The random numbers of a step: Philox keyed by (seed, step), each from 0 up to 2^63 - 1.

    A counter-based generator has independent streams for neighbouring keys and keeps no state.

    Raises:
      ValueError: seed or step out of range.
    """
    for argument, value in (("seed", seed), ("step", step)):
        if not 0 <= value < 2**63:
            raise SettingError(f"{argument}={value} must be from 0 to 2^63 - 1")
    return philox(seed, step)


def philox(high: int, low: int) -> np.random.Generator:
    """A generator keyed by two words below 2^64; `generator` takes high words below 2^63."""
    return np.random.Generator(np.random.Philox(key=np.array([high, low], np.uint64)))


def full_batch(
    tokens: np.ndarray, weights: np.ndarray, batch_size: int, segment_ids: np.ndarray | None = None
) -> Batch:
    """A batch of `tokens` [b, T] scored at `weights` [b, T], filled to B rows with weight 0.

    With `segment_ids` [b, T] the inputs are `Documents`.
    """
    fill = ((0, batch_size - len(tokens)), (0, 0))
    tokens = np.pad(tokens.astype(np.int32), fill)
    inputs = tokens if segment_ids is None else Documents(tokens, np.pad(segment_ids, fill))
    return Batch(inputs, tokens, np.pad(weights.astype(np.float32), fill))


def check_split(name: str, split: str, splits: tuple[str, ...]) -> None:
    """Raises ValueError if the task `name` has no such split."""
    if split not in splits:
        raise SettingError(f"split={split!r} must be one of {', '.join(splits)} (task {name})")


def of_split(name: str, splits: Mapping[str, T], split: str) -> T:
    """The value of a split; raises ValueError if the task `name` has no such split."""
    check_split(name, split, tuple(splits))
    return splits[split]


def check_held_out(n_examples: int, length: int) -> None:
    """Raises `SettingError` for held-out examples, drawn together, of too many tokens."""
    if n_examples * length > MOST_HELD_OUT:
        raise SettingError(
            f"n_eval is {n_examples}: expected at most {MOST_HELD_OUT // length:,} examples of "
            f"{length:,} tokens, which are drawn together"
        )


def check_windows(batch_size: int, length: int, stride: int) -> None:
    """Raises ValueError for a size below 1, or windows that would leave tokens out."""
    check_sizes(batch_size=batch_size, length=length, stride=stride)
    if stride > length:
        raise SettingError(f"stride={stride} must be at most length={length}")


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for argument, value in sizes.items():
        if value < 1:
            raise SettingError(f"{argument}={value} must be at least 1")
