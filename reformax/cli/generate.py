"""Continues a prompt with a trained model: `reformax generate --output_dir=DIR --prompt='def '`.

Writes the prompt and its continuation to stdout as it comes, and the speed to stderr. Models of
bytes and of pieces read and write UTF-8, others numbers apart by spaces. Several prompts, or
samples of one, are computed together and written one after the other when they are done. Without a
prompt it reads standard input; a newline at its end, or at the end of a file, is part of the
prompt.

A model of images draws them instead: --png=FILE writes the samples, whole images, as one picture.
Without a prompt it begins with nothing; a prompt is the bytes of the first pixels.

A model of translation translates instead: every line of the file or of standard input, or every
--prompt, in order, a line for a line; a blank line stays blank.

A model that was fine-tuned on chats answers with --chat: the prompt is a user's message.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from reformax.cli import compilation_cache, distributed, flags, prompts, report, saved_run
from reformax.declared import (
    AnySeed,
    Count,
    NonEmpty,
    NonNegative,
    PathName,
    Samples,
    SettingError,
    Size,
    TopP,
)

AxisSizes = Annotated[str, NonEmpty("sizes of axes, such as context=4")]
# The flags of continuing a prompt and their values where they are not given.
CONTINUE = {
    "max_new_tokens": 500,
    "num_samples": 1,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "max_length": None,
    "prompt_piece": None,
    "mesh": None,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Flags, then gin, then one call."""
    args = parser().parse_args(argv)
    distributed.refuse(args, "text is written by one process, on all devices that it sees")
    compilation_cache.use()
    saved = saved_run.restore(args)  # no task: no data is needed
    from reformax.models import EncoderDecoder

    if isinstance(saved.model, EncoderDecoder):
        others = {**CONTINUE, "png": None, "chat": None}
        flags.refuse(args, others, "this run's model translates and takes no such setting")
        return _translate(args, saved)
    if saved.model.task_kind != "text":
        raise SettingError(
            f"output_dir={args.output_dir} is of {type(saved.model).__name__}, which does not "
            "write text: give a run of a language model or of translation, or score this one with "
            "`reformax evaluate`"
        )
    flags.refuse(args, flags.SEARCH, "this run's model does not translate")
    if args.png is not None:
        flags.refuse(args, ["chat"], "--png draws images, which answer nobody")
        return _draw(args, saved)
    return _continue(args, saved)


def _default(name: str, text: str = "") -> str:
    """A flag's help, with its default."""
    return f"{text} (default: {CONTINUE[name]})".strip()


def parser():
    """The flags."""
    parser = flags.parser(__doc__)
    flags.add_run(parser)
    prompts.add_flags(parser)
    parser.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="of a run of chats: a prompt is a user's message, which the run's template is written "
        "around, and the answer alone is written, up to its end",
    )
    parser.add_argument("--max_new_tokens", type=flags.of(Size), help=_default("max_new_tokens"))
    parser.add_argument(
        "--num_samples",
        type=flags.of(Samples),
        help=_default("num_samples", "continuations of each prompt"),
    )
    parser.add_argument(
        "--temperature",
        type=flags.of(NonNegative),
        help=_default("temperature", "0 takes the most probable token"),
    )
    parser.add_argument("--top_k", type=flags.of(Count), help=_default("top_k", "0 for all tokens"))
    parser.add_argument("--top_p", type=flags.of(TopP), help=_default("top_p", "1 for all tokens"))
    parser.add_argument("--seed", type=flags.of(AnySeed), help=_default("seed", "of the draws"))
    parser.add_argument(
        "--hash_seed",
        type=flags.of(AnySeed),
        default=0,
        help="of the hashes (default: 0, as in `reformax evaluate`)",
    )
    parser.add_argument(
        "--max_length",
        type=flags.of(Size),
        help="tokens of prompt and continuation that memory is held for, by which automatic "
        "numbers of hash buckets go (default: the run's length, or what is needed if that is more)",
    )
    parser.add_argument(
        "--prompt_piece",
        type=flags.of(Size),
        help="tokens of a prompt that are read at a time (default: all, or 65,536 where pieces "
        "compute the same)",
    )
    parser.add_argument(
        "--mesh",
        type=flags.of(AxisSizes),
        help="axes of all devices, such as context=4, which divides the caches by position "
        "(default: the run's devices share the prompts)",
    )
    parser.add_argument(
        "--png", type=flags.of(PathName), help="of a model of images: the picture to write"
    )
    flags.add_search(parser)
    distributed.add_flags(parser)
    flags.add_quiet(parser)
    flags.add_traceback(parser)
    return parser


