"""Conversations, and prompts with answers, of which the answers alone are learnt."""

import datetime
import json
import re
import shutil
import tracemalloc

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

import evaluate
import generate
import train
from reformax.cli import config, parsed, prompts
from reformax.data import chat_templates, files
from reformax.data.chats import chats
from reformax.models.lm import TransformerLM
from reformax.training import loop
from reformax.training.by_position import in_segment
from reformax.training.evaluation import evaluate as evaluate_task
from tests.data.tables import tokenizer_json, write
from tests.layers import plain

SMALL = {"d_model": 16, "d_ff": 32, "n_heads": 2, "n_layers": 2}
SMALL |= {"d_attention_key": 8, "d_attention_value": 8, "dropout": 0.0}
END = "\0"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hï?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "No\n"},
    {"role": "user", "content": "Bye."},
]
# What is written, and whether it counts: by hand.
WRITTEN = [
    ("System:\nBe brief.\n\nUser:\nHï?\n\nAssistant:\n", 0),
    (f"Yes.{END}", 1),
    ("User:\nSure?\n\nAssistant:\n", 0),
    (f"No\n{END}", 1),
]


def filled(row, n=20):
    """As many rows, of which the first is in valid, the sixth in test and the third is the row."""
    other = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    return [other] * 2 + [row] + [other] * (n - 3)


def segments(batch):
    """The segments of a batch: (ids, the same where they count), in order."""
    found = []
    for row, ids, weights in zip(
        batch.targets, batch.inputs.segment_ids, batch.weights, strict=True
    ):
        assert not weights[ids == 0].any()
        for k in range(1, ids.max(initial=0) + 1):
            (inside,) = np.nonzero(ids == k)
            assert np.array_equal(inside, np.arange(inside[0], inside[-1] + 1))
            found.append((row[inside].tolist(), row[inside][weights[inside] == 1].tolist()))
        assert np.isin(weights, (0, 1)).all()
    return found


def text(ids):
    return bytes(ids).decode()


def conversations(task, split="train", length=512):
    """What a split has: (all that is written, what counts of it), as text."""
    found = []
    for batch in task.eval_batches(split, 4, length, length):
        found += [(text(ids), text(scored)) for ids, scored in segments(batch)]
    return found


def test_what_counts_is_the_answers_and_their_ends(tmp_path):
    task = chats(write(tmp_path / "a.jsonl", filled({"messages": CHAT})))
    whole, scored = "".join(x for x, _ in WRITTEN), "".join(x for x, counts in WRITTEN if counts)
    assert (whole, scored) in conversations(task)
    batch = task.train_batch(0, 0, 8, 256)
    places = [(row, text(row.tolist()).find(whole)) for row in batch.targets]
    (row, begin) = next((i, p) for i, (_, p) in enumerate(places) if p >= 0)
    begin = len(text(batch.targets[row].tolist())[:begin].encode())
    by_hand = np.concatenate([np.full(len(x.encode()), counts) for x, counts in WRITTEN])
    assert np.array_equal(batch.weights[row, begin : begin + len(by_hand)], by_hand)
    assert batch.inputs.tokens is batch.targets


USER, ANSWER = "User:\n{}\n\nAssistant:\n", "{}" + END
PAIR = (USER.format("Hi") + ANSWER.format("Yo"), ANSWER.format("Yo"))
ROWS = {
    "messages": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
    },
    "completion": {"prompt": "Hi", "completion": "Yo"},
    "answer": {"prompt": "Hi", "answer": "Yo", "id": 3},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Yo"},
    "dolly": {"instruction": "Hi", "context": "", "response": "Yo"},
    "question": {"question": "Hi", "answer": "Yo"},
    "trl": {
        "prompt": [{"role": "user", "content": "Hi"}],
        "completion": [{"role": "assistant", "content": "Yo"}],
    },
}


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "arrow", "csv"])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_layout_and_file(kind, ending, tmp_path):
    if ending == "csv" and not all(isinstance(x, str | int) for x in ROWS[kind].values()):
        pytest.skip("a cell is no list")
    task = chats(write(tmp_path / f"a.{ending}", [ROWS[kind]] * 12))
    assert conversations(task) == [PAIR] * 9
    assert conversations(task, "valid") == [PAIR] * 2 and conversations(task, "test") == [PAIR]


