"""Pathfinder: curves of dashes that keep apart, dots at their ends, and what is painted of them."""

import numpy as np
import pytest

from reformax.data import pathfinder
from reformax.data.pathfinder import LOOKS, drawn, painted

LENGTH = 5


@pytest.fixture(scope="module", params=[32, 64, 128])
def images(request):
    size = request.param
    return size, LOOKS[size], drawn(np.random.default_rng(3), 12, size, LOOKS[size], LENGTH)


def points(dash):
    """Points of a dash, a tenth of its length apart."""
    return dash[0] + np.linspace(0, 1, 11)[:, None] * (dash[1] - dash[0])


def distance(one, other):
    return np.linalg.norm(points(one)[:, None] - points(other)[None], axis=-1).min()


def test_curves_bend_so_far_and_keep_apart(images):
    size, look, lines = images
    assert lines.dashes.shape == (12, 2 * LENGTH + look.n_distractors, 2, 2)
    for dashes in lines.dashes:
        there = ~np.isnan(dashes[:, 0, 0])
        assert there[: 2 * LENGTH].all() and there.sum() > 2 * LENGTH
        assert (np.abs(dashes[there] - (size - 1) / 2) <= size / 2).all()
        ways = dashes[:, 1] - dashes[:, 0]
        np.testing.assert_allclose(np.linalg.norm(ways[there], axis=-1), look.dash, rtol=1e-5)
        margins = set()
        for curve in (range(LENGTH), range(LENGTH, 2 * LENGTH)):
            for a, b in zip(curve, curve[1:], strict=False):
                cosine = ways[a] @ ways[b] / look.dash**2
                assert cosine > np.cos(np.pi / 2 / look.continuity) - 1e-4
                # The gap bends half before the joint and half behind it.
                half = (dashes[b, 0] - dashes[a, 1]) @ ways[a] / look.dash / (1 + cosine)
                margins.add(round(float(half), 3))
        (margin,) = margins
        assert margin in look.margins
        for i in np.flatnonzero(there):
            for j in np.flatnonzero(there[:i]):
                follows = i == j + 1 and i not in (LENGTH, 2 * LENGTH)
                if not follows:  # pixels are whole, hence the rounding
                    assert distance(dashes[i], dashes[j]) > 2 * margin - np.sqrt(2)


def test_the_class_says_whether_the_dots_end_one_curve(images):
    lines = images[2]
    for dashes, dots, connected in zip(*lines, strict=True):
        ends = [dashes[at, side] for at, side in ((0, 0), (LENGTH, 0))]
        ends += [dashes[at, side] for at, side in ((LENGTH - 1, 1), (2 * LENGTH - 1, 1))]
        gaps = np.linalg.norm(np.array(ends)[None] - dots[:, None], axis=-1)
        begin, end = gaps.argmin(axis=1)
        assert gaps.min(axis=1).max() < 1e-5
        assert begin < 2 <= end and connected == (begin == end - 2)
    assert 0 < lines.connected.sum() < 12


def test_what_is_painted_is_near_a_line(images):
    size, look, lines = images
    greys = painted(lines, size, look)
    assert greys.shape == (12, size, size) and greys.dtype == np.uint8
    grid = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), axis=-1)
    for grey, dashes, dots in zip(greys, lines.dashes, lines.dots, strict=True):
        fine = [points(x) for x in dashes if not np.isnan(x).any()]
        far = np.min([np.linalg.norm(grid[:, :, None] - x, axis=-1).min(-1) for x in fine], axis=0)
        to_dot = np.linalg.norm(grid[:, :, None] - dots, axis=-1).min(-1)
        want = np.minimum(look.contrast * np.clip(0.5 + look.thickness / 2 - far, 0, 1), 1)
        want = np.maximum(want, np.clip(0.5 + look.radius - to_dot, 0, 1))
        # Ten points of a dash stand for the line.
        assert np.abs(grey / 255 - want).max() < 0.1 * look.dash * look.contrast
        assert (grey[to_dot < look.radius - 0.5] == 255).all()


SMALL = dict(length=3, n_train=8, n_eval=4)


