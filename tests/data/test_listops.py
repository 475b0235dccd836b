"""Long ListOps: its lists are well formed and come to their labels."""

import numpy as np
import pytest

from reformax.data.listops import WORDS, listops, trees

OPERATIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def parse(words):
    """The value of a list, its depth and the most arguments of an operation, with a stack."""
    stack, depth, most = [], 0, 0
    for i, word in enumerate(words):
        if word in OPERATIONS:
            stack.append((word, []))
            depth = max(depth, len(stack))
            continue
        value = word
        if word == "]":
            name, values = stack.pop()
            assert len(values) >= 2
            most, value = max(most, len(values)), OPERATIONS[name](values)
        if not stack:
            assert i == len(words) - 1
            return value, depth, most
        stack[-1][1].append(int(value))
    raise AssertionError("a list has no end")


@pytest.mark.parametrize("bounds", [(5, 40, 4, 5), (1, 200, 6, 3), (500, 2000, 10, 10)])
def test_a_list_comes_to_its_label(bounds):
    found = trees(np.random.default_rng(1), 600, *bounds)
    shortest, longest, max_depth, max_args = bounds
    assert len(found.rows) == len(found.values) > 20
    seen = set()
    for row, value in zip(found.rows, found.values, strict=True):
        assert shortest < len(row) < longest
        words = [WORDS[i] for i in row]
        got, depth, most = parse(words)
        assert got == value and 1 <= depth < max_depth and most <= max_args
        seen |= {*words, most}
    assert {*WORDS[1:], max_args} <= seen


def test_the_shares_of_the_grammar():
    # Roots: a quarter are operations, of 2 to 4 arguments and of four kinds alike.
    found = trees(np.random.default_rng(2), 4000, 1, 10**6, 2, 4)
    n = len(found.rows)
    assert abs(n - 1000) < 5 * np.sqrt(4000 * 3 / 16)
    for counts in (
        np.bincount([row[0] - 11 for row in found.rows], minlength=4),
        np.bincount([len(row) - 4 for row in found.rows], minlength=3),
    ):
        share = n / len(counts)
        assert np.abs(counts - share).max() < 5 * np.sqrt(share)


SMALL = dict(min_length=5, max_length=30, max_depth=3, max_args=4, n_train=40, n_eval=7)


def test_an_example_is_a_function_of_its_number(tmp_path):
    task = listops(**SMALL)
    assert task.kind == "labels" and task.labels.n_classes == 10 and task.vocab_size == 16
    batches = list(task.eval_batches("valid", 3, 32, 32))
    assert [int(batch.weights.sum()) for batch in batches] == [3, 3, 1]
    again = next(listops(**SMALL).eval_batches("valid", 7, 32, 32))
    joined = np.concatenate([batch.inputs for batch in batches])
    np.testing.assert_array_equal(joined[:7], again.inputs)
    other = next(listops(**SMALL, data_seed=1).eval_batches("valid", 7, 32, 32))
    test = next(task.eval_batches("test", 7, 32, 32))
    for unlike in (other, test):
        assert (unlike.inputs != again.inputs).any(axis=1).all()
    for _ in range(2):  # drawn, and read
        kept = next(listops(**SMALL, cache_dir=str(tmp_path)).eval_batches("valid", 7, 32, 32))
        np.testing.assert_array_equal(kept.inputs, again.inputs)
        np.testing.assert_array_equal(kept.targets, again.targets)
    assert [path.name for path in tmp_path.iterdir()] == ["listops_5_30_3_4_0_valid_0.npz"]
    assert "data_seed=1" in listops(**SMALL, data_seed=1).fingerprint("train")


def write_published(folder, n=20):
    """Lists as Long Range Arena publishes them: each pair of words in parentheses."""
    lists = {}
    for split, name in (("train", "train"), ("valid", "val"), ("test", "test")):
        rows = [f"( ( ( [MAX {i % 10} ) {split == 'train':d} ) ] )" for i in range(n)]
        values = [max(i % 10, int(split == "train")) for i in range(n)]
        lines = ["Source\tTarget", *(f"{r}\t{v}" for r, v in zip(rows, values, strict=True))]
        (folder / f"basic_{name}.tsv").write_text("\n".join(lines) + "\n")
        lists[split] = values
    return lists


def test_published_lists_are_read(tmp_path, fails_in_one_line):
    lists = write_published(tmp_path)
    (tmp_path / "._basic_train.tsv").write_bytes(b"\0\5\x16\7")  # what macOS writes
    task = listops(data_dir=str(tmp_path))
    for split, values in lists.items():
        batch = next(task.eval_batches(split, 20, 2048, 2048))
        assert batch.targets[:, 0].tolist() == values and task.n_targets(split) == 20
        words = [[WORDS[i] for i in row if i] for row in batch.inputs]
        assert words[3] == ["[MAX", "3", str(int(split == "train")), "]"]
    drawn = task.train_batch(0, 0, 9, 2048)
    assert set(drawn.targets[:, 0]) <= set(lists["train"]) and drawn.inputs[:, 4:].max() == 0
    assert task.fingerprint("train") != task.fingerprint("test") != listops().fingerprint("test")
    sizes = "train 20 lists (basic_train.tsv); valid 20 lists (basic_val.tsv); test 20 lists (bas"
    assert sizes in task.summary()[0]
    few = listops(data_dir=str(tmp_path), n_train=5, n_eval=4)
    assert [few.n_targets(split) for split in lists] == [5, 4, 4]
    assert not list(tmp_path.glob("*.npz"))
    (tmp_path / "basic_val.tsv").write_text("Source\tTarget\n" + "1 " * 2000 + "\t1\n")
    with fails_in_one_line(ValueError, "row 2 has 2,000 tokens: set listops.listops.max_length to"):
        listops(data_dir=str(tmp_path)).n_targets("valid")


@pytest.mark.parametrize(
    "line, words",
    [
        ("[MAX 1 ]", "row 2: expected a list and its digit, with a tab"),
        ("[MAX 1 ]\t12", "row 2: expected a list and its digit"),
        ("[AVG 1 ]\t1", r"row 2 has '\[AVG', which is no word of a list"),
    ],
)
def test_what_is_no_published_list_is_told(line, words, tmp_path, fails_in_one_line):
    (tmp_path / "basic_train.tsv").write_text(f"Source\tTarget\n{line}\n")
    task = listops(data_dir=str(tmp_path))
    with fails_in_one_line(ValueError, words):
        task.n_targets("train")
    with fails_in_one_line(FileNotFoundError, "has none: expected one .tsv of each split.*cache_d"):
        task.n_targets("valid")


def test_settings_of_drawn_lists_are_refused_with_read_ones(tmp_path, fails_in_one_line):
    for name, value in (("min_length", 5), ("max_depth", 3), ("data_seed", 1)):
        with fails_in_one_line(ValueError, f"{name} is {value}: lists of data_dir are read, not d"):
            listops(data_dir=str(tmp_path), **{name: value})
    with fails_in_one_line(ValueError, "cache_dir is '.*': lists of data_dir are read"):
        listops(data_dir=str(tmp_path), cache_dir=str(tmp_path))


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match="expected a difference of 2 or more"):
        listops(min_length=10, max_length=11)
    with pytest.raises(ValueError, match="set max_depth or max_args higher, or other lengths"):
        listops(50, 60, max_depth=2, max_args=3).train_batch(0, 0, 1, 64)
