"""Names lead to families, and unknown names to near misses."""

import jax
import pytest

import eqzoo
from eqzoo._registry import families, family_of, variant


def test_every_family_file_is_found():
    assert {family.model.__name__ for family in families()} >= {"MLP", "ResNet", "ViT", "GPT2"}


def test_no_two_families_share_a_name():
    names = [name for family in families() for name in family.variants]
    assert len(names) == len(set(names))


def test_list_models_takes_a_pattern_and_is_sorted():
    names = eqzoo.list_models("resnet*")
    assert {"resnet18", "resnet50", "resnet152"} <= set(names)
    assert all(name.startswith("resnet") for name in names)
    assert eqzoo.list_models() == sorted(eqzoo.list_models())
    assert eqzoo.list_models("nothing*") == []


def test_a_prefix_names_the_upstream():
    assert variant("torchvision/resnet50") == variant("timm/resnet50") == variant("resnet50")


def test_an_unknown_name_raises_with_near_misses():
    with pytest.raises(ValueError, match=r"there is no model named 'resnet51'; did you mean .*resnet50"):
        eqzoo.create("resnet51", key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"`eqzoo.list_models\(\)` lists all names"):
        eqzoo.create("zzz", key=jax.random.key(0))


def test_family_of_knows_the_zoo_and_nothing_else():
    family, config = variant("mlp")
    assert family_of(object()) is None
    assert family.model.__name__ == "MLP"
    assert isinstance(config, family.config)


def test_the_classes_of_every_family_are_attributes_of_the_package():
    for family in families():
        for cls in (family.model, family.config):
            assert getattr(eqzoo, cls.__name__) is cls
            assert cls.__name__ in dir(eqzoo)
    assert "load" in dir(eqzoo)
    with pytest.raises(AttributeError, match="module 'eqzoo' has no attribute 'ResNett'"):
        eqzoo.ResNett  # noqa: B018
