"""Trax's checkpoints: into Trax's layers, into our models, and back; the same arrays and logits."""

import functools
import gzip
import importlib.util
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.convert import check, tables, trax_files, trax_models
from reformax.convert.spec import Op, Spec
from reformax.layers import LSHSelfAttention
from reformax.layers._trax import signature, tl, trax
from tests.helpers import assert_trees_equal

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="Trax's loop needs TensorFlow"
)
SIZES = dict(
    vocab_size=12, d_model=8, d_ff=10, d_attention_key=4, d_attention_value=6, n_heads=2, n_layers=2
)
CIRCLE = dict(count_once=False, wrap=True, self_score=-1e5)
LSH = Op("lsh", dict(chunk_len=4, n_hashes=3, n_buckets=4) | CIRCLE)
TABLE = dict(pos_type="axial", pos_axial_shape=(40,), pos_d_axial_embs=(8,))
AXIAL = dict(pos_type="axial", pos_axial_shape=(4, 8), pos_d_axial_embs=(3, 5))
REFORMERS = {
    "dense": Spec.make(
        "ReformerLM", [Op("dense", {}), Op("shared_qk", {})], **SIZES | TABLE, ff_activation="gelu"
    ),
    "lsh": Spec.make(
        "ReformerLM",
        [Op("local", dict(chunk_len=4)), LSH],
        **SIZES | AXIAL,
        ff_activation="relu",
    ),
    "sinusoidal": Spec.make(
        "ReformerLM",
        [
            Op(
                "local",
                dict(chunk_len=4, n_chunks_before=2, shared_qk=True, wrap=True, self_score=-1e5),
            )
        ],
        **SIZES,
        pos_type="sinusoidal",
    ),
    "factored": Spec.make(
        "ReformerLM",
        [Op("lsh", dict(chunk_len=8, n_hashes=2, n_buckets=(2, 4)) | CIRCLE)],
        **SIZES,
        pos_type="none",
        ff_activation="silu",
    ),
}
TRANSFORMER = Spec.make(
    "TransformerLM",
    [Op("dense", {})],
    **SIZES | TABLE | dict(d_attention_value=4, attention_bias=True, ff_activation="relu"),
)
SPECS = REFORMERS | {"transformer": TRANSFORMER}


def random_params(spec):
    model, rng = spec.build(), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (1, 8)))
    return jax.tree.map(lambda w: rng.normal(0, 0.3, w.shape).astype(np.float32), shapes)


def length_of(spec):
    shape = spec.arguments["pos_axial_shape"]
    return int(np.prod(shape)) if len(shape) > 1 else 16


def initialised(model, length, batch=1):
    """The model, initialised: Trax needs this before it loads a reversible model."""
    model.init(signature(np.zeros((batch, length), np.int32)))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_our_weights_in_traxs_own_model(name, tmp_path):
    """Trax loads the file by itself, its logits equal ours, and the weights come back."""
    spec, path = SPECS[name], tmp_path / "model.pkl.gz"
    params = random_params(spec)
    trax_models.write_params(path, spec, params, length_of(spec))
    model = initialised(trax_models.model_of(spec), length_of(spec))
    model.init_from_file(str(path))
    flat, _ = tl.flatten_weights_and_state(model.weights, model.state)
    want = tables.write(trax_models.table(spec), params)
    assert [w.tobytes() for w in map(np.asarray, flat)] == [w.tobytes() for w in want.values()]
    assert_trees_equal(trax_models.read_params(path, spec), params)
    assert trax_models.notes(spec) == []
    found = check.against_trax(spec, params, path)
    assert found.scale > 1 and found.difference < 1e-5, found


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(wrap=False), "lsh's wrap is False, expected True"),
        (dict(wrap=False, count_once=True), "lsh's count_once is True, expected False"),
        (dict(self_score=None), "lsh's self_score is None, expected -100000.0"),
        (dict(n_hashes_eval=8), "lsh's n_hashes_eval is 8, expected None"),
        (dict(scale_by_length=0.1), "lsh's scale_by_length is 0.1, expected None"),
    ],
)
def test_another_function_than_trax_s_is_refused(options, message):
    spec = REFORMERS["lsh"]
    other = spec._replace(attention=(spec.attention[0], Op("lsh", LSH.options | options)))
    with pytest.raises(ValueError, match=message):
        trax_models.table(other)


@pytest.mark.parametrize("reach", [dict(n_chunks_before=2), dict(n_chunks_after=1)], ids=str)
def test_chunks_around_the_circle_need_it(reach):
    spec = REFORMERS["sinusoidal"]
    other = spec._replace(attention=(Op("local", dict(chunk_len=4) | reach),))
    with pytest.raises(ValueError, match="local's wrap is False, expected True"):
        trax_models.table(other)


