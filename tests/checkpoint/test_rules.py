"""Rules map names forwards and backwards, and refuse what can't be read backwards."""

import numpy as np
import pytest

from eqzoo.checkpoint import BATCH_NORM, SAME, SPLIT, TRANSPOSE, TRANSPOSE_SPLIT, Rule, flattened, prefixed, staged

CASES = [
    (Rule(r"fc\.(weight|bias)", "head.{0}"), "fc.bias", ("head.bias",)),
    (
        Rule(r"layer(\d)\.0\.conv(\d)\.weight", "stages.{0-1}.convs.{1-1}.weight"),
        "layer4.0.conv2.weight",
        ("stages.3.convs.1.weight",),
    ),
    (Rule(r"h\.(\d+)\.(weight|bias)", "blocks[{0}].{1}"), "h.11.weight", ("blocks[11].weight",)),
    (Rule(r"up(\d+)\.w", "blocks[{0+2}].w"), "up3.w", ("blocks[5].w",)),
    (Rule(r"block1-(\d+)\.w", "x.{0}"), "block1-7.w", ("x.7",)),
    (Rule(r"a(\d)\.b(\d)", "x.{1}.y.{0}.z.{1}"), "a1.b2", ("x.2.y.1.z.2",)),
    (Rule(r"h\.(\d+)\.up", "blocks[{0}].experts[*].up.weight"), "h.11.up", ("blocks[11].experts[*].up.weight",)),
    (Rule(r"qkv\.(weight|bias)", ("q.{0}", "k.{0}", "v.{0}"), SPLIT), "qkv.bias", ("q.bias", "k.bias", "v.bias")),
]


@pytest.mark.parametrize(("rule", "source", "leaves"), CASES)
def test_a_rule_reads_both_ways(rule, source, leaves):
    assert rule.leaves_of(source) == leaves
    assert [rule.source_of(leaf) for leaf in leaves] == [source] * len(leaves)


def test_a_rule_is_not_for_other_names():
    rule = Rule(r"fc\.(weight|bias)", "head.{0}")
    assert rule.leaves_of("fc.weight.more") is None
    assert rule.leaves_of("xfc.weight") is None
    assert rule.leaves_of("fcxweight") is None
    assert rule.source_of("head.scale") is None
    assert rule.source_of("headxweight") is None


def test_a_rule_gives_no_name_that_it_would_not_take():
    rule = Rule(r"layer(\d)\.weight", "stages.{0-1}.weight")
    assert rule.source_of("stages.8.weight") == "layer9.weight"
    assert rule.source_of("stages.9.weight") is None


def test_a_repeated_group_must_agree_with_itself():
    rule = Rule(r"a(\d)", "x.{0}.y.{0}")
    assert rule.source_of("x.1.y.1") == "a1"
    assert rule.source_of("x.1.y.2") is None


@pytest.mark.parametrize("source", [r"a.b", r"a\d+", r"a(b)?", r".*\.weight", r"a|b", "a[0]"])
def test_a_source_that_can_not_be_read_backwards_is_refused(source):
    with pytest.raises(ValueError, match="can't be read backwards"):
        Rule(source, "x")


def test_a_target_can_only_use_groups_there_are():
    with pytest.raises(ValueError, match="uses group 1, of 1 groups"):
        Rule(r"a\.(\d)", "x.{1}")


def test_prefixed_moves_the_groups_of_a_part_behind_those_of_its_place():
    rules = prefixed(r"layer(\d)\.(\d+)\.bn\.", "stages.{0-1}.rest[{1-1}].norm.", BATCH_NORM)
    found = [rule.leaves_of("layer2.3.bn.running_var") for rule in rules]
    assert found == [None, ("stages.1.rest[2].norm.running.var",), None]
    assert rules[1].source_of("stages.1.rest[2].norm.running.var") == "layer2.3.bn.running_var"
    assert [rule.optional for rule in rules] == [False, False, True]


@pytest.mark.parametrize("start", [0, 1])
def test_the_first_block_of_a_stage_has_upstreams_first_number(start):
    first, rest = staged(r"s(\d)\.b", "stages.{0-1}.", [Rule(r"conv\.weight", "conv.weight")], start=start)
    assert first.leaves_of(f"s2.b{start}.conv.weight") == ("stages.1.first.conv.weight",)
    assert rest.leaves_of(f"s2.b{start + 3}.conv.weight") == ("stages.1.rest[2].conv.weight",)
    assert rest.source_of("stages.1.rest[0].conv.weight") == f"s2.b{start + 1}.conv.weight"
    assert rest.source_of("stages.1.first.conv.weight") is None


@pytest.mark.parametrize(
    ("transform", "shapes", "source_shape"),
    [
        (SAME, [(2, 3)], (2, 3)),
        (TRANSPOSE, [(2, 3)], (3, 2)),
        (SPLIT, [(2, 3), (4, 3), (1, 3)], (7, 3)),
        (TRANSPOSE_SPLIT, [(2, 3), (4, 3)], (3, 6)),
        (TRANSPOSE_SPLIT, [(2,), (4,)], (6,)),
        (flattened(3), [(2, 36)], (2, 4, 3, 3)),
        (flattened(1), [(2, 5)], (2, 5, 1, 1)),
    ],
)
def test_a_transform_and_its_inverse(transform, shapes, source_shape):
    source = np.arange(np.prod(source_shape), dtype=np.float32).reshape(source_shape)
    parts = transform.forward(source, shapes)
    assert [part.shape for part in parts] == shapes
    np.testing.assert_array_equal(transform.backward(parts), source)
