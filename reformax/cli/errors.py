"""Errors of a script: one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator

from reformax import durable
from reformax.cli import distributed, flags, messages, streams
from reformax.cli.flags import TRACEBACK
from reformax.declared import SettingError

LONGEST = 900  # letters of an error's line
# Errors that the user can mend. All others are faults of the program.
MENDABLE = (ValueError, OSError, NotImplementedError, FloatingPointError, ImportError)
# Of these the ones that say that a file, or what it holds, is not what the command takes.
_OF_INPUT = (ValueError, FileNotFoundError, NotImplementedError)


def exit_code(main: Callable[[], int], stdout: type[streams.Stream] = streams.Stream) -> int:
    """Calls `main`; an error that the user can mend becomes one line on stderr.

    Args:
      main: the script.
      stdout: `streams.Result` if the script's result is what it prints: it fails where a print
        does. Other scripts go on.

    Returns:
      What `main` returns; 2 for a wrong command, config or input, 1 for any other error, 130 for
      Ctrl-C.
    """
    streams.guard(stdout)
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before the first step or during an evaluation; nothing is lost
        print("stopped", file=sys.stderr)
        return distributed.leave("stopped", 130)
    except Exception as error:
        distributed.settle()
        line = one_line(error)
        if line is None or TRACEBACK in sys.argv:
            if not distributed.joined():
                raise
            traceback.print_exc()
            return distributed.leave(line or type(error).__name__, 1)
        line = named_as_typed(flags.as_given(line), error)
        print(f"error: {_cut(line)}", file=sys.stderr)
        return distributed.leave(_cut(line), _code(error))


@contextlib.contextmanager
def reading_input() -> Iterator[None]:
    """Marks errors as those of what the command was given to read: their exit code is 2."""
    try:
        yield
    except _OF_INPUT as error:
        error.of_input = True
        raise


def _code(error: Exception) -> int:
    """2 if the command, its config or its input is wrong; 1 for what failed while running."""
    if isinstance(error, SettingError):
        return 2
    if found := messages.find(error):
        return found.code
    # What gin calls below the command's own function builds what the config names: tasks, which
    # read files, and models.
    builds = isinstance(error, _OF_INPUT) and messages.owner_of(error) not in ("", "train")
    return 2 if builds or getattr(error, "of_input", False) else 1


def named_as_typed(line: str, error: Exception, flags_of: Collection[str] | None = None) -> str:
    """The line of a wrong setting, with names that --config takes for the parsed config.

    Args:
      line: of the error.
      error: raised after parsing.
      flags_of: the names of flags, which stay; None: those of the command in use, if it reads the
        config of a run. `reformax train` has the names of settings first.
    """
    config = sys.modules.get("reformax.cli.config")
    if (
        config is None
        or not isinstance(error, SettingError)
        or isinstance(error, config.ConfigError)
    ):
        return line
    from reformax.cli import typed

    if flags_of is None:
        flags_of = flags.names_in_use() if config.is_saved() else ()
    return typed.typed(line, messages.owner_of(error), flags_of)


def _missing_platforms(error: Exception) -> str:
    """What the user set JAX_PLATFORMS to, if JAX failed to begin because of it; or ''."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    begins = any(x.co_filename.endswith("xla_bridge.py") and x.co_name == "backends" for x in codes)
    return os.environ.get("JAX_PLATFORMS", "") * begins


def _function_of(called: str) -> str:
    """'module.function' of what gin called, by its last name."""
    from reformax.cli import lookup

    return lookup.function_of(called)


def _cut(line: str) -> str:
    """A line without the middle of a value of thousands of letters, such as a path."""
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def one_line(error: Exception) -> str | None:
    """The error in one line, without gin's appendix; None for a fault of the program."""
    if platforms := _missing_platforms(error):
        why = f" ({messages.first_line(error)})" if str(error) else ""
        return (
            f"JAX_PLATFORMS={platforms}: JAX finds no such device, or its package is not there, "
            f"such as reformax[cuda]: install it, or unset JAX_PLATFORMS{why}"
        )
    if found := messages.find(error, _function_of):
        return found.line
    if isinstance(error, MENDABLE):
        line, inner = messages.text_of(error), messages.raised(error)
        if isinstance(inner, OSError) and inner.filename is not None:
            line = line.replace(str(inner), str(durable.explained(inner, "used")))
        return " ".join(line.split()) or type(error).__name__
    return None
