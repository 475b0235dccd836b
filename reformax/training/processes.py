"""Several processes of one run: process 0 decides, and the others follow.

JAX divides arrays among processes. All else that they must have in common goes through JAX's
coordination service, which process 0 runs: which checkpoint is the newest, whether time is up,
whether a signal came to one of them. The answers of process 0 are numbered, and every process reads
the same numbers in the same order. No device takes part, so that decisions neither wait for a step
nor get between two of its collectives.

A process that is alone decides by itself, and this module does nothing.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import jax

from reformax import durable
from reformax.declared import SettingError
from reformax.training import environment, watcher
from reformax.training.lock import Lost

T = TypeVar("T")
# Milliseconds to wait for another process. One that died ends the others sooner.
_PATIENCE = 7 * 86_400_000
# Process 0 is never so many answers ahead of another: a step waits for all.
_KEPT = 1_000
_END = "reformax/end"
_LOOK = 0.5  # seconds between looks at whether another process ended
_GRACE = 2.0  # seconds in which a process prints its own error before another's
_LINGER = 10.0  # seconds for a look at the others to end, where they no longer answer
_SETTLED = 0.5  # seconds in which a watcher detects a death
_numbers = itertools.count()
_looked = threading.Event()  # nobody looks at the others any more
_ends = threading.Event()  # this process does, by itself
_watcher: subprocess.Popen | None = None
_steps = 0  # steps that this process reported to its watcher


class Processes:
    """This process among those of a run.

    One thread may use an instance. Another takes a `branch`.

    Attributes:
      index: of this process.
      count: of all.
    """

    def __init__(self, name: str, index: int = 0, count: int = 1):
        """Takes the name of what they agree on."""
        self.index, self.count, self._name, self._number = index, count, name, 0

    @classmethod
    def of_jax(cls) -> Processes:
        """The processes of JAX; all of them make their instances in the same order."""
        from jax._src import distributed

        name, state = f"reformax/{next(_numbers)}", distributed.global_state
        if state.client is None:
            return cls(name, jax.process_index(), jax.process_count())
        return cls(name, state.process_id, state.num_processes)  # touches no device

    @property
    def first(self) -> bool:
        """Whether this is process 0, which alone prints and writes what is not divided."""
        return self.index == 0

    def branch(self, name: str) -> Processes:
        """The same processes, for another thread's use."""
        return Processes(f"{self._name}/{name}", self.index, self.count)

    def broadcast(self, decide: Callable[[], T]) -> T:
        """Runs `decide` on process 0 and broadcasts the result.

        Args:
          decide: returns what JSON holds.

        Raises:
          Exception: the error that it raised, in every process.
        """
        if self.count == 1:
            return decide()
        key, self._number = f"{self._name}/{self._number}", self._number + 1
        if not self.first:
            return _opened(_client().blocking_key_value_get(key, _PATIENCE), "process 0")
        try:
            value = decide()
        except Exception as error:
            _client().key_value_set(key, _packed(error))
            raise
        _client().key_value_set(key, json.dumps({"value": value}))
        if self._number > _KEPT:
            _client().key_value_delete(f"{self._name}/{self._number - _KEPT}")
        return value

    def by_first(self, do: Callable[[], T]) -> T | None:
        """Calls `do` in process 0 alone; returns its result there. Raises as `broadcast`."""
        done: list[T] = []
        self.broadcast(lambda: done.append(do()))
        return done[0] if done else None

    def by_all(self, do: Callable[[], T]) -> list[T]:
        """Has every process do it; returns what each returned, by process.

        Args:
          do: returns what JSON holds.

        Raises:
          Exception: the error of one of them, in every process.
        """
        if self.count == 1:
            return [do()]
        key, error = f"{self._name}/{self._number}/all", None
        try:
            answer = json.dumps({"value": do()})
        except Exception as raised:
            error, answer = raised, _packed(raised)
        _client().key_value_set(f"{key}/{self.index}", answer)

        def collect() -> list[T]:
            if error is not None:
                raise error
            each = range(self.count)
            texts = [_client().blocking_key_value_get(f"{key}/{i}", _PATIENCE) for i in each]
            values = [_opened(text, f"process {i}") for i, text in enumerate(texts)]
            _client().key_value_delete(key)
            return values

        try:
            return self.broadcast(collect)
        except Exception as of_another:
            raise error or of_another from None

    def barrier(self) -> None:
        """Returns when every process has called it."""
        self.by_all(lambda: None)

    def compare(self, facts: Mapping[str, str]) -> None:
        """Raises `SettingError`, in every process, unless all have the same facts by name."""
        if (line := environment.difference(self.by_all(lambda: dict(facts)))) is not None:
            raise SettingError(line)

    def request_stop(self, reason: str) -> None:
        """Requests from process 0 that the run stops; each process calls it once at most."""
        if self.count > 1:
            _client().key_value_set(f"{self._name}/stop/{self.index}", reason)

    def stop_requests(self) -> dict[int, str]:
        """In process 0: the reasons of the other processes that request a stop, by process."""
        if self.count == 1:
            return {}
        found = _client().key_value_dir_get(f"{self._name}/stop/")
        return {int(key.rpartition("/")[2]): reason for key, reason in found}


