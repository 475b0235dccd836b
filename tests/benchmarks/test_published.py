"""Published sizes of models."""

import pytest

from benchmarks import published


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("gpt2", (768, 12, 12, 32, 1024, 50_304, False)),
        ("gpt2_medium", (1024, 24, 16, 16, 1024, 50_304, False)),
        ("bert_large", (1024, 24, 16, 32, 512, 30_592, True)),
        ("bert_large_padded", (1024, 24, 16, 32, 512, 30_592, True, True, 0.1)),
    ],
)
def test_the_published_models_are_those_of_the_configs(name, sizes):
    job = published.from_config(name, ())
    assert job.shape == published.Shape(*sizes)
    assert job.model.attention_dropout == job.shape.dropout
    assert job.adamw.keys() == {"learning_rate", "b2", "weight_decay"}  # what PyTorch's reads
