"""Several processes that train one run: real ones, of four simulated devices each."""

import errno
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import evaluate
import generate
import train
from reformax.cli import prepare
from reformax.data import base
from reformax.data import text as texts
from reformax.declared import SettingError
from reformax.training import environment, folder, manifest, placing, processes, watcher
from reformax.training.checkpoint import Checkpoints
from reformax.training.checkpoint.copies import Copies
from reformax.training.lock import Lost
from reformax.training.processes import Processes
from tests import pages
from tests.training import worker

ROOT = Path(__file__).resolve().parents[2]
# Lines of what Gloo prints for each device, piece by piece: threads mix their pieces.
OF_GLOO = re.compile(
    r"^(?:\[Gloo\]|Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is"
    r"|[ :\d])*$\n?",
    re.M,
)
CONFIG = """
from __gin__ import dynamic_registration
from reformax.training import loop
from reformax.training import optimizer
from tests.training import tiny

loop.train.model = @tiny.TinyLM
loop.train.task = @tiny.counting()
tiny.counting.seconds = 0.05
loop.train.optimizer = @optimizer.adamw()
optimizer.adamw.learning_rate = 3e-2
loop.train.steps = 100_000
loop.train.batch_size = 8
loop.train.length = 16
loop.train.log_every = 1
loop.train.checkpoint_every = 5
loop.train.keep = 3
"""


def test_what_gloo_prints_is_left_out():
    begin, middle = "[Gloo] Rank 3", " is connected to 7 peer ranks. "
    end = "Expected number of connected peer ranks is : 7\n"
    mixed = (
        f"{begin}{begin}{middle}{end}{middle}{end}{end}\n{begin} is connected to 7\n peer ranks. "
    )
    ours = "valid: 999 targets\n7 rows\n"
    assert OF_GLOO.sub("", f"{mixed}{end}{ours}{mixed}") == ours


