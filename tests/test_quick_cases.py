"""The table of quick cases names cases that are there, and leaves some out."""

from collections import defaultdict
from pathlib import Path

import pytest

from tests.quick_cases import COLLECTED, QUICK


@pytest.mark.parametrize("file", QUICK)
def test_every_line_leaves_cases_out_and_keeps_those_that_it_names(file, request):
    assert (Path(__file__).parent / file).exists()
    cases = defaultdict(set)
    for of, test, case in request.config.stash[COLLECTED]:
        if of == file:
            cases[test].add(case)
    if not cases or any("::" in argument for argument in request.config.args):
        pytest.skip("needs a session that collects the whole file")
    for test, quick in QUICK[file].items():
        assert set(quick) < cases[test], test