def test_other_rounding_and_padding_are_noted():
    spec = REFORMERS["lsh"]
    cycle = (spec.attention[0], Op("lsh", LSH.options | {"pad_chunks": 2}))
    arguments = spec.arguments | {"dtype": "bfloat16", "exact": True}
    found = trax_models.notes(spec._replace(attention=cycle, arguments=arguments))
    assert [note.split()[0] for note in found] == ["sublayers", "exact=True", "lsh.pad_chunks"]


def counting(length=16, batch=4):
    rng = np.random.default_rng(0)
    while True:
        start = rng.integers(11, size=(batch, 1))
        tokens = (1 + (start + np.arange(length)) % 11).astype(np.int32)
        yield tokens, tokens, np.ones(tokens.shape, np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A ReformerLM of Trax's layers, trained for a few steps by Trax's Loop, and its folder."""
    from trax import optimizers
    from trax.supervised import training

    spec = Spec.make("ReformerLM", [LSH], **SIZES | AXIAL | dict(n_layers=1), ff_activation="relu")
    folder = tmp_path_factory.mktemp("trained")
    length = length_of(spec)
    task = training.TrainTask(
        counting(length), tl.WeightedCategoryCrossEntropy(), optimizers.Adam(0.01)
    )
    loop = training.Loop(
        trax_models.model_of(spec, "train"),
        task,
        output_dir=str(folder),
        checkpoint_at=lambda step: step == 5,
    )
    loop.run(5)
    return spec, folder / "model.pkl.gz", loop


@pytest.mark.slow
@needs_tensorflow
def test_a_checkpoint_of_traxs_training_loop(trained, tmp_path):
    """Trax -> here -> Trax gives the identical arrays, and the logits agree."""
    spec, path, loop = trained
    saved = trax_files.read(path)
    assert saved.step == 5 and saved.input_signature == (signature(next(counting(32))[0]),)
    want, _ = tl.flatten_weights_and_state(loop.model.weights, loop.model.state)
    assert_trees_equal(saved.weights, [np.asarray(w) for w in want])
    params = trax_models.read_params(path, spec)
    trax_models.write_params(tmp_path / "back.pkl.gz", spec, params, length_of(spec))
    assert_trees_equal(trax_files.read(tmp_path / "back.pkl.gz").weights, saved.weights)
    model = initialised(trax_models.model_of(spec), length_of(spec))
    model.init_from_file(str(tmp_path / "back.pkl.gz"))
    flat, _ = tl.flatten_weights_and_state(model.weights, model.state)
    assert_trees_equal([np.asarray(w) for w in flat], saved.weights)
    assert check.against_trax(spec, params, path).difference < 1e-5


@pytest.mark.slow
@needs_tensorflow
@pytest.mark.parametrize(
    "layer",
    [tl.LSHSelfAttention, LSHSelfAttention],
    ids=["trax", "ours"],
)
def test_into_a_model_of_traxs_layers_or_of_ours(trained, layer, tmp_path):
    """Weights and state equal those of Trax's own `init_from_file`, and are written back."""
    _, path, _ = trained
    attention = functools.partial(layer, chunk_len=4, n_hashes=3, n_buckets=4)
    arguments = SIZES | AXIAL | dict(ff_activation=tl.Relu, mode="eval", dropout=0.1, n_layers=1)

    def fresh():
        return trax.models.ReformerLM(**arguments, attention_type=attention)

    ours, theirs = fresh(), initialised(fresh(), 32, batch=4)
    trax_files.load(ours, path)
    theirs.init_from_file(str(path))
    one, other = (tl.flatten_weights_and_state(m.weights, m.state) for m in (ours, theirs))
    assert_trees_equal(one, other)
    trax_files.save(ours, tmp_path / "back.pkl.gz", trax_files.read(path).input_signature)
    again = initialised(fresh(), 32, batch=4)
    again.init_from_file(str(tmp_path / "back.pkl.gz"))
    assert_trees_equal(again.weights, theirs.weights)
    assert_trees_equal(again.state, theirs.state)
    # For another batch the state is fresh.
    other = fresh()
    trax_files.load(other, path, signature(np.zeros((1, 32), np.int32)))
    assert_trees_equal(other.weights, theirs.weights)
    assert other(np.zeros((1, 32), np.int32)).shape == (1, 32, 12)


@pytest.mark.slow
def test_our_models_as_layers_of_trax(tmp_path):
    """Weights in a dict: saved by Trax and read here, and the other way around."""

    def net():
        net = tl.Serial(REFORMERS["lsh"].build(), tl.LogSoftmax())
        return initialised(net, 32)

    theirs, ours, again = net(), net(), net()
    assert np.abs(theirs.weights[0]["embedding"] - ours.weights[0]["embedding"]).max() > 0.1
    input_signature = signature(np.zeros((1, 32), np.int32))
    theirs.save_to_file(str(tmp_path / "theirs.pkl.gz"), input_signature=input_signature)
    trax_files.load(ours, tmp_path / "theirs.pkl.gz")
    assert_trees_equal(ours.weights, theirs.weights)
    trax_files.save(ours, tmp_path / "ours.pkl.gz", input_signature)
    again.init_from_file(str(tmp_path / "ours.pkl.gz"))
    assert_trees_equal(again.weights, theirs.weights)


def saved(tmp_path, spec, change=lambda content: None):
    path = tmp_path / "model.pkl.gz"
    params = random_params(spec)
    trax_models.write_params(path, spec, params, length_of(spec))
    with gzip.open(path) as file:
        content = pickle.load(file)
    change(content)
    with gzip.open(path, "wb") as file:
        pickle.dump(content, file)
    return path, params


def test_older_files(tmp_path):
    """Weights as a tree, and a table of positions with a batch axis."""
    spec = REFORMERS["dense"]

    def as_it_was(content):
        flat = content.pop("flat_weights")
        flat[1] = flat[1][None]
        content["weights"] = [(flat[0],), (), {"rest": tuple(flat[1:])}]

    path, params = saved(tmp_path, spec, as_it_was)
    assert_trees_equal(trax_models.read_params(path, spec), params)


def test_weights_in_bfloat16(tmp_path):
    """Trax's Loop writes their bits as integers into the second file."""
    spec = REFORMERS["dense"]
    path, params = saved(tmp_path, spec, lambda content: content.update(flat_weights=2))
    halves = [
        np.asarray(w).astype(jnp.bfloat16)
        for w in tables.write(trax_models.table(spec), params).values()
    ]
    with gzip.open(tmp_path / "model.weights.npy.gz", "wb") as file:
        for half in halves:
            np.save(file, half.view(np.uint16))
    read = trax_models.read_params(path, spec)
    want = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert_trees_equal(read, want)


def without_one(content):
    del content["flat_weights"][5]


def without_the_last(content):
    del content["flat_weights"][-1]


def with_one_more(content):
    content["flat_weights"].append(np.zeros((2, 3), np.float32))


def transposed(content):
    content["flat_weights"][11] = content["flat_weights"][11].T


WRONG = [
    (without_one, ("flat_weights[6]", "shape (2, 8, 6) there and shape (2, 8, 4) in the config")),
    (without_the_last, ("flat_weights[29]", "no such tensor there and shape (12,) in the config")),
    (with_one_more, ("flat_weights[30]", "shape (2, 3) there and no such tensor in the config")),
    (transposed, ("flat_weights[11]", "shape (10, 8) there and shape (8, 10) in the config")),
]


@pytest.mark.parametrize("change, expected", WRONG)
def test_weights_of_another_model(change, expected, tmp_path):
    """In one line that names the tensor and both shapes, for our model and for Trax's."""
    spec = REFORMERS["lsh"]
    path, _ = saved(tmp_path, spec, change)
    for read in (
        lambda: trax_models.read_params(path, spec),
        lambda: trax_files.load(trax_models.model_of(spec), path),
    ):
        with pytest.raises(ValueError) as raised:
            read()
        assert all(part in str(raised.value) for part in expected), raised.value
        assert "\n" not in str(raised.value)


def test_named_weights():
    model = trax_models.model_of(REFORMERS["lsh"])
    model.init(signature(np.zeros((1, 32), np.int32)))
    names = [name for name, _ in trax_files.named_weights(model)]
    assert len(set(names)) == len(names) == 30
    assert names[0].startswith("flat_weights[0] ") and "Embedding" in names[0]
    assert "SelfAttention" in names[5] and "LayerNorm" in names[3]


def test_hostile_and_damaged_files(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/marker",)

    spec = REFORMERS["dense"]
    path, _ = saved(tmp_path, spec, lambda content: content.update(history=Hostile()))
    (tmp_path / "marker").unlink(missing_ok=True)
    for read in (trax_files.read, lambda p: trax_files.load(trax_models.model_of(spec), p)):
        with pytest.raises(ValueError, match=r"is refused: it names \w+\.system") as raised:
            read(path)
        assert not (tmp_path / "marker").exists() and "\n" not in str(raised.value)
    path, _ = saved(tmp_path, spec)
    whole = path.read_bytes()
    for end in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="cut short|damaged|no checkpoint") as raised:
            trax_files.read(path)
        assert "\n" not in str(raised.value) and str(path) in str(raised.value)
    for content in ([1], {"weights": 3}, {"flat_weights": [1, "x"]}, {"flat_weights": 2}):
        path.write_bytes(gzip.compress(pickle.dumps(content)))
        with pytest.raises((ValueError, FileNotFoundError), match="no checkpoint|does not exist"):
            trax_files.read(path)


def test_a_file_of_weights_that_is_cut_short(tmp_path):
    path, _ = saved(tmp_path, REFORMERS["dense"], lambda content: content.update(flat_weights=2))
    second = tmp_path / "model.weights.npy.gz"
    with gzip.open(second, "wb") as file:
        np.save(file, np.ones(3))
        np.save(file, np.array([None]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"is damaged at flat_weights\[1\]"):
        trax_files.read(path)
    second.write_bytes(second.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged .*before the end-of-stream"):
        trax_files.read(path)


@pytest.mark.parametrize(
    "spec, message",
    [
        (dict(pos_type="rotary"), "pos_type is 'rotary', expected 'axial'"),
        (dict(pos_type="none", norm_epsilon=1e-12), "norm_epsilon is 1e-12, expected 1e-06"),
        (dict(pos_type="none", attention_bias=True), "attention_bias is True, expected False"),
        (dict(pos_type="none", n_slots=6), "n_slots is 6, expected None"),
        (dict(pos_type="none", n_kv_heads=1), "n_kv_heads is 1, expected None"),
        (dict(pos_type="alibi"), "pos_type is 'alibi', expected 'axial'"),
    ],
)
def test_a_model_that_trax_does_not_have(spec, message):
    with pytest.raises(ValueError, match="Trax has no such ReformerLM") as raised:
        trax_models.table(Spec.make("ReformerLM", [Op("dense", {})], **SIZES | spec))
    assert message in str(raised.value)


@pytest.mark.parametrize("options", [dict(soft_cap=3.0), dict(learned_sinks=True)])
def test_an_option_of_attention_that_trax_does_not_have(options):
    """Of learned sinks the weights would be left out."""
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"dense's {name} is {value}, expected"):
        trax_models.table(TRANSFORMER._replace(attention=(Op("dense", options),)))


def test_heads_that_do_not_divide_the_stream():
    """Trax's TransformerLM has heads of d_model / n_heads."""
    uneven = dict(n_heads=3, d_attention_key=2, d_attention_value=2)
    spec = TRANSFORMER._replace(arguments={**TRANSFORMER.arguments, **uneven})
    with pytest.raises(ValueError, match="d_model is 8, expected a multiple of n_heads, 3"):
        trax_models.table(spec)


@pytest.mark.parametrize(
    "name, length, message",
    [
        ("lsh", 8, "length is 8: expected 32, as pos_axial_shape is (4, 8)"),
        ("dense", 41, "length is 41: expected at most 40, the number of positions"),
        ("sinusoidal", 10, "length is 10: expected a multiple of chunk_len, 4"),
    ],
)
def test_a_length_that_trax_does_not_read(name, length, message, tmp_path):
    spec = REFORMERS[name]
    with pytest.raises(ValueError) as raised:
        trax_models.write_params(tmp_path / "a.pkl.gz", spec, random_params(spec), length)
    assert str(raised.value) == message and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "sizes, chunk_len, length",
    [
        (dict(pos_axial_shape=(64, 128), pos_d_axial_embs=(3, 5)), 64, 8192),
        (dict(pos_axial_shape=(100,), pos_d_axial_embs=(8,)), 64, 64),
        (dict(pos_type="none", pos_axial_shape=(), pos_d_axial_embs=()), 3000, 6000),
    ],
)
def test_the_length_of_a_file_is_one_that_trax_reads(sizes, chunk_len, length, tmp_path):
    """Whether or not it is compared with Trax's own model, which takes long at large ones."""
    cycle = [Op("local", dict(chunk_len=chunk_len))]
    spec = Spec.make("ReformerLM", cycle, **SIZES | AXIAL | sizes)
    assert trax_models.length_of(spec) == length
    trax_models.write_params(tmp_path / "a.pkl.gz", spec, random_params(spec), length)
    assert trax_files.read(tmp_path / "a.pkl.gz").input_signature.shape == (1, length)


def test_positions_that_chunks_do_not_divide():
    for shape in ((9, 10), (40,)):
        sizes = dict(pos_axial_shape=shape, pos_d_axial_embs=(8,) if len(shape) == 1 else (3, 5))
        cycle = [Op("local", dict(chunk_len=64))]
        with pytest.raises(ValueError, match="expected a multiple of chunks of 64"):
            trax_models.table(Spec.make("ReformerLM", cycle, **SIZES | AXIAL | sizes))
