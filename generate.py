"""Continues a prompt with a trained model: `python generate.py --output_dir=DIR --prompt='def '`.

Writes the prompt and what follows it, as it comes; tokens a second go to stderr. Models of bytes
read and write UTF-8, others numbers apart by spaces. Several prompts, or samples of one, are
computed together and written one after the other when they are done. Without a prompt it reads
standard input, whose last newline is part of the prompt as of a file's.

A model of translation translates instead: every line of the file or of standard input, or every
--prompt, in order, a line for a line; a blank line stays blank.
"""

import argparse
import codecs
import os
import signal
import sys
import time
from pathlib import Path

from reformax.cli import config, script

# The flags of going on with a prompt and their values where they are not given.
CONTINUE = {
    "max_new_tokens": 500,
    "num_samples": 1,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "max_length": None,
}
LINES = 10_000  # that are translated, and then written, together
N_BYTES = 256  # the vocabulary of a model of bytes, but for reserved ids in front of them


def main() -> int:
    """Flags, then gin, then one call."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    script.add_run_flags(parser)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", action="append", help="repeatable; may be empty")
    given.add_argument("--prompt_file", help="a file that is one prompt; - is standard input")
    parser.add_argument("--max_new_tokens", type=int, help="default: 500")
    parser.add_argument("--num_samples", type=int, help="continuations of each prompt")
    parser.add_argument("--temperature", type=float, help="0 takes the most probable token")
    parser.add_argument("--top_k", type=int, help="0 for all tokens")
    parser.add_argument("--top_p", type=float, help="1 for all tokens")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--hash_seed", type=int, default=0, help="of the hashes, as in evaluate.py")
    parser.add_argument(
        "--max_length",
        type=int,
        help="tokens of prompt and continuation that memory is held for, by which automatic "
        "numbers of hash buckets go (default: the run's length, or what is needed if that is more)",
    )
    script.add_search_flags(parser)
    script.add_traceback_flag(parser)
    args = parser.parse_args()
    if args.num_samples is not None and args.num_samples < 1:
        raise ValueError(f"num_samples is {args.num_samples}: expected at least 1")
    script.parse_run(args)
    from reformax.generation import decoding as generation
    from reformax.models import EncoderDecoder
    from reformax.training import loop as training

    run = config.bindings(training.train, script.MODEL)  # no task: no data is needed
    model, params, steps = script.restore_model(args, run)
    if isinstance(model, EncoderDecoder):
        script.refuse(args, CONTINUE, "this run's model translates and takes no such setting")
        script.note_unused(args, script.MODEL, file=sys.stderr)
        return _translate(args, model, params, steps, run["length"])
    script.refuse(args, script.SEARCH, "this run's model does not translate")
    for name, value in CONTINUE.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    offset = _offset(training.train, model.vocab_size)
    read = script.MODEL if offset is None else (*script.MODEL, "task", "text.text.offset")
    script.note_unused(args, read, file=sys.stderr)
    prompts = [_tokens(text, offset) for text in _texts(args) for _ in range(args.num_samples)]
    length = max(map(len, prompts)) + args.max_new_tokens
    max_length = args.max_length
    if max_length is None and length <= run["length"]:
        max_length = run["length"]
    blocks = generation.stream(
        model,
        params,
        prompts,
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        hash_seed=args.hash_seed,
        max_length=max_length,
        every=1 if len(prompts) == 1 else generation.BLOCK,
    )
    return _write(blocks, prompts, offset)


def _texts(args, terminal: bytes | None = b"") -> list[bytes]:
    """The prompts; `terminal` is what stands for standard input at a terminal, None to read it."""
    if args.prompt is not None:
        return [os.fsencode(prompt) for prompt in args.prompt]
    if args.prompt_file not in (None, "-"):
        return [Path(args.prompt_file).read_bytes()]
    if terminal is not None and sys.stdin.isatty():
        return [terminal]
    return [sys.stdin.buffer.read()]


def _translate(args, model, params, steps, trained_length: int) -> int:
    """Translates lines, which are written in order, a block of them at a time."""
    from reformax.data import vocabulary
    from reformax.generation import prepare, translate_lines

    folder = Path(args.output_dir)
    if (folder / vocabulary.FILE).exists():
        words = vocabulary.load(folder)
    else:
        words = vocabulary.Numbers(model.source_vocab_size)
    script.keep_vocabulary(args, words, steps[-1])
    texts = _texts(args, terminal=None)
    if args.prompt is None:  # a file's last newline ends its last line
        text = texts[0].removeprefix(codecs.BOM_UTF8)
        texts = text.removesuffix(b"\n").split(b"\n") if text else []
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(text.decode("utf-8").removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number} is not UTF-8: byte {text[error.start]:#04x}: convert it, as with "
                "iconv"
            ) from None
    start = time.perf_counter()
    options = script.search_options(args)
    sys.stdout.reconfigure(encoding="utf-8")
    n_tokens = n_long = 0
    params = prepare(model, params)
    for first in range(0, len(lines), LINES):
        found = translate_lines(
            model,
            params,
            words,
            lines[first : first + LINES],
            **options,
            first_line=first + 1,
            hash_seed=args.hash_seed,
            progress=True,
        )
        sys.stdout.write("".join(f"{line.text}\n" for line in found))
        sys.stdout.flush()
        n_tokens += sum(line.n_tokens for line in found)
        n_long += sum(line.n_source > trained_length for line in found)
    taken = time.perf_counter() - start
    if n_long:
        print(
            f"note: {n_long:,} lines have more than {trained_length} tokens, the longest that the "
            "model was trained on",
            file=sys.stderr,
        )
    print(
        f"{len(lines):,} lines, {n_tokens:,} tokens in {taken:.1f} s, compilation included",
        file=sys.stderr,
    )
    return 0


def _offset(train, vocab_size: int) -> int | None:
    """The id of byte 0, as the run's task has it; None for a model that is not of bytes."""
    try:
        task = config.described(train, "task")
        offset = task.arguments.get("offset", 0) if isinstance(task, config.Reference) else 0
    except config.ConfigError:  # the model alone is needed
        offset = 0
    return offset if vocab_size == N_BYTES + offset else None