OTHERS = {
    "input": (
        {"instruction": "Add", "input": "1, 2", "output": "3"},
        "User:\nAdd\n\n1, 2\n\nAss",
        "3",
    ),
    "system": ({"system": "Be", "prompt": "Hi", "answer": "Yo"}, "System:\nBe\n\nUser:\nHi", "Yo"),
    "parts": (
        {
            "messages": [
                {"role": "human", "content": [{"type": "text", "text": "Hi"}]},
                ROWS["trl"]["completion"][0],
            ]
        },
        "User:\nHi\n\n",
        "Yo",
    ),
    "tool": (
        {"messages": [{"role": "tool", "content": "42"}, ROWS["trl"]["completion"][0]]},
        "Tool:\n42\n\nAssistant:\n",
        "Yo",
    ),
    "weight 0": (
        {
            "messages": [
                {"role": "assistant", "content": "A", "weight": 0},
                ROWS["trl"]["completion"][0],
            ]
        },
        f"Assistant:\nA{END}Assistant:\nYo",
        "Yo",
    ),
    "an answer in the prompt": (
        {
            "prompt": [{"role": "assistant", "content": "A"}],
            "completion": ROWS["trl"]["completion"],
        },
        f"Assistant:\nA{END}Assistant:\nYo",
        "Yo",
    ),
    "both": ({"prompt": "x", "completion": "y", **ROWS["messages"]}, "User:\nHi\n", "Yo"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_rows_have_besides(kind, tmp_path):
    row, begin, answer = OTHERS[kind]
    task = chats(write(tmp_path / "a.jsonl", [row] * 12))
    for whole, scored in conversations(task):
        assert whole.startswith(begin) and scored == answer + END


YO = ROWS["completion"]
BESIDE = {
    "messages": (ROWS["messages"] | {"context": 3, "input": [4]}, "Hi"),
    "a number": (YO | {"input": 3}, "Hi\n\n3"),
    "zero": (YO | {"context": 0}, "Hi\n\n0"),
    "a fraction": (YO | {"input": 0.5}, "Hi\n\n0.5"),
    "nothing": (YO | {"input": None, "context": "c"}, "Hi\n\nc"),
    "no number": (YO | {"input": float("nan")}, "Hi"),
    "lists": (ROWS["trl"] | {"context": 3}, "Hi"),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", BESIDE)
def test_values_beside_a_layout_are_text_or_unused(kind, ending, tmp_path):
    row, prompt = BESIDE[kind]
    task = chats(write(tmp_path / f"a.{ending}", [row] * 12))
    assert {whole for whole, _ in conversations(task)} == {PAIR[0].replace("Hi", prompt)}


def test_a_field_beside_that_is_no_text_is_named_with_the_option(tmp_path, fails_in_one_line):
    fix = "or name it otherwise, as chats.chats reads it too"
    path = write(tmp_path / "a.jsonl", [YO | {"input": [3]}] * 12)
    with fails_in_one_line(ValueError, f"line 1: input is list: expected text, {fix}"):
        chats(path)
    row = YO | {"input": datetime.date(2020, 1, 1)}
    path = write(tmp_path / "a.parquet", [row] * 12)
    with fails_in_one_line(ValueError, f"'input' is date32.*which is no value: save it .*{fix}"):
        chats(path)
    used = ROWS["messages"] | {"context": datetime.date(2020, 1, 1)}
    assert len(conversations(chats(write(path, [used] * 12)))) == 9


def test_turns_count_for_the_room_in_memory(tmp_path, monkeypatch, fails_in_one_line):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 250
    path = write(tmp_path / "a.jsonl", [{"messages": turns}] * 12)
    monkeypatch.setattr(files, "MAX_BYTES", 2**21)
    with fails_in_one_line(ValueError, r"has 2,\d+,\d+ bytes of text and turns in memory and half"):
        chats(path)
    tracemalloc.start()
    monkeypatch.setattr(files, "MAX_BYTES", 2**30)
    task = chats(path)
    task.n_targets("train")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * 500 * 500 * 1.5


def test_fields_by_other_names(tmp_path, fails_in_one_line):
    path = write(tmp_path / "a.jsonl", [{"q": "Hi", "a": "Yo", "chat": CHAT}] * 12)
    assert conversations(chats(path, prompt="q", answer="a")) == [PAIR] * 9
    assert len(conversations(chats(path, messages="chat"))) == 9
    with fails_in_one_line(ValueError, "has no rows with messages or .*: it has q, a, chat; name"):
        chats(path)
    with fails_in_one_line(
        ValueError, "has no rows with 'qq' and 'a': it has q, a, chat; name its"
    ):
        chats(path, prompt="qq", answer="a")
    with fails_in_one_line(
        ValueError, "messages is 'chat' and chats.chats.prompt or .answer is set"
    ):
        chats(path, messages="chat", prompt="q")


def message(**fields):
    return {"messages": [{"role": "user", "content": "?"}, fields]}


WRONG = {
    "role": (
        message(role="narrator", content="x"),
        r"messages\[1\] has role 'narrator': expected sys",
    ),
    "no role": (message(content="x"), r"messages\[1\] has no 'role' and no 'from'"),
    "no content": (message(role="assistant"), r"messages\[1\] has no 'content' and no 'value'"),
    "no text": (
        message(role="assistant", content=3),
        r"messages\[1\].content is int: expected text",
    ),
    "weight": (
        message(role="assistant", content="x", weight=0.5),
        r"messages\[1\] has weight 0.5: expected 0 or 1",
    ),
    "no object": ({"messages": ["x"]}, r"messages\[0\] is no object"),
    "no list": ({"messages": "x"}, "'messages' is no list"),
    "no field": ({"massages": []}, "has no value 'messages': it has massages"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_row_is_named_by_its_line(kind, tmp_path, fails_in_one_line):
    row, words = WRONG[kind]
    path = write(tmp_path / "a.jsonl", filled(row))  # lines have an empty one between them
    with fails_in_one_line(ValueError, f"{path} line 5:? {words}"):
        chats(path)
    if kind != "no field":
        path = write(tmp_path / "a.json", filled(row))
        with fails_in_one_line(ValueError, f"{path} element 3: {words}"):
            chats(path)


LEFT = {
    "an empty answer": message(role="assistant", content=" \n"),
    "no answer of an assistant": message(role="user", content="x"),
    "no messages": {"messages": None},
}


@pytest.mark.parametrize("reason", LEFT)
def test_rows_without_an_answer_are_left_out_and_counted(reason, tmp_path, fails_in_one_line):
    task = chats(write(tmp_path / "a.jsonl", filled(LEFT[reason])))
    assert f"left out: 1 rows of train ({reason})" in task.summary()
    assert "train 15 conversations with 15 answers (a.jsonl); valid 2" in task.summary()[0]
    with fails_in_one_line(
        ValueError, rf"no conversations to train on: left out: 2 .*\({reason}\)"
    ):
        chats(write(tmp_path / "b.jsonl", [LEFT[reason]] * 2))


def numbered(n):
    """Prompts and answers of several lengths."""
    return [
        {"prompt": f"{i} " + "x" * (i % 7), "answer": f"a{i}" + "y" * (i * 5 % 23)}
        for i in range(n)
    ]


def test_texts_in_lists_count_for_the_limit_of_a_table(tmp_path, monkeypatch):
    """One text many times is a few bytes of a file."""
    rows = [message(role="assistant", content="x" * 1000)] * 300
    path = write(tmp_path / "a.parquet", rows)
    assert path.stat().st_size < 10_000
    assert len(conversations(chats(path), length=2048)) == 240
    monkeypatch.setattr(files, "most_unpacked", lambda size: 100_000)
    with pytest.raises(ValueError, match="refused as a decompression bomb"):
        chats(path)


def test_values_in_lists_count_for_the_limit_of_a_table(tmp_path, monkeypatch):
    """A list of many small objects is a few bytes of a file, and much memory in Python."""
    values = pa.array([None] * 300_000, pa.bool_())
    objects = pa.StructArray.from_arrays([values, values], ["a", "b"])
    row = pa.ListArray.from_arrays(pa.array([0, len(objects)], pa.int32()), objects)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": row}), path)
    assert path.stat().st_size < 2000
    monkeypatch.setattr(files, "most_unpacked", lambda size: 2**24)
    tracemalloc.start()
    with pytest.raises(ValueError, match="refused as a decompression bomb"):
        chats(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


def test_own_splits_are_kept(tmp_path):
    folder = tmp_path / "data"
    rows = numbered(30)
    parts = {"train": rows[:20], "validation": rows[20:27], "test": rows[27:]}
    for name, part in parts.items():
        write(folder / f"{name}.jsonl", part)
    (folder / "notes.txt").write_text("no table")
    (folder / "README.md").write_text("a page")
    task = chats(folder)
    for split, part in zip(("train", "valid", "test"), parts.values(), strict=True):
        answers = sorted(x for _, x in conversations(task, split))
        assert answers == sorted(row["answer"] + END for row in part)
    said = "\n".join(task.summary())
    assert "train 20 conversations with 20 answers (train.jsonl); valid 7" in said
    assert "left out: README.md (next to tables" in said and "notes.txt (in no split)" in said
    cut = chats(folder, splits="cut", pattern="*.jsonl")
    assert [len(conversations(cut, split)) for split in ("train", "valid", "test")] == [24, 3, 3]


def test_packed_rows_hold_each_conversation_once_an_epoch(tmp_path):
    task = chats(write(tmp_path / "a.jsonl", numbered(100)))
    length = 128
    known = sorted(x for x, _ in conversations(task))
    batch = task.train_batch(3, 0, 1, length)
    rows, seen = 0, []
    while len(seen) < len(known):
        batch = task.train_batch(3, rows, 1, length)
        found = [text(ids) for ids, _ in segments(batch)]
        seen += found
        rows += 1
    assert sorted(seen) == known
    tokens = sum(len(x.encode()) for x in known)
    assert tokens / (rows * length) > 0.85
    again = [
        text(ids)
        for k in range(rows)
        for ids, _ in segments(task.train_batch(3, rows + k, 1, length))
    ]
    assert sorted(again) == known and again != seen  # in another order


def test_a_batch_is_a_function_of_seed_and_step_alone_and_rows_are_made_alone(tmp_path):
    path = write(tmp_path / "a.jsonl", numbered(60))
    task = chats(path)
    batches = [task.train_batch(5, step, 6, 128) for step in range(7)]  # through several epochs
    resumed = chats(path)
    for step in (6, 2):
        for one, other in zip(
            resumed.train_batch(5, step, 6, 128)[1:], batches[step][1:], strict=True
        ):
            assert np.array_equal(one, other)
    assert not np.array_equal(batches[0].targets, batches[1].targets)
    assert not np.array_equal(batches[0].targets, task.train_batch(6, 0, 6, 128).targets)
    for n_processes in (2, 3):
        for step, batch in enumerate(batches):
            for k in range(n_processes):
                rows = np.arange(6)[k::n_processes]
                own = task.train_rows(5, step, 6, 128, rows)
                assert np.array_equal(own.targets, batch.targets[rows])
                assert np.array_equal(own.weights, batch.weights[rows])
                assert np.array_equal(own.inputs.segment_ids, batch.inputs.segment_ids[rows])


def test_a_long_conversation_is_cut_or_left_out(tmp_path, caplog, fails_in_one_line):
    rows = numbered(20)
    rows[2] = {"prompt": "p" * 40, "answer": "z" * 300}  # its answer is cut
    rows[3] = {"prompt": "q" * 300, "answer": "z"}  # its answer lies behind
    path = write(tmp_path / "a.jsonl", rows)

    def prompts(task):
        found = [x for k in range(40) for x, _ in segments(task.train_batch(0, k, 1, 128))]
        return {text(ids)[6] for ids in found}, max(map(len, found))

    assert prompts(chats(path)) == ({"p", *"146789"}, 128)
    assert "2 of 16 training conversations are longer than length=128 tokens, up to" in caplog.text
    assert "1 are cut and 1, whose answers come later, are left out" in caplog.text
    found, longest = prompts(chats(path, too_long="left_out"))
    assert "p" not in found and longest < 128
    assert "they are left out" in caplog.text
    with fails_in_one_line(
        ValueError, "length=8 is too short for the 16 conversations of chats, of"
    ):
        chats(path).train_batch(0, 0, 1, 8)


@pytest.mark.parametrize(("length", "stride"), [(512, 512), (64, 64), (64, 16), (40, 1)])
def test_every_token_of_an_answer_is_scored_once_with_its_context(length, stride, tmp_path):
    rows = [*numbered(20), {"prompt": "p" * 30, "answer": "ab" * 90}, numbered(22)[21]]
    task = chats(write(tmp_path / "a.jsonl", rows))
    whole = conversations(task, "train", 512)
    counts, n_scored = {}, 0
    for batch in task.eval_batches("train", 3, length, stride):
        assert batch.targets.shape == (3, length)
        for ids, _ in segments(batch):
            assert any(text(ids) in one for one, _ in whole)
        for row, ids, weights in zip(
            batch.targets, batch.inputs.segment_ids, batch.weights, strict=True
        ):
            for place in np.flatnonzero(weights):
                (inside,) = np.nonzero(ids == ids[place])
                before = place - inside[0]
                part = bytes(row[inside].tolist())
                # A window that does not begin its conversation has a context of length - stride.
                assert part.startswith(b"User:") or before >= length - stride
                counts[row[place]] = counts.get(row[place], 0) + 1
        n_scored += int(batch.weights.sum())
    by_hand = "".join(scored for _, scored in whole).encode()
    assert n_scored == task.n_targets("train") == len(by_hand)
    assert counts == {byte: by_hand.count(byte) for byte in set(by_hand)}


# Vocabularies.


def tokenizer(folder, *special):
    """A byte-level tokenizer.json with these special tokens, as GPT-2's folder has it."""
    path = tokenizer_json(
        folder / "tokenizer.json", ["hello there, how are you"] * 9, *special, size=300
    )
    return folder, tokenizers.Tokenizer.from_file(str(path))


def in_pieces(folder, path, run, **options):
    task = chats(path, vocabulary=folder, **options)
    run.mkdir()
    task.vocabulary.keep_in(run, begun=False)
    return task


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TURNS = {
    "chatml": (
        CHATML,
        [
            ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHï?<|im_end|>\n", 0),
            ("<|im_start|>assistant\n", 0),
            ("Yes.<|im_end|>", 1),
            ("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n", 0),
            ("No\n<|im_end|>", 1),
        ],
    ),
    "nanochat": (
        ("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
        [
            ("<|bos|><|user_start|>Be brief.\n\nHï?<|user_end|><|assistant_start|>", 0),
            ("Yes.<|assistant_end|>", 1),
            ("<|user_start|>Sure?<|user_end|><|assistant_start|>", 0),
            ("No\n<|assistant_end|>", 1),
        ],
    ),
    "llama3": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        [
            (
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
                "Be brief.<|eot_id|>",
                0,
            ),
            ("<|start_header_id|>user<|end_header_id|>\n\nHï?<|eot_id|>", 0),
            ("<|start_header_id|>assistant<|end_header_id|>\n\n", 0),
            ("Yes.<|eot_id|>", 1),
            ("<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>", 0),
            ("<|start_header_id|>assistant<|end_header_id|>\n\n", 0),
            ("No\n<|eot_id|>", 1),
        ],
    ),
    "gemma": (
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        [
            ("<bos><start_of_turn>user\nBe brief.\n\nHï?<end_of_turn>\n<start_of_turn>model\n", 0),
            ("Yes.<end_of_turn>", 1),
            ("\n<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n", 0),
            ("No\n<end_of_turn>", 1),
        ],
    ),
    "text": (
        ("<|endoftext|>",),
        [(x.replace(END, "<|endoftext|>"), counts) for x, counts in WRITTEN],
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_the_template_of_a_vocabulary_is_that_of_its_own_tokens(name, tmp_path):
    special, parts = TURNS[name]
    folder, made = tokenizer(tmp_path / "gpt2", *special)
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}] * 12)
    task = in_pieces(folder, path, tmp_path / "run")
    ids, scored = segments(next(task.eval_batches("valid", 1, 300, 300)))[0]
    # Parts of one kind are encoded together.
    joined, before = [], None
    for part, counts in parts:
        joined = (
            [*joined[:-1], (joined[-1][0] + part, counts)]
            if counts == before
            else [*joined, (part, counts)]
        )
        before = counts
    encoded = [(made.encode(part).ids, counts) for part, counts in joined]
    assert ids == [i for part, _ in encoded for i in part]
    assert scored == [i for part, counts in encoded if counts for i in part]
    assert task.n_targets("valid") == 2 * len(scored)
    assert task.n_bytes("valid") == 2 * (len("Yes.") + 1 + len("No\n") + 1)
    said = "\n".join(task.summary())
    assert f"template {name}: a prompt is " in said
    plain = in_pieces(folder, path, tmp_path / "plain", template="plain")
    assert plain.fingerprint("train") != task.fingerprint("train")


def test_templates_that_do_not_fit(tmp_path, fails_in_one_line):
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}] * 12)
    with fails_in_one_line(
        ValueError, "template is 'chatml' and the vocabulary has no token '<|im_en"
    ):
        chats(path, template="chatml").n_targets("train")
    folder, _ = tokenizer(tmp_path / "without")
    with fails_in_one_line(ValueError, "has no id for the end of an answer, such as"):
        in_pieces(folder, path, tmp_path / "run").n_targets("train")
    folder, _ = tokenizer(tmp_path / "chatml", *CHATML)
    with fails_in_one_line(ValueError, "template is 'llama3' and the vocabulary has no token"):
        in_pieces(folder, path, tmp_path / "run2", template="llama3").n_targets("train")
    with fails_in_one_line(
        ValueError, "template has no user or no assistant: expected a text for user"
    ):
        chats(path, template={"assistant": "{content}"}).n_targets("train")
    with fails_in_one_line(ValueError, "template has 'user': 'no place': expected"):
        chats(path, template={"user": "no place", "assistant": "{content}"}).n_targets("train")
    for wrong in (["{content}"], 3, {"{content}": 1}):
        with fails_in_one_line(ValueError, "template has 'user': .*: expected a text for user"):
            chats(path, template={"user": wrong, "assistant": "{content}"})
    with fails_in_one_line(ValueError, "template has 1: '{content}': expected a text for user"):
        chats(path, template={1: "{content}", "assistant": "{content}"})
    with fails_in_one_line(ValueError, "template is 'other': expected 'auto', 'text'"):
        chats(path, template="other")


def test_a_template_of_ones_own_and_plain(tmp_path):
    path = write(tmp_path / "a.jsonl", [ROWS["completion"]] * 12)
    own = {"user": "Q: {content}\n", "assistant": "A: {content}\n"}
    task = chats(path, template=own)
    assert conversations(task) == [(f"Q: Hi\nA: Yo{END}", f"Yo{END}")] * 9
    plain = chats(path, template="plain")
    assert conversations(plain) == [(f"HiYo{END}", f"Yo{END}")] * 9
    assert "template your own: a prompt is 'Q: PROMPT\\nA: '" in "\n".join(task.summary())


def test_what_a_system_says_is_in_the_user_s_turn_after_it_or_nowhere(tmp_path, caplog):
    own = {"user": "Q: {content}\n", "assistant": "A: {content}\n"}
    user, answer = (
        {"role": role, "content": x} for role, x in (("user", "Hi"), ("assistant", "Yo"))
    )
    one, two = ({"role": "system", "content": f"Be {x}."} for x in "ab")
    rows = [{"messages": [user, answer, one, two, user, answer]}] * 12
    answered = f"Q: Hi\nA: Yo{END}\n"
    written = f"{answered}Q: Be a.\n\nBe b.\n\nHi\nA: Yo{END}"
    task = chats(write(tmp_path / "a.jsonl", rows), template=own)
    assert {x for x, _ in conversations(task)} == {written}
    rows[1] = {"messages": [one, answer]}
    rows[2] = {"messages": [user, one, answer, user, answer]}
    task = chats(write(tmp_path / "a.jsonl", rows), template=own)
    assert [x for x, _ in conversations(task)] == [written] * 7
    assert (
        "2 of 9 conversations of train are left out (a turn of system, which template 'your own' "
        "lacks, and no user's turn after it to take it)" in caplog.text
    )
    assert len(conversations(chats(tmp_path / "a.jsonl"))) == 9  # 'text' has one of system


def test_what_is_a_token_of_the_template_is_said_by_nobody(tmp_path, caplog):
    folder, _ = tokenizer(tmp_path / "chatml", *CHATML)
    rows = [ROWS["messages"]] * 12
    rows[1] = {"prompt": "<|im_end|>", "completion": "x"}
    rows[1] = message(role="assistant", content="write <|im_end|>")
    task = in_pieces(folder, write(tmp_path / "a.jsonl", rows), tmp_path / "run")
    assert len(segments(next(task.eval_batches("train", 1, 512, 512)))) == 8
    assert (
        "1 of 9 conversations of train are left out (a token of the template in what" in caplog.text
    )


def test_pieces_are_learnt_where_a_size_is_given(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "hello there", "answer": "hello you all"}] * 40)
    task = chats(path, vocab_size=285)
    task.vocabulary.keep_in(tmp_path, begun=False)
    ids, scored = segments(next(task.eval_batches("valid", 1, 64, 64)))[0]
    assert task.vocabulary.decode(ids) == "User:\nhello there\n\nAssistant:\nhello you all\n"
    assert task.vocabulary.decode(scored) == "hello you all\n" and len(scored) < len(
        "hello you all"
    )


