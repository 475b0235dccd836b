"""Joins the processes of a run, by flags or as Slurm or Open MPI started them.

`jax.distributed.initialize` does it, before any device is touched. What it would answer with an
abort, such as an address at which nothing listens, is found before and reported in a line.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Annotated

from reformax.cli import flags
from reformax.declared import Bounds, Count, NonEmpty, SettingError, Size

Address = Annotated[str, NonEmpty("HOST:PORT")]
Seconds = Annotated[int, Bounds(1, 86_400)]
_NAMES = ("coordinator_address", "num_processes", "process_id")
_TIMEOUTS = ("heartbeat_timeout", "step_timeout", "start_timeout")
# Flags that may differ: paths, whose content is compared, and what is shown.
_FREE = ("config_file", "output_dir", "data_dir", "init_from", "distributed", "quiet", "traceback")
# Defaults of the timeouts, in seconds.
HEARTBEAT = 100
STEP = 1800
START, START_OF_MANY = 20, 300  # a scheduler starts machines apart
_JAX_TIMEOUT = 300  # seconds for JAX's own meeting, of processes that are there


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of several processes; their names are JAX's."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--distributed",
        action="store_true",
        default=None,
        help="join the processes that Slurm or Open MPI started, as JAX finds them",
    )
    group.add_argument(
        "--coordinator_address",
        type=flags.of(Address),
        metavar="HOST:PORT",
        help="of process 0, and a free port there",
    )
    group.add_argument("--num_processes", type=flags.of(Size), help="of the run, in all")
    group.add_argument("--process_id", type=flags.of(Count), help="of this one: 0, 1, ...")
    group.add_argument(
        "--heartbeat_timeout",
        type=flags.of(Seconds),
        help="seconds without a sign of life after which a process counts as dead and the others "
        f"end (default: {HEARTBEAT})",
    )
    group.add_argument(
        "--step_timeout",
        type=flags.of(Seconds),
        help="seconds without a step, or a batch of an evaluation, after which all processes end "
        f"because one hangs (default: {STEP})",
    )
    group.add_argument(
        "--start_timeout",
        type=flags.of(Seconds),
        help="seconds for all processes to start; those that came end then, since one that is "
        f"killed as it starts never comes (default: {START}; {START_OF_MANY} with --distributed)",
    )


def join(args: argparse.Namespace, config: str | None = None) -> None:
    """Makes this process one of a run's, if the flags request it; compares it with the others.

    Args:
      args: the flags.
      config: the settings that they make, in lines.

    Raises:
      SettingError: flags that do not fit together, or nothing is found.
        Or they differ, process 0 does not answer, its port is taken, or not all come.
    """
    given = {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}
    if not (given or args.distributed):
        flags.refuse(args, _TIMEOUTS, "this process is alone")
        return
    if len(given) == len(_NAMES):
        _check(**given)
    elif not args.distributed:
        missing = next(name for name in _NAMES if name not in given)
        raise SettingError(
            f"--{missing} is missing: give --{', --'.join(_NAMES[:-1])} and --{_NAMES[-1]}, or "
            "--distributed where Slurm or Open MPI started this process"
        )
    import jax

    from reformax.training import environment, processes

    given = _detected(given) if args.distributed else given
    # It would swallow SIGTERM; the run itself agrees with the others on when to stop.
    jax.config.update("jax_enable_preemption_service", False)
    timeout = args.heartbeat_timeout or HEARTBEAT
    # Before JAX, which would wait for what never comes, or abort with a stack of C++.
    processes.meet(
        *(given[name] for name in _NAMES),
        timeout=timeout,
        step_timeout=args.step_timeout or STEP,
        start_timeout=args.start_timeout or (START_OF_MANY if args.distributed else START),
    )
    jax.distributed.initialize(
        **given,
        cluster_detection_method="deactivate",
        initialization_timeout=_JAX_TIMEOUT,
        heartbeat_timeout_seconds=2 * timeout,  # the watchers report a death first
    )
    processes.watch()
    free = (*_NAMES, *_TIMEOUTS, *_FREE)
    given = {f"--{x}": str(value) for x, value in vars(args).items() if x not in free}
    text = {} if config is None else {"the config": config}
    processes.Processes.of_jax().compare(environment.facts() | text | given)


def _detected(given: dict) -> dict:
    """The settings that JAX finds in the variables of a launcher, besides the flags."""
    from jax._src import clusters

    find = clusters.ClusterEnv.auto_detect_unset_distributed_params
    found = find(*(given.get(name) for name in _NAMES), None, None, _JAX_TIMEOUT)
    if None in found[:3]:
        raise SettingError(
            "--distributed finds no processes: start it with srun or mpirun, or give "
            f"--{', --'.join(_NAMES[:-1])} and --{_NAMES[-1]}"
        )
    return dict(zip((*_NAMES, "local_device_ids"), found, strict=True))


def refuse(args: argparse.Namespace, why: str) -> None:
    """Raises `SettingError` if the flags of `add_flags` request several processes."""
    flags.refuse(args, [*_NAMES, "distributed", *_TIMEOUTS], why)


def agree(name: str, find: Callable[[], object]) -> None:
    """Raises `SettingError` unless all processes of the run find the same value, which JSON holds.

    All of them call it, equally often. A process that is alone finds nothing.
    """
    if not joined():
        return
    from reformax.training.processes import Processes

    processes, value = Processes.of_jax(), find()

    def check(of_first: object) -> None:
        if of_first != value:
            raise SettingError(
                f"{name} is {of_first} in process 0 and {value} in process {processes.index}: try "
                "again"
            )

    of_first = processes.broadcast(lambda: value)
    processes.by_all(lambda: check(of_first))


def joined() -> bool:
    """Whether this process is one of several that are a run."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def first() -> bool:
    """Whether this process prints the result: it is the first, or alone."""
    if not joined():
        return True
    import jax

    return jax.process_index() == 0


def settle() -> None:
    """Returns if the other processes of the run live; see `reformax.training.processes.settle`."""
    if joined():
        from reformax.training import processes

        processes.settle()


def leave(line: str, code: int) -> int:
    """Returns the exit code of an error; where other processes would wait, ends all of them."""
    if joined():
        from reformax.training import processes

        processes.leave(line, code)
    return code


def _check(coordinator_address: str, num_processes: int, process_id: int) -> None:
    """Raises what JAX would abort with, or wait for, in a line."""
    if process_id >= num_processes:
        raise SettingError(
            f"process_id is {process_id}: expected a number below num_processes={num_processes}"
        )
    found = re.fullmatch(r"(\[[^\]]+\]|[^:]+):(\d{1,5})", coordinator_address)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise SettingError(
            f"coordinator_address is {coordinator_address!r}: expected HOST:PORT, such as "
            "localhost:12355"
        )