def _tokens(text: bytes, offset: int | None) -> list[int]:
    if offset is not None:
        return [byte + offset for byte in text]
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(
            f"prompt is {text.decode(errors='replace')!r}: this is no model of bytes, give numbers "
            "apart by spaces"
        ) from None


def _write(blocks, prompts, offset: int | None) -> int:
    """Writes the rows of the blocks, the only row as it comes."""
    rows, alone, code = [list(prompt) for prompt in prompts], len(prompts) == 1, 0
    sys.stdout.reconfigure(encoding="utf-8")
    if alone:
        write = _writer(offset)
        write(rows[0])
    progress = [(0, time.perf_counter())]
    try:
        for block in blocks:
            progress.append((progress[-1][0] + block.shape[1], time.perf_counter()))
            for row, new in zip(rows, block.tolist(), strict=True):
                row.extend(new)
            if alone:
                write(block[0].tolist())
    except KeyboardInterrupt:
        code = 130
    if alone:
        write([], final=True)
    else:
        for i, row in enumerate(rows):
            print(f"--- {i + 1} of {len(rows)}")
            _writer(offset)(row, final=True)
    print(_speed(progress, len(rows)), file=sys.stderr)
    return code


def _writer(offset: int | None):
    """Writes tokens as text, a character when all of its bytes are there; no reserved ids."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(tokens, final=False):
        if offset is not None:
            text = decoder.decode(bytes(t - offset for t in tokens if t >= offset), final)
        else:
            text = "".join(f"{token} " for token in tokens)
        print(text, end="\n" if final else "", flush=True)

    return write


def _speed(progress: list[tuple[int, float]], n_rows: int) -> str:
    """How fast it went, of the new tokens of a row and the time after each block."""
    (_, start), *_, (n_new, end) = progress
    text = f"{n_rows * n_new:,} tokens in {end - start:.1f} s"
    if len(progress) < 4:
        return f"{text}, compilation included"
    done, ready = progress[2]  # the first two blocks compile the two programs
    return (
        f"{text}: {ready - start:.1f} s until the second block, with compilation, then "
        f"{n_rows * (n_new - done) / (end - ready):,.1f} tokens/s"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads may have read enough
    sys.exit(script.run(main))
