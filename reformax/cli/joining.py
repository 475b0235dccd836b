"""Joins the processes of a run, by flags or as Slurm or Open MPI started them.

`jax.distributed.initialize` does it, before any device is touched. What it would answer with an
abort, such as an address at which nothing listens, is found before and told in a line.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
from typing import Annotated

from reformax.cli import flags
from reformax.declared import Bounds, Count, Filled, SettingError, Size

Address = Annotated[str, Filled("HOST:PORT")]
Seconds = Annotated[int, Bounds(1, 86_400)]
_NAMES = ("coordinator_address", "num_processes", "process_id")
_TIMEOUTS = ("heartbeat_timeout", "step_timeout")
# Seconds that a process waits for the others to be there.
WAIT = 300
HEARTBEAT = 100
STEP = 1800


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


def join(args: argparse.Namespace) -> None:
    """Makes this process one of a run's, if the flags ask for it.

    Raises:
      SettingError: flags that do not fit together, or nothing is found.
      OSError: process 0 does not answer, or its port is taken.
    """
    given = {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}
    if not (given or args.distributed):
        flags.refuse(args, _TIMEOUTS, "this process is alone")
        return
    import jax

    if len(given) == len(_NAMES):
        _check(**given)
        given["cluster_detection_method"] = "deactivate"
    elif not args.distributed:
        missing = next(name for name in _NAMES if name not in given)
        raise SettingError(
            f"--{missing} is missing: give --{', --'.join(_NAMES[:-1])} and --{_NAMES[-1]}, or "
            "--distributed where Slurm or Open MPI started this process"
        )
    # It would swallow SIGTERM; the run itself agrees with the others on when to stop.
    jax.config.update("jax_enable_preemption_service", False)
    timeout = args.heartbeat_timeout or HEARTBEAT
    try:
        # Our own watchers are to tell of a death first: JAX would abort, with a stack of C++.
        jax.distributed.initialize(
            **given, initialization_timeout=WAIT, heartbeat_timeout_seconds=2 * timeout
        )
    except ValueError as error:
        raise SettingError(
            f"--distributed finds no processes ({error}): start it with srun or mpirun, or give "
            f"--{', --'.join(_NAMES[:-1])} and --{_NAMES[-1]}"
        ) from None
    from reformax.training import processes

    processes.watch(timeout, args.step_timeout or STEP)


def refuse(args: argparse.Namespace, why: str) -> None:
    """Raises `SettingError` where the flags, of `add_flags`, ask for several processes."""
    flags.refuse(args, [*_NAMES, "distributed", *_TIMEOUTS], why)


def agree(name: str, value: object) -> None:
    """Raises `SettingError` unless all processes of the run have the same value, which JSON holds.

    All of them call it, equally often.
    """
    if not joined():
        return
    from reformax.training.processes import Processes

    processes = Processes.of_jax()

    def check(of_first: object) -> None:
        if of_first != value:
            raise SettingError(f"{name} is {value} here and {of_first} in process 0: try again")

    of_first = processes.same(lambda: value)
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
    address = found[1].strip("[]"), int(found[2])
    if process_id == 0:
        _check_free(address[1])
    else:
        _wait_for(address, WAIT)


def _check_free(port: int) -> None:
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            raise SettingError(
                f"coordinator_address: port {port} cannot be had ({os.strerror(error.errno)}): "
                "give another one to all processes"
            ) from None


def _wait_for(address: tuple[str, int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                host, port = address
                raise OSError(
                    f"coordinator_address={host}:{port} does not answer for {seconds:.0f} s "
                    f"({error}): start process 0 there, and let the others reach that port"
                ) from None
        time.sleep(0.2)