class Launch:
    """A script in processes of four devices each, with what each finds in its environment."""

    def __init__(
        self,
        commands: list[list[str]],
        folder: Path,
        script: str | Path = "train.py",
        found: tuple[dict[str, str], ...] = ({}, {}),
    ):
        program = [sys.executable, str(ROOT / script)]
        timeouts = ["--heartbeat_timeout=100", "--start_timeout=100"]
        program += timeouts if script in ("train.py", "evaluate.py") else []
        program = ["/bin/sh"] if script == "sh" else program
        flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
        # By default a device that waits 40 s for another, as while that compiles, aborts.
        flags += " --xla_cpu_collective_call_terminate_timeout_seconds=300"
        environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        self.outputs = [folder / f".process.{i}" for i in range(len(commands))]
        self.processes = [
            subprocess.Popen(
                [*program, *command],
                cwd=folder,
                env=environment | own,
                stdout=output.open("w"),
                stderr=subprocess.STDOUT,
            )
            for command, own, output in zip(commands, found, self.outputs, strict=True)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            process.kill()
            process.wait()

    def codes(self, seconds: float = 100) -> list[int]:
        """The exit codes."""
        end = time.monotonic() + seconds
        try:
            return [process.wait(max(end - time.monotonic(), 1)) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {seconds} s: {self.said}") from None

    @property
    def said(self) -> list[str]:
        """What each printed; Gloo prints by itself."""
        return [OF_GLOO.sub("", output.read_text()) for output in self.outputs]


def port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        return server.getsockname()[1]


def flags(address: str, index: int) -> list[str]:
    return [f"--coordinator_address={address}", "--num_processes=2", f"--process_id={index}"]


def lines(folder: Path, split: str) -> list[dict]:
    return [line for line in worker.record(folder) if line["split"] == split]


@pytest.mark.slow
def test_the_page_trains_in_two_processes_what_one_trains(tmp_path, monkeypatch, call):
    """The commands of docs/devices.md: from a checkpoint of one process, and back to one."""
    text = (ROOT / "docs/devices.md").read_text()
    both = [command for command in pages.commands(text) if "--process_id=" in command]
    settings = [
        "seed=3",
        "log_every=1",
        "eval_tokens=500",
        "eval_batch_size=8",
        "checkpoint_every=1",
    ]
    settings = [f"--config=loop.train.{setting}" for setting in settings]
    settings += shlex.split(pages._training("python train.py", tmp_path, ""))
    # Arrays of 65,536 numbers are split.
    settings += [
        "--config=d_ff=4096",
        "--config=batch_size=8",
        "--config=stdlib.stdlib.max_bytes=20_000",
        "--config=optimizer.cosine.steps=6",  # of all parts
    ]
    monkeypatch.chdir(tmp_path)

    def alone(folder: str, steps: int) -> None:
        more = ["--quiet", f"--output_dir={folder}", f"--config=loop.train.steps={steps}"]
        code, _, err = call(train.main, *settings, *more)
        assert code == 0, err

    alone("runs/one", 6)
    alone("runs/two", 2)
    address = f"localhost:{port()}"
    commands = []
    for command in both:
        command = re.sub(r"--coordinator_address=\S+", f"--coordinator_address={address}", command)
        words = shlex.split(command)[2:]
        more = ["--config=loop.train.steps=4", "--config=loop.train.mesh={'fsdp': 8}"]
        commands.append([*words, *settings, *more])
    with Launch(commands, tmp_path) as launched:
        assert launched.codes() == [0, 0], launched.said
    first, second = launched.said
    assert "8 cpu devices" in first and "of 2 processes, going on from step 2 to 4" in first
    assert "next: " in first and not second
    of_second = Path("runs/two/checkpoints/4/arrays/ocdbt.process_1/d")
    assert sum(path.stat().st_size for path in of_second.iterdir()) > 100_000
    alone("runs/two", 6)
    evaluate_together("runs/two", call)

    one, two = Path("runs/one"), Path("runs/two")
    for split, names in (("train", ("bits_per_dim", "grad_norm")), ("valid", ("bits_per_dim",))):
        expected = {line["step"]: line for line in lines(one, split)}
        found = lines(two, split)
        assert [line["step"] for line in found] == (
            [2, 4, 6] if split == "valid" else [*range(1, 7)]
        )
        for line in found:
            for name in names:
                if line["step"] in expected:
                    assert line[name] == pytest.approx(expected[line["step"]][name], abs=1e-5)


@pytest.mark.slow
def test_token_files_give_any_number_of_processes_the_batches_of_one(tmp_path, capsys):
    """A run goes on in 1, 2 and 4 processes with the rows of a text in memory, bit for bit."""
    (tmp_path / "a.txt").write_text("\n".join(f"line {i} of many" for i in range(9_999)))
    prepare.main([f"--data_dir={tmp_path / 'a.txt'}", f"--to={tmp_path / 'made'}", "--quiet"])
    capsys.readouterr()
    (tmp_path / "notes").mkdir()
    config = CONFIG.replace("@tiny.counting()", "@tiny.noted()").replace("= 8", "= 16")
    config = config.replace("tiny.counting.seconds = 0.05", "tiny.TinyLM.vocab_size = 256")
    config += f"tiny.noted.data_dir = '{tmp_path / 'made'}'\n"
    config += f"tiny.noted.notes = '{tmp_path / 'notes'}'\n"
    (tmp_path / "run.gin").write_text(config)
    for n, steps in ((1, 3), (2, 6), (4, 9), (1, 11)):
        address = f"--coordinator_address=localhost:{port()}"
        together = [[address, f"--num_processes={n}", f"--process_id={i}"] for i in range(n)]
        more = ["--config_file=run.gin", "--output_dir=run", f"--config=loop.train.steps={steps}"]
        mesh = f"--config=loop.train.mesh={{'data': {4 * n}}}"
        each = [[*more, mesh, *(own if n > 1 else [])] for own in together]
        script = "train.py" if n > 1 else ROOT / "train.py"  # alone it takes no timeouts
        with Launch(each, tmp_path, script, ({},) * n) as launched:
            assert launched.codes(300) == [0] * n, launched.said
    task, seen = texts.text(tmp_path / "a.txt"), {}
    for path in sorted((tmp_path / "notes").iterdir()):
        step, n, _ = path.stem.split(".")
        found, whole = np.load(path), task.train_batch(0, int(step), 16, 16).targets
        np.testing.assert_array_equal(found["targets"], whole[found["rows"]])
        seen.setdefault((int(step), int(n)), []).extend(found["rows"])
    assert all(sorted(rows) == list(range(16)) for rows in seen.values())
    for n, steps in ((1, (0, 1, 2, 9, 10)), (2, (3, 4, 5)), (4, (6, 7, 8))):
        assert {(step, n) for step in steps} <= set(seen)


@pytest.mark.slow
def test_processes_with_other_data_end_before_step_1(tmp_path):
    homes = tmp_path / "0", tmp_path / "1"
    for i, home in enumerate(homes):
        home.mkdir()
        (home / "a.txt").write_text(f"line {i} of many\n" * 999)
    config = CONFIG.replace("@tiny.counting()", "@tiny.noted()")
    config = config.replace("tiny.counting.seconds = 0.05", "tiny.TinyLM.vocab_size = 256")
    config += "tiny.noted.data_dir = '~/a.txt'\ntiny.noted.notes = '.'\n"
    (tmp_path / "run.gin").write_text(config)
    own, address = ["--config_file=run.gin", "--output_dir=run"], f"localhost:{port()}"
    commands = [[*own, *flags(address, i)] for i in range(2)]
    found = tuple({"HOME": str(home)} for home in homes)
    with Launch(commands, tmp_path, found=found) as launched:
        assert launched.codes(60) == [2, 2], launched.said
    for said in launched.said:
        assert "error: the data of test is " in said and " in process 1: give all" in said, said


def evaluate_together(folder: str, call) -> None:
    """Two processes score what one does; `generate` refuses them."""
    options = [f"--output_dir={folder}", "--tokens=2000", "--by_position", "--quiet"]
    options += ["--config=loop.train.mesh={}", "--checkpoint=latest"]
    code, told, err = call(evaluate.main, *options)
    assert code == 0, err
    kept = Path(folder) / "evaluation_valid.json"
    alone, _ = json.loads(kept.read_text()), kept.unlink()
    address = f"localhost:{port()}"
    commands = [[*options, *flags(address, index)] for index in range(2)]
    with Launch(commands, Path.cwd(), "evaluate.py") as launched:
        assert launched.codes() == [0, 0], launched.said
    first, second = launched.said
    assert re.findall(r"[a-z].*", first)[0] == told.splitlines()[0] and not second
    together = json.loads(kept.read_text())
    bands = zip(together.pop("by_position"), alone.pop("by_position"), strict=True)
    assert all(one == pytest.approx(other, abs=1e-5) for one, other in bands)
    assert together.keys() == alone.keys() and together["n_targets"] == alone["n_targets"]
    assert together["bits_per_dim"] == pytest.approx(alone["bits_per_dim"], abs=1e-5)


def under_slurm(index: int, port: int) -> dict[str, str]:
    """What Slurm gives a process; JAX makes the port of the job's number."""
    names = {"JOB_ID": 4096 * 9 + port - FIRST_PORT, "STEP_NODELIST": "localhost", "NTASKS": 2}
    names |= {"PROCID": index, "LOCALID": index, "STEP_NUM_NODES": 1}
    return {f"SLURM_{name}": str(value) for name, value in names.items()}


def under_open_mpi(index: int, port: int) -> dict[str, str]:
    """What Open MPI gives a process, likewise."""
    world = {"SIZE": 2, "RANK": index, "LOCAL_RANK": index}
    found = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in world.items()}
    uri = f"{4096 * (port - FIRST_PORT)}.0;tcp://127.0.0.1,10.1.0.1:34911"
    return found | {"OMPI_MCA_orte_hnp_uri": uri}


# JAX takes one of 4,096 ports from this one on.
FIRST_PORT = 61_440


@pytest.mark.slow
@pytest.mark.parametrize("launcher, found", [("srun", under_slurm), ("mpirun", under_open_mpi)])
def test_the_page_finds_the_processes_of_a_launcher(launcher, found, tmp_path):
    """Its command, in two processes with the launcher's variables."""
    text = (ROOT / "docs/devices.md").read_text()
    (line,) = re.findall(rf"^{launcher} .*python train\.py (--dist.*)", text, re.M)
    words = [*shlex.split(line.replace("/shared/runs/two", "two")), "--config_file=run.gin"]
    (tmp_path / "run.gin").write_text(CONFIG.replace("100_000", "6"))
    # At random: another test may be about to take the first one that is free.
    ports = random.sample(range(FIRST_PORT, 2**16), 100)
    free = next(port for port in ports if is_free(port))
    each = tuple(found(index, free) for index in range(2))
    with Launch([words] * 2, tmp_path, found=each) as launched:
        assert launched.codes() == [0, 0], launched.said
    first, second = launched.said
    assert "8 cpu devices (data 8) of 2 processes, from step 1 to 6" in first and not second
    assert [line["step"] for line in lines(tmp_path / "two", "train")] == [*range(1, 7)]


def is_free(number: int) -> bool:
    with socket.socket(socket.AF_INET6) as server:
        try:
            server.bind(("", number))
        except OSError:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern, own",
    [
        (r"- >\n((?: {14}.*\n)+)", lambda i: {"JOB_COMPLETION_INDEX": str(i)}),
        (r"sh -c '((?:[^']|\n)*)'", lambda i: under_open_mpi(i, FIRST_PORT)),
    ],
    ids=["kubernetes", "Open MPI 5"],
)
def test_the_page_numbers_processes_in_a_shell(pattern, own, tmp_path):
    (command,) = re.findall(pattern, (ROOT / "docs/devices.md").read_text())
    train, address = (
        f"{sys.executable} -m reformax train --config_file=run.gin",
        f"localhost:{port()}",
    )
    for old, new in [
        (r"exec (reformax train|python train\.py)", f"exec {train}"),
        ("/shared/runs/two", "two"),
        (r"\S+:12355", f"--coordinator_address={address}"),
    ]:
        command, times = re.subn(old, new, command)
        assert times == 1
    (tmp_path / "run.gin").write_text(CONFIG.replace("100_000", "6"))
    command = command.replace("\\\n", " ").replace("\n", " ")
    each = own(0), own(1)
    with Launch([["-c", command]] * 2, tmp_path, "sh", each) as launched:
        assert launched.codes() == [0, 0], launched.said
    assert "of 2 processes, from step 1 to 6" in launched.said[0]
    assert [line["step"] for line in lines(tmp_path / "two", "train")] == [*range(1, 7)]