def _client():
    """The client of JAX's coordination service; JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client


def _packed(error: Exception) -> str:
    """An error as JSON that `_opened` raises."""
    kind, system = "ValueError", durable.system_error(error)
    if isinstance(error, Lost | SettingError | FloatingPointError):
        kind = next(k for k in _KINDS if isinstance(error, _KINDS[k]))
    elif system is not None:
        kind = "OSError"
        if system.strerror is not None:
            path = None if system.filename is None else os.fspath(system.filename)
            return json.dumps({"kind": kind, "system": [system.errno, system.strerror, path]})
    return json.dumps({"kind": kind, "text": str(error)})


_KINDS = {
    "Lost": Lost,
    "SettingError": SettingError,
    "FloatingPointError": FloatingPointError,
    "OSError": OSError,
    "ValueError": ValueError,
}


def _opened(text: str, who: str) -> Any:
    """The value of an answer; raises the error that it holds."""
    answer = json.loads(text)
    if "value" in answer:
        return answer["value"]
    if "system" in answer:
        number, words, path = answer["system"]
        raise OSError(number, words, path or f"a file of {who}")
    text = answer["text"]
    raise _KINDS[answer["kind"]](text if text.startswith("process ") else f"{who}: {text}")


# The end of a process.


def meet(
    address: str, count: int, index: int, timeout: float, step_timeout: float, start_timeout: float
) -> None:
    """Starts a watcher of this process; returns when all processes are connected.

    From then on this process ends when another one dies or hangs, or a watcher does. JAX's
    coordination service can have the address afterwards.

    Args:
      address: HOST:PORT of process 0.
      count: of all processes.
      index: of this one.
      timeout: seconds without a sign of life after which a machine counts as failed.
      step_timeout: seconds without `go_on` after which those that are behind count as hanging.
      start_timeout: seconds for all processes to come.

    Raises:
      SettingError: the processes do not form a run, or not all of them come.
    """
    global _watcher
    host, _, port = address.rpartition(":")
    if index == 0:  # JAX takes another port there, if this variable says so
        port = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address).rpartition(":")[2]
    numbers = [str(x) for x in (index, count, timeout, step_timeout, start_timeout)]
    command = [sys.executable, "-I", watcher.__file__, *numbers, host.strip("[]"), port]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    for line in iter(started.stdout.readline, b""):
        word, _, rest = line.decode().strip().partition(" ")
        if word == "refused":
            raise SettingError(rest)
        if word == "met":
            break
    else:
        raise SettingError(f"the watcher of process {index} was killed: try again")
    _watcher = started
    os.set_blocking(_watcher.stdin.fileno(), False)
    threading.Thread(target=_mind_watcher, args=(index,), name="watcher", daemon=True).start()


def _mind_watcher(index: int) -> None:
    """Ends this process when its watcher is killed, since nothing else would end it later."""
    while os.read(_watcher.stdout.fileno(), 2**12):
        pass
    if not _ends.is_set():
        line = f"error: the watcher of process {index} was killed: the same command goes on from "
        with suppress(OSError):
            os.write(2, f"{line}the latest checkpoint\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def watch() -> None:
    """Ends this process when another one reports an error; JAX knows all processes by now."""
    thread = threading.Thread(target=_watch, name="other processes", daemon=True)
    thread.start()
    # A thread that came back from C++ while the interpreter ends would abort the process.
    atexit.register(lambda: (_looked.set(), thread.join(_LINGER), _release()))


def _release() -> None:
    """Reports the orderly end of this process to its watcher.

    JAX's end waits for the other processes, and one of them may be killed before: it comes first.
    """
    if _watcher is not None:
        with suppress(Exception):
            jax.distributed.shutdown()
        _done()


def _done() -> None:
    _ends.set()
    if _watcher is not None:
        with suppress(OSError, ValueError):
            _watcher.stdin.write(b"done\n")
            _watcher.stdin.close()


def go_on() -> None:
    """Reports one more step to the watcher; all processes call it equally often.

    Process 0 calls it after a decision that the others wait for, and these before: the one that
    does not go on is then behind the others.
    """
    global _steps
    if _watcher is not None:
        _steps += 1
        with suppress(OSError, ValueError):  # a watcher that is behind reads a later number
            os.write(_watcher.stdin.fileno(), b"%d\n" % _steps)


def settle() -> None:
    """Returns if the other processes live: an error may follow from the death of one.

    The watcher of this process knows of that as soon as it does, and ends it with a better line.
    """
    if _watcher is not None:
        time.sleep(_SETTLED)


def _watch() -> None:
    while not _looked.wait(_LOOK):
        try:
            found = _client().key_value_try_get(_END)
        except Exception:  # there is none so far, or JAX is shutting down
            continue
        end = json.loads(found)
        if end["process"] == _index():
            return
        if _looked.wait(_GRACE):  # it has an error of its own
            return
        print(f"error: process {end['process']} ended: {end['line']}", file=sys.stderr, flush=True)
        leave(end["line"], end["code"])


def leave(line: str, code: int) -> None:
    """Ends this process at once and has the others end too.

    An ordinary exit would wait for the others, which may wait for this process in a step.

    Args:
      line: of the error.
      code: the exit code of all.
    """
    _looked.set()
    end = {"process": _index(), "line": line, "code": code}
    with suppress(Exception):  # another process reported first, or the service has ended
        _client().key_value_set(_END, json.dumps(end))
    if _index() == 0:
        time.sleep(2 * _GRACE)  # the others read it from the service, which ends with this process
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _done()
    os._exit(code)


def _index() -> int:
    from jax._src import distributed

    return distributed.global_state.process_id
