"""Images as bytes: pixels and splits, tiles, a PNG of what is generated, clear refusals."""

import numpy as np
import pytest
from PIL import Image

from reformax.cli import generate, pictures, train
from reformax.data.images import images

N = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty images of one colour each, in two folders, wide and high."""
    path = tmp_path_factory.mktemp("images")
    (path / "more").mkdir()
    for i in range(N):
        name = f"{i:02}.png" if i < 10 else f"more/{i:02}.png"
        Image.new("RGB", (9, 6) if i % 2 else (6, 9), (i, 100 + i, 200 + i)).save(path / name)
    (path / "notes.txt").write_text("no image")
    return path


def test_every_tenth_image_is_held_out(folder):
    task = images(folder, side=2)
    assert (task.kind, task.vocab_size) == ("text", 256)
    found = {}
    for split in ("train", "valid", "test"):
        batches = list(task.eval_batches(split, 3, 12, 12))
        rows = np.concatenate([batch.inputs[batch.weights[:, 0] > 0] for batch in batches])
        assert rows.size == task.n_targets(split) == sum(batch.weights.sum() for batch in batches)
        np.testing.assert_array_equal(rows, np.tile(rows[:, :3], 4))  # one colour
        found[split] = sorted(rows[:, 0].tolist())
    held_out = {"valid": [8, 18], "test": [9, 19]}
    train = [i for i in range(N) if i % 10 < 8]
    assert found == {"train": train} | held_out
    assert task.fingerprint("valid") != task.fingerprint("test")


def colours(task, split):
    """The first colour of each image."""
    return [int(row[0]) for batch in task.eval_batches(split, 1, 12, 12) for row in batch.inputs]


@pytest.mark.parametrize(
    "names", ["train/{}.png,val/{}.png,test/{}.png", "a/train-{}.png,a/test-{}.png"]
)
def test_a_folder_s_own_splits_are_kept(names, tmp_path):
    names = names.split(",")
    own = ["train", "valid", "test"] if len(names) == 3 else ["train", "test"]
    for number, name in enumerate(names):
        for i in range(10):
            path = tmp_path / name.format(i)
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (4, 4), (100 * number + i, 0, 0)).save(path)
    task = images(tmp_path, side=2)
    found = {split: colours(task, split) for split in ("train", "valid", "test")}
    want = {split: [100 * number + i for i in range(10)] for number, split in enumerate(own)}
    if "valid" not in own:
        want |= {"train": [0, 1, 2, 3, 4, 5, 6, 7, 9], "valid": [8]}
    assert found == want
    assert "valid 1 images, cut from train" in task.summary()[0] or len(own) == 3
    assert sorted(sum(found.values(), [])) == sorted(
        sum((colours(images(tmp_path, side=2, splits="cut"), split) for split in found), [])
    )


def test_files_that_are_no_images_are_left_out_and_said(folder, tmp_path):
    for path in folder.glob("*.png"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "._00.png").write_bytes(b"\0\5\x16\7" + bytes(60))  # what macOS writes
    (tmp_path / ".thumbs").mkdir()
    (tmp_path / ".thumbs/a.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no image")
    task = images(tmp_path, side=2)
    assert task.n_targets("train") == 8 * 12
    first, *rest = task.summary()
    assert first == (
        f"{tmp_path}: train 8 images; valid 1 images, cut from train; test 1 images, cut from train"
    )
    assert rest == [
        "left out: ._00.png, .thumbs/ (hidden)",
        "left out: notes.txt (no image)",
    ]
    (tmp_path / "x").mkdir()
    (tmp_path / "x/test.png").write_bytes((tmp_path / "00.png").read_bytes())
    with pytest.raises(ValueError, match=r"has test.png and no train next to it.*images.images"):
        images(tmp_path / "x", side=2)


def test_training_draws_by_seed_and_step(folder):
    task = images(folder, side=2)
    first, second = (task.train_batch(3, step, 8, 12) for step in (1, 2))
    assert set(np.unique(first.inputs[:, 0])) <= {i for i in range(N) if i % 10 < 8}
    np.testing.assert_array_equal(first.inputs, task.train_batch(3, 1, 8, 12).inputs)
    assert (first.inputs != second.inputs).any() and (first.weights == 1).all()
    rows = np.array([5, 2])
    np.testing.assert_array_equal(task.train_rows(3, 1, 8, 12, rows).inputs, first.inputs[rows])


def test_pixels_lie_row_by_row_and_tiles_are_the_squares_of_a_file(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (7, 11, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    task = images(tmp_path, side=2, tiles=True)
    tiles = [pixels[y : y + 2, x : x + 2].ravel() for y in (0, 2, 4) for x in (0, 2, 4, 6, 8)]
    found = [next(task.eval_batches(s, 15, 12, 12)).inputs for s in ("train", "valid", "test")]
    np.testing.assert_array_equal(found[0][:13], np.stack(tiles[:8] + tiles[10:]))
    np.testing.assert_array_equal([found[1][0], found[2][0]], tiles[8:10])
    # A whole file is the mean of the pixels of its middle square.
    for i in range(10):
        Image.fromarray(pixels[:4, :9]).save(tmp_path / f"part{i}.png")
    part = next(images(tmp_path, side=2, pattern="part*").eval_batches("valid", 1, 12, 12))
    square = pixels[:4, 2:6].reshape(2, 2, 2, 2, 3).mean(axis=(1, 3))
    assert np.abs(part.inputs[0] - square.ravel()).max() <= 1  # it rounds twice


def test_the_photographs_that_come_along():
    task = images(side=64)
    batch = task.train_batch(0, 0, 2, 64 * 64 * 3)
    assert batch.inputs.shape == (2, 12_288) and batch.inputs.std() > 10


def test_rows_of_bytes_become_a_sheet(tmp_path):
    rows = np.random.default_rng(0).integers(0, 256, (3, 12))
    pictures.write(rows, tmp_path / "it.png")
    found = np.asarray(Image.open(tmp_path / "it.png"))
    want = rows.reshape(3, 2, 2, 3)
    assert found.shape == (4, 4, 3) and not found[2:, 2:].any()
    for i, (y, x) in enumerate([(0, 0), (0, 2), (2, 0)]):
        np.testing.assert_array_equal(found[y : y + 2, x : x + 2], want[i])


@pytest.mark.slow
def test_a_run_is_trained_and_draws(folder, tmp_path, call):
    run, sizes = tmp_path / "run", dict(d_model=8, d_ff=8, d_head=4, n_heads=2, n_layers=2)
    sizes |= {"length": 12, "batch_size": 2, "steps": 2, "warmup_steps": 1, "images.images.side": 2}
    sizes |= {"lm.ReformerLM.pos_axial_shape": (2, 2, 3)}
    sizes |= {"lm.ReformerLM.pos_d_axial_embs": (4, 2, 2)}
    flags = [f"--config={name}={value}" for name, value in sizes.items()]
    flags += [f"--output_dir={run}", f"--data_dir={folder}"]
    code, out, err = call(train.main, "--config_file=images.gin", *flags)
    assert code == 0 and "bits/dim" in err, out
    flags = [f"--output_dir={run}", f"--png={tmp_path / 'it.png'}"]
    code, _, err = call(generate.main, *flags, "--prompt=abcdef", "--num_samples=2")
    assert code == 0, err
    found = np.asarray(Image.open(tmp_path / "it.png"))
    assert found.shape == (2, 4, 3)
    for x in (0, 2):  # two pixels are given
        np.testing.assert_array_equal(found[0, x : x + 2].ravel(), list(b"abcdef"))
    for more, message in (
        ("--prompt=abcdefabcdef", "the longest prompt has 12 bytes: with --png"),
        ("--max_new_tokens=3", "max_new_tokens is 3"),
        ("--config=loop.train.length=13", "this one's length is 13: expected 3 bytes a pixel"),
    ):
        code, _, err = call(generate.main, *flags, more)
        assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda path: images(path / "none"), "none does not exist"),
        (lambda path: images(path / "00.png"), "must be a folder with images"),
        (lambda path: images(path, pattern="*.gif"), r"holds no .png, .jpg, .jpeg of '\*.gif'"),
        (lambda path: images(path, side=0), "side is 0: expected"),
        (lambda path: images(path, pattern="0*").n_targets("dev"), "split='dev' must be one of"),
        (
            lambda path: images(path, pattern="1*").train_batch(0, 0, 1, 12),
            "length=12 must be 12288, the bytes of an image",
        ),
        (
            lambda path: images(path, side=2).eval_batches("valid", 1, 12, 6),
            "stride=6 must be 12, the bytes of an image",
        ),
        (lambda path: images(path, 4, tiles=True, pattern="00*").n_targets("test"), "too few"),
    ],
)
def test_what_does_not_fit_is_refused(call, message, folder, fails_in_one_line):
    with fails_in_one_line(ValueError, message):
        call(folder)


def test_a_damaged_file_is_named(folder, tmp_path, fails_in_one_line):
    whole = (folder / "00.png").read_bytes()
    for name, data in (
        ("cut.png", whole[: len(whole) // 2]),
        ("text.jpg", b"no image"),
        ("none.png", b""),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        with fails_in_one_line(ValueError, f"{name} is no image or damaged"):
            images(tmp_path, pattern=name).n_targets("train")