def test_generation_refuses_several_processes_in_a_line(call):
    for given in (flags("here:1", 0), ["--distributed"]):
        code, _, err = call(generate.main, "--output_dir=x", "--prompt=a", *given)
        assert code == 2 and "text is written by one process" in err and err.count("\n") == 1


@pytest.mark.slow
def test_what_ends_one_process_ends_both_and_nothing_is_lost(tmp_path):
    """SIGKILL of one and of the other, SIGTERM to the second, and data that it alone lacks."""
    (tmp_path / "run.gin").write_text(CONFIG)
    run = tmp_path / "run"

    def launch(*more: str) -> Launch:
        address, own = f"localhost:{port()}", ["--config_file=run.gin", "--output_dir=run", *more]
        return Launch([[*own, *flags(address, 0)], [*own, *flags(address, 1)]], tmp_path)

    def wait_for(step: int, launched: Launch) -> None:
        end = time.monotonic() + 100
        while not [s for s in Checkpoints(run).steps() if s >= step]:
            assert time.monotonic() < end, launched.said
            assert all(process.poll() is None for process in launched.processes), launched.said
            time.sleep(0.05)

    saved = 0
    for killed in (1, 0):
        with launch() as launched:
            wait_for(saved + 5, launched)
            time.sleep(random.random())
            launched.processes[killed].kill()
            codes = launched.codes(60)  # JAX by itself would take 200 s
            assert codes[killed] == -signal.SIGKILL, launched.said
            assert codes[1 - killed] in (-signal.SIGKILL, -signal.SIGABRT), launched.said
            line = f"error: process {killed} was killed, or its machine failed: the same command"
            end = time.monotonic() + 20
            while line not in launched.said[1 - killed]:  # Gloo or JAX may have been faster
                assert time.monotonic() < end, launched.said
                time.sleep(0.05)
        saved = Checkpoints(run).steps()[-1]
    with launch() as launched:
        wait_for(saved + 10, launched)
        launched.processes[1].send_signal(signal.SIGTERM)
        assert launched.codes() == [128 + signal.SIGTERM] * 2, launched.said
        assert f"going on from step {saved}" in launched.said[0]
        assert not launched.said[1]
    last = Checkpoints(run).steps()[-1]
    assert f"saved at step {last}" in launched.said[0]
    steps = [line["step"] for line in lines(run, "train")]
    assert steps == [*range(1, last + 1)]
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith("tmp")]

    def files() -> dict[Path, int]:
        found = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
        return {path: path.stat().st_mtime_ns for path in found}

    there = files()
    with launch("--data_dir=empty in process 1") as launched:
        assert launched.codes(60) == [2, 2], launched.said
        told = "no data in --data_dir=empty in process 1: give the folder that has it\n"
        assert launched.said == [f"error: process 1 ended: {told}", f"error: {told}"]
    assert files() == there

    # One process, which nothing interrupts, computes the same.
    alone = worker.arguments(steps=last, eval_every=None, log_every=1, checkpoint_every=5)
    worker.loop.train(tmp_path / "alone", **alone)
    expected = [line["bits_per_dim"] for line in lines(tmp_path / "alone", "train")]
    found = [line["bits_per_dim"] for line in lines(run, "train")]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, found, told",
    [
        (
            flags("", 1)[1:],
            {"JAX_ENABLE_X64": "1"},
            "JAX_ENABLE_X64 is False in process 0 and True",
        ),
        (["--num_processes=3", "--process_id=1"], {}, "num_processes is 2 in process 0 and 3 in p"),
        (["--num_processes=2", "--process_id=0"], {}, "process_id=0 is given to two processes"),
        (
            [*flags("", 1)[1:], "--output_dir=other"],
            {},
            "output_dir=other is not the folder of process 0",
        ),
        (
            [*flags("", 1)[1:], "--config=tiny.counting.noise=0.2"],
            {},
            "the config is not there in process 0 and tiny.counting.noise = 0.2 in process 1",
        ),
        ([*flags("", 1)[1:], "--allow_changed_data"], {}, "--allow_changed_data is False in proc"),
    ],
    ids=["x64", "count", "id", "folder", "config", "flag"],
)
def test_processes_that_are_not_alike_end_before_step_1(given, found, told, tmp_path):
    (tmp_path / "run.gin").write_text(CONFIG)
    address, own = f"localhost:{port()}", ["--config_file=run.gin", "--output_dir=run"]
    commands = [[*own, *flags(address, 0)], [*own, f"--coordinator_address={address}", *given]]
    with Launch(commands, tmp_path, found=({}, found)) as launched:
        assert launched.codes(60) == [2, 2], launched.said
        assert all(told in said and said.count("\n") == 1 for said in launched.said), launched.said
    assert not list(tmp_path.glob("*/"))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_watcher_that_is_killed_ends_both(killed, tmp_path):
    (tmp_path / "run.gin").write_text(CONFIG)
    command, address = ["--config_file=run.gin", "--output_dir=run"], f"localhost:{port()}"
    with Launch([[*command, *flags(address, index)] for index in range(2)], tmp_path) as launched:
        end = time.monotonic() + 100
        while not Checkpoints(tmp_path / "run").steps():
            assert time.monotonic() < end, launched.said
            time.sleep(0.05)
        of = Path(f"/proc/{launched.processes[killed].pid}/task")
        children = [int(x) for path in of.glob("*/children") for x in path.read_text().split()]
        (watching,) = (x for x in children if b"watcher.py" in command_line_of(x))
        os.kill(watching, signal.SIGKILL)
        codes = launched.codes(30)
        assert all(code in (-signal.SIGKILL, -signal.SIGABRT) for code in codes), launched.said
        assert f"error: the watcher of process {killed} was killed" in launched.said[killed]


