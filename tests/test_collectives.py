"""What the harness of benchmarks reads from compiled programs: who sends what to whom."""

import pytest

from benchmarks.harness.collectives import collectives

ROWS = (0, 1, 2, 3), (4, 5, 6, 7)
COLUMNS = (0, 4), (1, 5), (2, 6), (3, 7)


@pytest.mark.parametrize(
    "written, groups",
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("mesh['a'=2,'b'=4] {'b'}", ROWS),
        ("mesh['a'=2,'b'=4] {'a'}", COLUMNS),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", COLUMNS),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ROWS),
        ("mesh['a'=1,'b'=8] {'a','b'}", (tuple(range(8)),)),
        ("mesh['a'=8] {'a':(2)4}", ROWS),
        ("mesh['a'=8] {'a':(1)2}", COLUMNS),
    ],
)
def test_groups_of_devices_are_read_in_every_notation(written, groups):
    line = (
        f"  %sum = f32[6]{{0}} all-reduce(%x), channel_id=1, replica_groups={written}, to_apply=%f"
    )
    (found,) = collectives(f"ENTRY %main (x: f32[6]) -> f32[6] {{\n{line}\n}}\n")
    assert found.groups == groups
    n = len(groups[0])
    assert found.sent == pytest.approx(2 * (n - 1) / n * 24)


def test_groups_that_are_not_understood_are_an_error():
    line = "  %sum = f32[6]{0} all-reduce(%x), replica_groups=other, to_apply=%f"
    with pytest.raises(ValueError, match="unknown groups of devices in .*replica_groups=other"):
        collectives(f"ENTRY %main (x: f32[6]) -> f32[6] {{\n{line}\n}}\n")
