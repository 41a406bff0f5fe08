"""TPU slices by either of their names, and what is said of names that do not exist."""

import pytest

from psearch_jax import topologies
from psearch_jax.errors import UserError
from psearch_jax.topologies import parse_slice


@pytest.mark.parametrize(
    ("text", "name", "topology", "chips"),
    [
        ("v5p:2x2x4", "v5p-32", "v5p:2x2x4", 16),
        ("v5p-32", "v5p-32", "v5p:2x2x4", 16),
        ("v5p:4x4x2", "v5p-64", "v5p:4x4x2", 32),
        ("v4-8", "v4-8", "v4:2x2x1", 4),
        ("v5e-16", "v5e-16", "v5e:4x4", 16),
        (" v6e:2x4 ", "v6e-8", "v6e:2x4", 8),
    ],
)
def test_slices_by_either_name(text, name, topology, chips):
    slice_ = parse_slice(text)
    assert (slice_.name, slice_.topology, slice_.chips) == (name, topology, chips)
    assert str(slice_) == f"{name} ({topology}, {chips} chips)"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("v9:2x2", "the chips are v4, v5e, v5p, v6e"),
        ("v5p", "write it as v5p:2x2x4"),
        ("v5e:4x4x4", "a v5e slice has 2 dimensions, as in v5e:4x4"),
        ("v5p:4x4", "a v5p slice has 3 dimensions, as in v5p:2x2x4"),
        ("v5e:0x4", "there is no topology"),
        ("v5e-17", "the sizes are v5e-4, v5e-8, v5e-16"),
        ("v5p-15", "the sizes are v5p-8, v5p-16, v5p-32"),
    ],
)
def test_topologies_that_do_not_exist(text, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_slice(text)


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'psearch_jax\[tpu\]'"):
        topologies.open_devices(parse_slice("v5e-16"))


def test_dimensions_of_a_group():
    assert topologies.link_dimensions([(0, 0, 0), (1, 0, 0), (0, 0, 3)]) == 2
    assert topologies.link_dimensions([(1, 1, 0)]) == 1