def command_line_of(process: int) -> bytes:
    """The command line of a process."""
    return Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, told",
    [
        (["--heartbeat_timeout=2"], "process 1 was stopped for 2 s"),
        (
            ["--step_timeout=3", "--config=loop.train.callbacks=[@tiny.hanging()]"],
            "process 1 did not go on for 3 s (--step_timeout)",
        ),
    ],
    ids=["stopped", "hanging"],
)
def test_a_process_that_hangs_ends_both(given, told, tmp_path):
    (tmp_path / "run.gin").write_text(CONFIG)
    command = ["--config_file=run.gin", "--output_dir=run", *given]
    address = f"localhost:{port()}"
    with Launch([[*command, *flags(address, index)] for index in range(2)], tmp_path) as launched:
        if "stopped" in told:
            end = time.monotonic() + 100
            while not Checkpoints(tmp_path / "run").steps():
                assert time.monotonic() < end, launched.said
                time.sleep(0.05)
            launched.processes[1].send_signal(signal.SIGSTOP)
        assert launched.codes() == [-signal.SIGKILL] * 2, launched.said
        line = f"error: {told}: the same command goes on from the latest checkpoint\n"
        assert all(said.endswith(line) for said in launched.said), launched.said


@pytest.mark.slow
def test_a_process_that_is_done_ends_well_while_it_looks_for_the_others(tmp_path):
    """A thread that is in C++ when the interpreter ends would abort: exit code -6, no traceback."""
    (tmp_path / "script").write_text("""
import sys
import jax
from reformax.training import processes
here = sys.argv[1], 4, int(sys.argv[2])
processes.meet(*here, 100, 100, 100)
jax.distributed.initialize(*here)
processes._LOOK = 0
processes.watch()
processes.Processes.of_jax().barrier()
""")
    address = f"localhost:{port()}"
    commands = [[address, str(index)] for index in range(4)]
    with Launch(commands, tmp_path, tmp_path / "script", ({},) * 4) as launched:
        assert launched.codes() == [0] * 4, launched.said


