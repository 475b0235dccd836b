"""The table of quick cases names cases that are there, and leaves some out."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.quick_cases import QUICK

TESTS = Path(__file__).parent


def test_every_line_names_a_test():
    """Without collecting them, which takes half a minute."""
    for file, tests in QUICK.items():
        text = (TESTS / file).read_text()
        missing = [test for test in tests if f"\ndef {test}(" not in text]
        assert not missing, f"{file}: {missing}"


@pytest.mark.slow
def test_every_line_leaves_cases_out_and_keeps_those_that_it_names():
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only"]
    command += [f"-m={'slow or not slow'}", *(str(TESTS / file) for file in QUICK)]
    printed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    cases = defaultdict(set)
    for line in printed.stdout.splitlines():
        test, _, case = line.partition("[")
        cases[test].add(case[:-1])
    for file, tests in QUICK.items():
        for test, quick in tests.items():
            assert set(quick) < cases[f"tests/{file}::{test}"], f"{file}: {test}"
