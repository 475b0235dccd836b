"""Who sees whom: one rule, whose bounds are those of its mask, and no second copy of it."""

import ast
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reformax.ops
from reformax.ops.masking.visibility import Side, Visibility, all_of, is_token

OPS = Path(reformax.ops.__file__).parent
RULES = [
    Visibility(causal, window, dilation, exclude_self)
    for causal, window, dilation, exclude_self in itertools.product(
        (False, True), (None, 1, 3), (1, 2), (False, True)
    )
]
LENGTH = 12


def expected(rule: Visibility, query: int, key: int) -> bool:
    """The definition, in words of one pair."""
    if rule.causal and key > query or rule.exclude_self and key == query:
        return False
    if (query - key) % rule.dilation:
        return False
    return rule.window is None or abs(query - key) // rule.dilation < rule.window


def table(rule: Visibility) -> np.ndarray:
    return np.array([[expected(rule, q, k) for k in range(LENGTH)] for q in range(LENGTH)])


def sides(**of_keys) -> tuple[Side, Side]:
    position = jnp.arange(LENGTH)
    return Side(position[:, None]), Side(position[None], **of_keys)


def shown(rule: Visibility, q: Side, k: Side) -> np.ndarray:
    return np.asarray(all_of(jnp.ones((LENGTH, LENGTH), bool), rule.sees(q, k)))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rule_shows_its_table(rule):
    np.testing.assert_array_equal(shown(rule, *sides()), table(rule))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_segments_and_keys_that_do_not_exist_hide_what_else_is_shown(rule):
    ids = np.repeat([2, 0, 1], [4, 3, 5])
    exists = np.arange(LENGTH) % 5 != 3
    q, k = sides(segment_id=ids[None], exists=exists[None])
    q = q._replace(segment_id=ids[:, None], exists=exists[:, None])
    one_segment = (ids[:, None] == ids) & (ids > 0) & exists & exists[:, None]
    np.testing.assert_array_equal(shown(rule, q, k), table(rule) & one_segment)


@pytest.mark.parametrize("exclude_self", [False, True])
def test_a_summary_is_seen_behind_its_last_position(exclude_self):
    rule, last = Visibility(causal=True, exclude_self=exclude_self), np.arange(LENGTH) + 2
    q, k = sides(last=last[None])
    seen = np.arange(LENGTH)[:, None] - exclude_self >= last
    np.testing.assert_array_equal(shown(rule, q, k), seen)


def test_a_rule_that_hides_nothing_costs_nothing():
    assert Visibility().sees(*sides()) is None
    assert all_of(None, None) is None


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_bounds_are_those_of_the_mask(rule, of_keys):
    """No position beyond them is seen, none within the whole ones is hidden, and they are tight."""
    mask = table(rule).T if of_keys else table(rule)
    without_self = table(rule.__class__(rule.causal, rule.window, rule.dilation))
    for first, end in itertools.combinations(range(LENGTH + 1), 2):
        bounds = rule.bounds(first, end, of_keys)
        low, high, whole_low, whole_high = (
            default if x is None else int(np.clip(x, 0, LENGTH))
            for x, default in zip(bounds, (0, LENGTH, 0, LENGTH), strict=True)
        )
        tile = mask[first:end]
        assert not tile[:, :low].any() and not tile[:, high:].any()
        plain = (without_self.T if of_keys else without_self)[first:end]
        assert plain[:, whole_low:whole_high].all()
        if rule.dilation == 1:
            seen, whole = plain.any(axis=0), plain.all(axis=0)
            assert seen.sum() == high - low
            assert whole.sum() == max(whole_high - whole_low, 0)


def test_a_rule_is_static():
    traced = functools.partial(jax.jit, static_argnums=0)(lambda rule, q, k: rule.sees(q, k))
    np.testing.assert_array_equal(traced(Visibility(True), *sides()), table(Visibility(True)))
    assert hash(Visibility(True)) == hash(Visibility(causal=True))


def test_padding_is_what_is_0_or_false():
    np.testing.assert_array_equal(is_token(np.array([0, 3, -1])), [False, True, True])
    np.testing.assert_array_equal(is_token(np.array([False, True])), [False, True])


# No second copy.

# Names of positions, or of blocks and hashes of positions, and names of segment ids.
POSITION = re.compile(
    r"^(?!n_)(.*_)?(position|query|queries|key|keys|newest|held|ring|last|global)s?$"
)
SEGMENT = re.compile(r"(^|_)(ids|segment|segment_ids?)$")
# What is compared outside of the room, and why.
ALLOWED = {
    # Patterns of blocks are what an op chose.
    ("block_patterns.py", "query // stride == key // stride"),
    ("block_patterns.py", "key >= query - n_before"),
    ("block_patterns.py", "key <= query + n_after"),
    # Hash codes and similarities, not positions.
    ("asymmetric_lsh.py", "of_queries <= of_query"),
    ("smyrf.py", "of_query <= newest"),
    ("routing.py", "queries >= of_query"),
    # A search in an order by group, then position.
    ("hashing/sorted_groups.py", "take_last(x.position, slot) <= position"),
    # Which of the global tokens is the newest position: its row of a cache is written.
    ("decoding/band.py", "of_global == position[:, None]"),
    # The chunks that an op chose; positions held from the first of them on exist.
    ("decoding/ring.py", "in_ring >= jnp.maximum(self._first_key(newest), 0)"),
    # Whether ids fit in int32.
    ("calls/arguments.py", "ids.astype(np.int32) != ids"),
}


def names_in(node: ast.expr) -> set[str]:
    """The names that an operand's value is made of, without lengths and indices."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return set() if name in ("shape", "size", "dtype", "ndim") else {name}
        case ast.Subscript(value=value) | ast.UnaryOp(operand=value):
            return names_in(value)
        case ast.BinOp(left=left, right=right):
            return names_in(left) | names_in(right)
        case ast.Call(func=ast.Name(id="len")):
            return set()
        case ast.Call(func=ast.Name(id="arange_last") | ast.Attribute(attr="arange")):
            return {"position"}
        case ast.Call(func=ast.Attribute(value=value, attr="astype" | "reshape")):
            return names_in(value)
        case ast.Call(args=args):
            return set().union(*map(names_in, args))
    return set()


def comparisons(source: str) -> list[str]:
    """The comparisons of two positions, and those of segment ids, in a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            operands = [names_in(x) for x in (node.left, *node.comparators)]
            of_positions = all(any(map(POSITION.search, names)) for names in operands)
            if of_positions or any(map(SEGMENT.search, set().union(*operands))):
                found.append(ast.unparse(node))
    return found


def test_comparisons_are_found():
    source = """
mask = (key.position <= query.position) & (ids[:, None] == k.ids) & (of_key != 0)
mask &= position < length
mask &= jnp.arange(n)[None] <= position[:, None]
mask &= segment_ids > 0 if segment_ids is not None else len(segment_ids) == 2
"""
    assert set(comparisons(source)) == {
        "key.position <= query.position",
        "ids[:, None] == k.ids",
        "jnp.arange(n)[None] <= position[:, None]",
        "segment_ids > 0",
    }


def test_positions_and_segment_ids_are_compared_in_one_place():
    files = [p for p in OPS.rglob("*.py") if "masking" not in p.relative_to(OPS).parts]
    found = {
        (p.relative_to(OPS).as_posix(), text) for p in files for text in comparisons(p.read_text())
    }
    assert found - ALLOWED == set(), "ask reformax.ops.masking.visibility instead"
    assert ALLOWED - found == set(), "allowed, but not there"