@pytest.mark.parametrize(
    "given, told",
    [
        (["--num_processes=2"], "--coordinator_address is missing"),
        (["--coordinator_address=here:1", "--process_id=0"], "--num_processes is missing"),
        (flags("here:1", 2), "--process_id is 2: expected a number below --num_processes=2"),
        (flags("here", 0), "coordinator_address is 'here': expected HOST:PORT"),
        (flags("here:70000", 0), "expected HOST:PORT"),
        (["--process_id=-1"], "process_id is -1: expected at least 0"),
        (["--heartbeat_timeout=0"], "heartbeat_timeout is 0"),
        (["--heartbeat_timeout=9"], "heartbeat_timeout=9: this process is alone"),
        (["--step_timeout=0"], "step_timeout is 0"),
        (["--step_timeout=9"], "step_timeout=9: this process is alone"),
        (["--start_timeout=0"], "start_timeout is 0"),
        (["--start_timeout=9"], "start_timeout=9: this process is alone"),
    ],
)
def test_wrong_flags_are_one_line(given, told, tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(train.main, *given)
    assert code == 2 and told in err and err.count("\n") == 1, err
    assert not out and not list(tmp_path.iterdir())


def test_a_port_that_is_taken_and_an_address_without_an_answer_are_told(monkeypatch):
    with socket.socket(socket.AF_INET6) as server:
        server.bind(("", 0))
        server.listen()
        taken = server.getsockname()[1]
        server.close()
        with socket.create_server(("", taken), family=socket.AF_INET6) as other:
            threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
            with pytest.raises(SettingError, match=f"port {taken} cannot be had"):
                processes.meet(f"localhost:{taken}", 2, 0, 100, 100, 100)
    with pytest.raises(
        watcher.Refused, match=rf"localhost:{taken} does not answer for 0 s .*start process 0"
    ):
        watcher.Watcher(1, 2, 100, 100, 0).connect("localhost", taken)


FACTS = environment.facts()


def test_facts_that_differ_are_told_in_a_line():
    assert environment.difference([FACTS, dict(FACTS), dict(FACTS)]) is None
    for name in FACTS:
        line = environment.difference([FACTS, FACTS, FACTS | {name: "another"}])
        assert line.startswith(
            f"{name} is {FACTS[name] or 'not there'} in process 0 and another in process 2: "
        )
    one, other = ({"the config": f"a = 1\nb = {b}\n"} for b in (2, 3))
    difference = environment.difference
    assert "config is b = 2 in process 0 and b = 3 in process 1" in difference([one, other])
    other = {"the config": "a = 1\nc = 3\nb = 2\n"}
    assert "config is not there in process 0 and c = 3 in p" in difference([one, other])
    assert "x is not there in process 0 and 1 in process 1" in difference([{}, {"x": "1"}])


def facts_with(**variables: str) -> dict[str, str]:
    """The facts of another process with these environment variables."""
    script = (
        "import json; from reformax.training.environment import facts; print(json.dumps(facts()))"
    )
    environment = {x: y for x, y in os.environ.items() if not x.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-c", script]
    output = subprocess.check_output(command, env=environment | variables, cwd=ROOT, text=True)
    return json.loads(output)


def test_facts_go_by_what_changes_numbers_and_not_by_paths():
    plain, changed = facts_with(), {
        "JAX_ENABLE_X64": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_DEFAULT_PRNG_IMPL": "rbg",
        "JAX_DEBUG_NANS": "1",
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_FLAGS": "--xla_cpu_enable_fast_math=true",
    }  # fmt: skip
    found = facts_with(**changed)
    assert {name for name in plain if found[name] != plain[name]} == changed.keys()
    assert facts_with(XLA_FLAGS="--xla_dump_to=/one", JAX_COMPILATION_CACHE_DIR="/one") == plain


def test_the_source_of_the_package_and_of_own_modules_is_a_fact(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    monkeypatch.setattr(environment, "_PACKAGE", package)
    before = environment.facts()["the source of reformax"]
    (package / "__init__.py").write_text("x = 2\n")
    assert environment.facts()["the source of reformax"] != before
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_model.py").write_text("width = 1\n")
    __import__("my_model")
    own = environment.facts()["the source of my_model"]
    (tmp_path / "my_model.py").write_text("width = 2\n")
    assert environment.facts()["the source of my_model"] != own
    assert not any(name.startswith("the source of jax") for name in environment.facts())


def test_facts_are_compared_among_processes(both):
    def compare(own: Processes):
        own.compare({"python": "3.11"})
        own.compare({"python": f"3.{own.index + 11}"})

    for error in both(compare):
        assert isinstance(error, SettingError)
        assert "python is 3.11 in process 0 and 3.12 in process 1" in str(error)


@pytest.mark.parametrize("second, seen", [("link", True), ("other", False)])
def test_every_process_sees_the_folder_of_process_0(both, second, seen, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_SEEN", 0.3)
    monkeypatch.setattr(folder, "_seen", set())
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    own_paths = [tmp_path / "one", tmp_path / second]

    def see(own: Processes):
        folder._see_together(own_paths[own.index], own)

    found = both(see)
    if seen:
        assert found == [None, None]
    else:
        assert all(isinstance(error, SettingError) for error in found)
        assert all("/other is not the folder of process 0" in str(error) for error in found)
    assert not list((tmp_path / "one").iterdir()) and not list((tmp_path / "other").iterdir())


def test_one_process_decides_by_itself():
    alone = Processes("alone")
    done = []
    assert alone.broadcast(lambda: [1, "two"]) == [1, "two"] and alone.by_first(lambda: 3) == 3
    alone.by_all(lambda: done.append(1))
    alone.barrier()
    assert done == [1] and alone.stop_requests() == {} and alone.first
    with pytest.raises(OSError, match="no"):
        alone.broadcast(lambda: (_ for _ in ()).throw(OSError("no")))


@pytest.fixture
def both(monkeypatch):
    """Calls a function in two threads that JAX's coordination service takes for processes."""
    from jax._src.lib import _jax

    mine, number = threading.local(), port()
    service = _jax.get_distributed_runtime_service(f"[::]:{number}", 2)
    clients = [_jax.get_distributed_runtime_client(f"localhost:{number}", i) for i in range(2)]
    monkeypatch.setattr(processes, "_client", lambda: mine.client)
    monkeypatch.setattr(processes, "_PATIENCE", 20_000)

    def call(function):
        def one(index):
            mine.client = clients[index]
            try:
                return function(Processes("test", index, 2))
            except Exception as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda client: client.connect(), clients))
    yield call
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def test_processes_follow_the_first_one(both):
    def agree(own: Processes):
        if not own.first:
            own.request_stop("15")
        own.barrier()
        stop_requests = own.broadcast(lambda: {str(k): v for k, v in own.stop_requests().items()})
        index = own.broadcast(lambda: own.index)
        branch = own.branch("other").broadcast(lambda: [own.index, "other"])
        return stop_requests, index, branch, own.by_first(lambda: own.index)

    first, second = both(agree)
    assert first == ({"1": "15"}, 0, [0, "other"], 0)
    assert second == ({"1": "15"}, 0, [0, "other"], None)


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "/full/file"),
        SettingError("steps is 0"),
        Lost("the folder is another training's"),
        FloatingPointError("loss is nan"),
        KeyError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_one_process_is_raised_in_all(both, fails, error):
    def fail(own: Processes):
        def do():
            if own.index == fails:
                raise error

        own.by_all(do)

    found = both(fail)
    assert found[fails] is error
    other = found[1 - fails]
    kind = ValueError if isinstance(error, KeyError) else type(error)
    assert type(other) is kind and getattr(other, "errno", None) == getattr(error, "errno", None)
    told = "/full/file" if getattr(error, "errno", None) else f"process {fails}: "
    assert told in str(other)


@pytest.mark.parametrize("full", [0, 1])
def test_processes_try_a_copy_again_together(both, full, tmp_path, monkeypatch):
    """On a full disk of copies, whichever process met that; the other may fail otherwise."""
    for step in (1, 2, 3):
        folder = tmp_path / f"run/{step}"
        folder.mkdir(parents=True)
        for name in "ab":
            (folder / name).write_text(name)
        manifest.write(folder)
    address = str(tmp_path / "copies")
    calls = itertools.count()

    def send(step, kept):
        name = str(next(calls))
        return both(
            lambda own: Copies(address, own.branch(name)).send(tmp_path / f"run/{step}", step, kept)
        )

    def there():
        return Copies(address, Processes("alone")).steps()

    assert [send(step, [1, 2]) for step in (1, 2)] == [[None, None]] * 2
    copy, errors = shutil.copyfileobj, {"ab"[full]: errno.ENOSPC}

    def fails_once(source, target, block):
        if (number := errors.pop(Path(source.name).name, None)) is not None:
            raise OSError(number, os.strerror(number))
        copy(source, target, block)

    monkeypatch.setattr(shutil, "copyfileobj", fails_once)
    assert send(3, [2, 3]) == [None, None] and not errors and there() == [2, 3]
    errors = {"a": errno.EIO, "b": errno.EIO}
    assert [error.errno for error in send(1, [1])] == [errno.EIO] * 2 and there() == [2, 3]


def test_rows_of_a_text_are_those_of_its_batch():
    text = np.random.default_rng(0).integers(256, size=999).astype(np.uint8)
    task = base.byte_language_model("text", base.split_bytes(text, "text"))
    whole, rows = task.train_batch(5, 7, 8, 16), np.array([2, 3, 6])
    part = task.train_rows(5, 7, 8, 16, rows)
    for one, other in zip(part, placing.take(tuple(whole), rows), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_of_this_process_are_those_of_its_devices():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "context"))
    sharding = NamedSharding(mesh, PartitionSpec("data", "context"))
    np.testing.assert_array_equal(placing.local_rows(4, sharding), np.arange(4))
    batch = np.arange(12).reshape(4, 3)
    placed = placing._place_rows(batch, np.arange(4), 4, sharding)
    np.testing.assert_array_equal(placed, batch)