def _continue(args, saved: saved_run.Saved) -> int:
    """Continues the prompts with a language model."""
    from reformax.cli import generated_text, generation_settings
    from reformax.generation import decoding, tokenizers

    vocabulary = saved_run.vocabulary_of(saved)
    tokenizer = prompts.tokenizer(saved.model.vocab_size, vocabulary)
    template = prompts.chat_template(vocabulary) if args.chat else None
    if template is None and prompts.is_of_chats():
        print("note: this run was trained on chats: --chat answers a message", file=sys.stderr)
    read = ("task", "text.text.offset") if isinstance(tokenizer, tokenizers.ByteTokenizer) else ()
    report.note_unused(args.config, (*saved_run.MODEL, *read), file=sys.stderr)
    settings = generation_settings.of_checkpoint(saved.info)
    options = flags.with_defaults(args, CONTINUE | generation_settings.sampling(settings))
    n_samples, n_new = options.pop("num_samples"), options.pop("max_new_tokens")
    encode = partial(prompts.encode_message, template) if template else tokenizer.encode
    tokens = [row for text in prompts.read(args) for row in [encode(text)] * n_samples]
    if options["max_length"] is None and max(map(len, tokens)) + n_new <= saved.run["length"]:
        options["max_length"] = saved.run["length"]
    every = 1 if len(tokens) == 1 else decoding.BLOCK
    options |= {"hash_seed": args.hash_seed, "every": every, **_devices(options, saved)}
    kept = generation_settings.ends_of_checkpoint(saved.info, saved.model.vocab_size)
    ends = [template.end] if template else kept
    blocks = decoding.stream(saved.model, saved.params, tokens, n_new, end=ends, **options)
    shown = [[] for _ in tokens] if template else tokens
    return generated_text.write(blocks, shown, tokenizer, args.quiet, ends)


def _devices(options: dict[str, Any], saved: saved_run.Saved) -> dict[str, Any]:
    """The mesh of --mesh, whose axis `context` divides caches, or the run's."""
    if options["mesh"] is None:
        return {"mesh": saved.mesh}
    from reformax import devices
    from reformax.training import mesh

    chosen = mesh.make(mesh.parsed(options["mesh"]), typed=f"--mesh={options['mesh']}")
    return {"mesh": chosen, "divide_caches": devices.n_sequence_shards(chosen) > 1}


def _draw(args, saved: saved_run.Saved) -> int:
    """Writes whole images of a language model of their bytes."""
    from reformax.cli import pictures
    from reformax.generation import decoding, tokenizers

    length = saved.run["length"]
    pictures.side_of(length)
    if saved.model.vocab_size != tokenizers.N_BYTES:
        raise SettingError(
            f"--png needs a run of images and this one's model has {saved.model.vocab_size} ids: "
            f"expected {tokenizers.N_BYTES}, the bytes"
        )
    report.note_unused(args.config, saved_run.MODEL, file=sys.stderr)
    options = flags.with_defaults(args, CONTINUE)
    n_samples, n_new = options.pop("num_samples"), options.pop("max_new_tokens")
    nothing = args.prompt is None and args.prompt_file is None
    given = [b""] if nothing else prompts.read(args)
    starts = [list(prompt) for prompt in given for _ in range(n_samples)]
    n_left = length - len(starts[0])
    if args.max_new_tokens is not None or n_left < 1 or len(set(map(len, starts))) > 1:
        raise SettingError(
            f"max_new_tokens is {n_new} and the longest prompt has {max(map(len, starts))} bytes: "
            f"with --png all have fewer than {length}, as many each, and the rest is drawn"
        )
    options |= {"hash_seed": args.hash_seed, "max_length": length, **_devices(options, saved)}
    drawn = decoding.generate(saved.model, saved.params, starts, n_left, **options)
    pictures.write([[*start, *new] for start, new in zip(starts, drawn, strict=True)], args.png)
    if not args.quiet:
        print(f"{len(starts)} of {length:,} bytes: {args.png}", file=sys.stderr)
    return 0


def _translate(args, saved: saved_run.Saved) -> int:
    """Translates lines with an encoder-decoder."""
    from reformax.cli import translations
    from reformax.data import vocabulary as vocabulary_lib

    report.note_unused(args.config, saved_run.MODEL, file=sys.stderr)
    if (saved.folder / vocabulary_lib.FILE).exists():
        vocabulary = vocabulary_lib.load(saved.folder)
    else:
        vocabulary = vocabulary_lib.Numbers(saved.model.source_vocab_size)
    saved_run.keep_vocabulary(vocabulary, saved)
    options = flags.search_options(args) | {"hash_seed": args.hash_seed, "quiet": args.quiet}
    lines = prompts.read_lines(args)
    options["mesh"] = saved.mesh
    trained_length = saved.run["length"]
    translations.write_lines(
        saved.model, saved.params, vocabulary, lines, trained_length, **options
    )
    return 0
