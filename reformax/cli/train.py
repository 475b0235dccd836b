"""Trains a model as a gin config says: `reformax train`, or with a config of your own.

    reformax train --config_file=reformer_enwik8.gin --output_dir=runs/mine \\
        --config='loop.train.steps=1000' --config='d_model=256'

The same command, run again after any interruption, goes on where the run stopped. Exit code 0:
done; 1: stopped by an error; 2: the command or its config is wrong; 143, 130 or 129: saved and
stopped by SIGTERM, SIGINT or SIGHUP.

Several processes, on one machine or many, train one run: each is given --coordinator_address,
--num_processes and --process_id, or --distributed where Slurm or Open MPI starts them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from reformax.cli import (
    compilation_cache,
    config,
    distributed,
    flags,
    mistakes,
    parsed,
    report,
    typed,
)
from reformax.declared import PathName, Positive, SettingError


def main(argv: Sequence[str] | None = None) -> int:
    """Flags, then gin, then one call."""
    training_flags = parser()
    args, unknown = training_flags.parse_known_args(argv)
    training_flags.refuse_near(unknown)
    files = args.config_file or ["quickstart.gin"]
    output_dir = args.output_dir or str(Path("runs") / Path(files[-1]).stem)
    folders = {"data_dir": args.data_dir, "init_from": args.init_from}
    config.parse(files, args.config, trains=True, **folders)
    mistakes.refuse_flags(unknown, training_flags.beginning_with)
    mistakes.check_apart(output_dir)
    distributed.join(args, parsed.text())
    # After parsing, so that a wrong flag is reported first.
    from reformax.training import folder, loop, profile

    compilation_cache.use()
    parsed.refuse_passed(loop.train, "config_text", "named", "output_dir")
    settings_of = {file: config.settings_of(file) for file in args.config_file or ()}

    @functools.cache  # several processes compare their texts first
    def note_unused(*read: str) -> None:
        if distributed.first():
            report.note_unused(args.config, read, files=settings_of)

    if args.device_memory is not None and not args.dry_run:
        raise SettingError(
            f"--device_memory={args.device_memory}: give --dry_run too, or leave the flag out"
        )
    if args.profile and args.dry_run:
        raise SettingError("--profile: a dry run makes no step, leave one of the two out")
    given = {"allow_changed_data": True} if args.allow_changed_data else {}  # or the config's
    if args.dry_run:
        options = dict(output_dir=output_dir, device_memory=args.device_memory, **given)
        return _dry_run(options, note_unused)

    given |= {"progress": False} if args.quiet else {}
    if args.profile and distributed.first():
        others = parsed.bindings(loop.train, {"callbacks"}).get("callbacks", ())
        given["callbacks"] = [*others, profile.profile(Path(output_dir) / "profile")]

    def config_text() -> str:
        note_unused(*given)  # all that the config names is built by now
        return parsed.operative()

    with folder.output_folder(output_dir):  # before the config's objects are built, in minutes
        train = parsed.configured(loop.train)
        result = train(output_dir, config_text=config_text, named=typed.typed, **given)
    return report.training(result, distributed.first(), with_curve=not args.quiet)


def _dry_run(options: dict[str, Any], note_unused: Callable[..., None]) -> int:
    """Prints the memory of the run's steps, which it does not make; `options` are of `report`."""
    from reformax.cli import dummy_task
    from reformax.training import dry_run

    def report(**settings: Any) -> Iterator[str]:
        return dry_run.report(**settings | options, named=typed.typed)

    settings, lines = dummy_task.reported(report)
    note_unused(*settings)
    for line in lines:
        if distributed.first():
            print(line, flush=True)
    return 0


def parser():
    """The flags."""
    parser = flags.parser(__doc__)
    parser.add_argument(
        "--config_file",
        action="append",
        type=flags.of(PathName),
        help="a gin file, by path or by a name that `reformax configs` lists; may be repeated, "
        "later ones win (default: quickstart.gin)",
    )
    flags.add_config(parser)
    parser.add_argument(
        "--output_dir", type=flags.of(PathName), help="default: runs/<name of the last config file>"
    )
    parser.add_argument("--data_dir", type=flags.of(PathName), help="where the task finds its data")
    parser.add_argument(
        "--init_from",
        type=flags.of(PathName),
        help="a run whose weights, and vocabulary if it has one, this one begins with",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="check what a run checks first, compile the step for the devices there are, print the "
        "memory that it needs on each and the longest sequence and the largest batch that fit, and "
        "exit",
    )
    parser.add_argument(
        "--device_memory",
        type=flags.of(Positive),
        metavar="GIB",
        help="with --dry_run: the memory of a device that a run may take (default: what the "
        "backend says)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="write a trace of three steps into a folder profile/ of the run",
    )
    flags.add_changed_data(parser)
    distributed.add_flags(parser)
    flags.add_quiet(parser)
    flags.add_traceback(parser)
    return parser
