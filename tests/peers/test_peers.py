"""Independent implementations compute the same; `pytest -m peers` needs the extra `peers`."""

import pytest

from tests.peers import table
from tests.peers.comparisons import COMPARISONS


@pytest.mark.peers
@pytest.mark.parametrize("row", COMPARISONS, ids=lambda row: row.name)
def test_it_computes_the_same(row):
    if row.missing:
        pytest.skip(f"needs {row.needs}: pip install -e '.[peers]'")
    found = row.measure()
    assert found.output <= row.allowed
    assert found.gradients is None or found.gradients <= row.allowed


def test_the_page_has_the_rows_of_the_suite():
    """With deviations that would pass; `python -m tests.peers.table` writes it."""
    found = table.rows(table.PAGE.read_text())
    assert [x[:3] for x in found] == [table.names(group) for group in table.groups()]
    for group, (*_, output, gradients, allowed) in zip(table.groups(), found, strict=True):
        assert {row.allowed for row in group} == {float(allowed)}
        assert float(output) <= float(allowed)
        assert gradients == "none on a CPU" or float(gradients) <= float(allowed)