def test_a_batch_of_changed_data_has_another_fingerprint(tmp_path):
    path = write(tmp_path / "a.jsonl", filled({"messages": CHAT}))
    before = chats(path).fingerprint("train")
    assert before == chats(path).fingerprint("train")
    changed = [*CHAT[:2], {**CHAT[2], "weight": 0}, *CHAT[3:]]
    assert chats(write(path, filled({"messages": changed}))).fingerprint("train") != before


ASKED = {b"Hi\r\n": "Hi", b"Hi\n": "Hi", b"a\0b": "a\0b", b"\xff": "\ufffd", b"a\n\n": "a\n"}


@pytest.mark.parametrize("typed", ASKED)
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_the_prompt_of_chat_is_that_of_training(kind, typed, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": ASKED[typed], "answer": "Yo"}] * 12)
    encoder = chat_templates.ByteEncoder()
    if kind == "pieces":
        folder, _ = tokenizer(tmp_path / "chatml", *CHATML)
        task = in_pieces(folder, path, tmp_path / "run")
        encoder = task.vocabulary
    else:
        task = chats(path)
    chat = chat_templates.chosen("auto", encoder, "chats.chats")
    ids, scored = segments(next(task.eval_batches("valid", 1, 99, 99)))[0]
    assert prompts.encode_message(chat, typed) == ids[: -len(scored)]


def test_a_prompt_that_training_leaves_out_is_refused(tmp_path, fails_in_one_line):
    folder, _ = tokenizer(tmp_path / "chatml", *CHATML)
    path = write(tmp_path / "a.jsonl", [ROWS["completion"]] * 12)
    encoder = in_pieces(folder, path, tmp_path / "run").vocabulary
    chat = chat_templates.chosen("auto", encoder, "chats.chats")
    with fails_in_one_line(ValueError, "prompt is 'a<.im_end.>': it has a token of the template"):
        prompts.encode_message(chat, b"a<|im_end|>")


def test_a_prompt_is_written_as_in_training():
    for template in chat_templates.TEMPLATES.values():
        ids = chat_templates.encoded(
            [tuple(chat_templates.Turn(*x) for x in (("user", "Hi"), ("assistant", "Yo", True)))],
            chat_templates.Written(template, chat_templates.ByteEncoder(), 0, []),
            np.uint8,
        ).ids
        assert bytes(ids) == template.prompt("Hi").encode() + b"Yo\0"


# Scores and runs.


def test_a_score_is_the_mean_of_the_answers_alone(tmp_path):
    """Bits are those of logits of each conversation alone, at tokens that are marked by hand."""
    rows = [{"messages": CHAT}] * 2
    for i in range(18):
        turns = (("user", f"Hi {i}?"), ("assistant", f"Yo {i}"))
        rows.append({"messages": [{"role": role, "content": x} for role, x in turns]})
    task = chats(write(tmp_path / "a.jsonl", rows))
    model = TransformerLM(vocab_size=256, **SMALL)
    params = plain.init(model, (2, 8))
    nats, n = 0.0, 0

    @jax.jit
    def log_p_of(ids):
        features = model.features(params, ids, rng=jax.random.PRNGKey(0))
        return jax.nn.log_softmax(model.logits(params, features))

    for whole, _ in conversations(task, "valid"):
        ids = np.frombuffer(whole.encode(), np.uint8).astype(np.int32)[None]
        behind = np.pad(ids, ((0, 0), (0, 128 - ids.shape[1])))
        losses = -np.asarray(log_p_of(behind), np.float64)[:, : ids.shape[1]]
        losses = np.take_along_axis(losses[0], ids[0][:, None], 1)[:, 0]
        place = 0
        for part in re.split(r"((?<=Assistant:\n)[^\0]*\0)", whole):
            end = place + len(part.encode())
            if part.endswith(END):
                nats, n = nats + losses[place:end].sum(), n + end - place
            place = end
    sizes = dict(batch_size=2, length=128)
    result = evaluate_task(model, params, task, "valid", **sizes)
    assert result["n_targets"] == n and result["standard_error"] is None
    assert result["bits_per_dim"] == pytest.approx(nats / n / np.log(2), rel=1e-5)
    assert result["bits_per_byte"] == result["bits_per_dim"]

    def altered(split, *sizes):
        for batch in task.eval_batches(split, *sizes):
            batch.weights[0, 3] = 1  # of a prompt
            yield batch

    with pytest.raises(
        ValueError, match=f"the batches of valid hold {n + 1} targets and the split"
    ):
        evaluate_task(model, params, task.replace(eval_batches=altered), "valid", **sizes)


@pytest.mark.slow
def test_a_run_learns_answers_and_no_prompts(tmp_path, call):
    """From a run of text to one of chats, by the commands that a user types."""
    (tmp_path / "mine.txt").write_text("red blue green " * 300)
    rows = [{"prompt": f"{i} red or blue?", "completion": "blue, red"} for i in range(60)]
    write(tmp_path / "chats.jsonl", rows)
    sizes = ("d_model=16", "d_ff=32", "d_head=8", "n_heads=2", "n_layers=2", "length=64")
    small = [f"--config={x}" for x in (*sizes, "batch_size=8", "warmup_steps=2")]

    def script(main, *flags):
        code, out, err = call(main, *flags)
        assert code == 0, err
        return out

    base, run = tmp_path / "base", tmp_path / "run"
    text_flags = ["--config_file=configs/transformer_text.gin", f"--data_dir={tmp_path}/mine.txt"]
    script(train.main, *text_flags, f"--output_dir={base}", *small, "--config=steps=4")
    flags = ["--config_file=configs/transformer_chats.gin", f"--data_dir={tmp_path}/chats.jsonl"]
    flags += [f"--output_dir={run}", f"--init_from={base}", *small, "--config=learning_rate=0.02"]
    out = script(train.main, *flags, "--config=steps=40", "--config=loop.train.eval_every=20")
    assert f"with the weights of {base} after step 4 from step 1 to 40" in out
    assert "train 48 conversations with 48 answers (chats.jsonl)" in out
    with open(run / "metrics.jsonl") as file:
        losses = [json.loads(line).get("bits_per_dim") for line in file]
    losses = [x for x in losses if x is not None]
    assert losses[-1] < 0.3 * losses[0]
    # The prompts' numbers are not learnt: as a text, a conversation costs more than its answer.
    out = script(evaluate.main, f"--output_dir={run}", "--split=test", "--by_position")
    assert "test: 60 targets, each predicted once from the tokens before it of its own" in out
    assert "in document" in out and "accuracy: 1.0" in out
    prompt = [f"--output_dir={run}", "--prompt=7 red or blue?", "--temperature=0", "--quiet"]
    assert script(generate.main, *prompt, "--chat", "--max_new_tokens=30") == "blue, red\n"
    two = [*prompt, "--prompt=8 red or blue?", "--chat", "--max_new_tokens=30"]
    assert script(generate.main, *two) == "--- 1 of 2\nblue, red\n--- 2 of 2\nblue, red\n"
    code, out, err = call(generate.main, *prompt, "--max_new_tokens=3")
    assert code == 0 and out.startswith("7 red or blue?")
    assert err == "note: this run was trained on chats: --chat answers a message\n"
    of_text = [f"--output_dir={base}", "--prompt=x", "--chat"]
    code, _, err = call(generate.main, *of_text)
    assert code == 2 and "--chat needs a run of chats.chats" in err


def test_a_run_s_vocabulary_comes_with_its_weights(tmp_path):
    kept = tmp_path / "base/vocabulary.model"
    (tmp_path / "base/checkpoints").mkdir(parents=True)
    folder, _ = tokenizer(tmp_path / "made", *CHATML)
    shutil.copy(folder / "tokenizer.json", kept)
    path = write(tmp_path / "a.jsonl", [ROWS["messages"]] * 12)
    files = ["configs/transformer_chats.gin"]

    def bound(init_from, *overrides):
        config.parse(files, overrides, data_dir=str(path), init_from=str(init_from))
        return parsed.described(loop.train, "task").arguments.get("vocabulary"), parsed.bindings(
            loop.train, ("init_from",)
        )["init_from"]

    for name in ("base", "base/checkpoints/10"):
        assert bound(tmp_path / name) == (str(kept), str(tmp_path / name))
    own = f"chats.chats.vocabulary='{folder}'"
    assert bound(tmp_path / "base", own)[0] == str(folder)
    kept.unlink()
    assert bound(tmp_path / "base")[0] is None
    files = ["configs/quickstart.gin"]
    path = None
    kept.write_text("{}")
    config.parse(files, init_from=str(tmp_path / "base"))  # a task without that parameter


def test_positions_of_packed_rows_begin_with_each_segment():
    ids = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3]])
    assert in_segment(ids).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