def test_a_task_of_pixels(tmp_path):
    task = pathfinder.pathfinder(**SMALL)
    assert task.kind == "labels" and task.labels.n_classes == 2 and task.vocab_size == 257
    batch = task.train_batch(0, 0, 5, 1030)
    assert batch.inputs.shape == (5, 1030)
    assert batch.inputs[:, :1024].min() >= 1 and not batch.inputs[:, 1024:].any()
    assert batch.inputs.max() == 256
    for _ in range(2):  # drawn, and read
        kept = pathfinder.pathfinder(**SMALL, cache_dir=str(tmp_path))
        again = kept.train_batch(0, 0, 5, 1030)
        np.testing.assert_array_equal(again.inputs, batch.inputs)
        np.testing.assert_array_equal(again.targets, batch.targets)
        del kept  # tasks that live share their images
    assert [path.name for path in tmp_path.iterdir()] == ["pathfinder32_3_0_train_0.npz"]
    # Fewer greys of the same images, from the same file.
    for levels in (2, 5):
        few = pathfinder.pathfinder(**SMALL, levels=levels, cache_dir=str(tmp_path))
        grey = batch.inputs[:, :1024] - 1
        want = np.floor(grey / 256 * levels) + 1
        np.testing.assert_array_equal(few.train_batch(0, 0, 5, 1024).inputs, want)
        assert want.max() == levels == few.vocab_size - 1
    with pytest.raises(ValueError, match="levels is 1: expected"):
        pathfinder.pathfinder(levels=1)


def test_several_lengths_are_taken_in_turn():
    """Those of one length are the images of that length, in their order, each of them once."""
    lengths, n = (3, 2, 3), 12
    mixed = pathfinder.pathfinder(length=lengths, n_train=n, n_eval=4)
    rows, classes, _ = next(mixed.eval_batches("test", 4, 1024, 1024))
    taken = {3: [0, 2, 3], 2: [1]}
    for length, places in taken.items():
        alone = pathfinder.pathfinder(length=length, n_train=n, n_eval=len(places))
        want = next(alone.eval_batches("test", len(places), 1024, 1024))
        np.testing.assert_array_equal(rows[places], want.inputs)
        np.testing.assert_array_equal(classes[places], want.targets)
    epoch = mixed.train_batch(0, 0, n, 1024).inputs
    assert len({row.tobytes() for row in epoch}) == n
    assert "length=3, 2, 3," in mixed.fingerprint("train")
    with pytest.raises(ValueError, match=r"length is \(\): give at least one"):
        pathfinder.pathfinder(length=())


def test_mirrored_and_turned_copies_follow_what_is_drawn():
    plain = pathfinder.pathfinder(**SMALL)
    task = pathfinder.pathfinder(**SMALL, mirrored=True)
    n = SMALL["n_train"]
    assert task.n_targets("train") == 8 * n and task.n_targets("valid") == plain.n_targets("valid")
    rows, classes, _ = task.train_batch(0, 0, 8 * n, 1024)  # an epoch from anywhere
    images = rows.reshape(-1, 32, 32)
    mine = {(image.tobytes(), int(c)) for image, c in zip(images, classes[:, 0], strict=True)}
    wanted = set()
    rows, classes, _ = plain.train_batch(0, 0, n, 1024)
    for image, c in zip(rows.reshape(-1, 32, 32), classes[:, 0], strict=True):
        copies = [np.rot90(image, k) for k in range(4)]
        copies += [copy[::-1] for copy in copies]
        wanted |= {(copy.tobytes(), int(c)) for copy in copies}
    assert mine == wanted and len(wanted) == 8 * n
    for one, other in zip(
        task.eval_batches("valid", 3, 1024, 1024),
        plain.eval_batches("valid", 3, 1024, 1024),
        strict=True,
    ):
        np.testing.assert_array_equal(one.inputs, other.inputs)


def test_a_curve_that_has_no_room_is_refused(monkeypatch):
    monkeypatch.setattr(pathfinder, "_DRAWS", 2)
    with pytest.raises(ValueError, match="length=60: hardly any image of 32 pixels has room"):
        pathfinder.drawn(np.random.default_rng(0), 4, 32, LOOKS[32], 60)
    with pytest.raises(ValueError, match="size is 33: expected one of 32, 64, 128"):
        pathfinder.pathfinder(33)
    with pytest.raises(ValueError, match="length=1024 must be at least 4096"):
        pathfinder.pathfinder(64).train_batch(0, 0, 1, 1024)
