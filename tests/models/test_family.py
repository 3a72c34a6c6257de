"""What families say of upstream's registries is true, and options are read and written alike."""

import inspect
import json
from dataclasses import asdict, dataclass, replace

import pytest
import timm
import torchvision

from eqzoo._registry import families
from eqzoo.models._family import Family, Option, Options, Upstream, changed_fields

REGISTRIES = {"timm": set(timm.list_models()), "torchvision": set(torchvision.models.list_models())}


@pytest.mark.parametrize("library", REGISTRIES)
@pytest.mark.parametrize("family", families(), ids=lambda family: family.model.__name__)
def test_a_variant_is_upstreams_if_and_only_if_upstream_has_its_name(family, library):
    upstreams = [upstream for naming, upstream in family.upstreams.items() if naming.partition("_")[0] == library]
    ours = {name for name in family.variants if any(upstream.has(name) for upstream in upstreams)}
    theirs = {spelling for name in REGISTRIES[library] for spelling in (name, f"{library}/{name}")}
    assert ours == theirs & family.variants.keys()


def test_every_variant_is_somebodys_or_our_own():
    for family in families():
        named = {name for name in family.variants for upstream in family.upstreams.values() if upstream.has(name)}
        assert named == (set(family.variants) if family.upstreams else set()), family.model


@pytest.mark.parametrize("family", families(), ids=lambda family: family.model.__name__)
def test_options_of_timm_say_every_variant_from_every_other(family):
    """What is written of one variant turns another into it, but for the fields that no option sets."""
    if "timm" not in family.upstreams:
        assert not REGISTRIES["timm"] & family.variants.keys()
        return
    for upstream in (each for naming, each in family.upstreams.items() if naming.startswith("timm")):
        _assert_every_variant_is_said_from_every_other(family, upstream)


def _assert_every_variant_is_said_from_every_other(family: Family, upstream: Upstream) -> None:
    names = [name for name in family.variants if upstream.has(name)]
    for name, base in zip(names, [*names[7:], *names[:7]], strict=True):
        config = family.variants[name]
        built = replace(config, **upstream.options.read(upstream.options.write(config)))
        assert built == config
        unsaid = changed_fields(family.variants[base], config) - upstream.options.config_fields
        if not unsaid:
            assert replace(family.variants[base], **upstream.options.read(upstream.options.write(config))) == config


@dataclass(frozen=True)
class Config:
    width: int = 8
    sizes: tuple[int, ...] = (1, 2)
    pool: str = "token"
    gate: bool = False


OPTIONS = Options(
    {"embed_dim": "width", "sizes": "sizes", "global_pool": Option("pool", {"cls": "token", "gap": "mean"})},
    fixed={"norm": "layer"},
    ignored=("drop_.*",),
)


def test_options_become_fields():
    read = OPTIONS.read({"embed_dim": 4, "sizes": [[3, 4], [5]], "global_pool": "gap", "norm": "layer", "drop_rate": 1})
    assert read == {"width": 4, "sizes": ((3, 4), (5,)), "pool": "mean"}


def test_options_that_are_not_stated_set_nothing():
    assert OPTIONS.read({}) == {}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"global_pool": "map"}, "^global_pool='map' is not supported; eqzoo has 'cls', 'gap'$"),
        ({"global_pool": ["gap"]}, r"^global_pool=\['gap'\] is not supported; eqzoo has 'cls', 'gap'$"),
        ({"norm": "batch"}, "^norm='batch' is not supported; eqzoo has 'layer'$"),
        ({"rope": True}, "^option 'rope' .of value True. is not known to eqzoo$"),
        ({"xdrop_rate": 1}, "option 'xdrop_rate'"),
    ],
)
def test_an_option_that_can_not_be_said_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        OPTIONS.read(options)


def test_a_lenient_description_may_say_more():
    assert replace(OPTIONS, lenient=True).read({"rope": True, "embed_dim": 4}) == {"width": 4}
    with pytest.raises(ValueError, match="norm='batch'"):
        replace(OPTIONS, lenient=True).read({"norm": "batch"})


def test_fields_become_options_and_back():
    config = Config(width=4, pool="mean")
    assert OPTIONS.write(config) == {"embed_dim": 4, "sizes": (1, 2), "global_pool": "gap"}
    assert Config(**OPTIONS.read(OPTIONS.write(config))) == config


def test_a_value_that_upstream_has_no_word_for_is_refused():
    with pytest.raises(ValueError, match="upstream has no pool='max'; use `eqzoo.save`"):
        OPTIONS.write(Config(pool="max"))


def test_config_fields_are_those_that_are_written():
    assert OPTIONS.config_fields == {"width", "sizes", "pool"}
    assert replace(OPTIONS, implied={"gate": True}).config_fields == {"width", "sizes", "pool", "gate"}


def test_an_implied_field_is_read_and_must_be_what_is_written():
    options = replace(OPTIONS, implied={"gate": True})
    assert options.read({}) == {"gate": True}
    assert "gate" not in options.write(Config(gate=True))
    with pytest.raises(ValueError, match="upstream has no gate=False, only True"):
        options.write(Config())


def test_prepare_comes_before_reading_and_restore_after_writing():
    options = replace(
        OPTIONS,
        prepare=lambda options: {"embed_dim": 2 * options.pop("half"), **options},
        restore=lambda options: {"half": options.pop("embed_dim") // 2, **options},
    )
    given = {"half": 3}
    assert options.read(given) == {"width": 6}
    assert given == {"half": 3}
    assert options.write(Config(width=6)) == {"half": 3, "sizes": (1, 2), "global_pool": "cls"}


def test_changed_fields_are_the_names_of_what_differs():
    assert changed_fields(Config(), Config()) == set()
    assert changed_fields(Config(), Config(width=1, gate=True)) == {"width", "gate"}


def test_no_two_family_files_share_a_passage():
    """Of more than twelve lines, apart from imports, blank lines and indentation: it would belong in `eqzoo.nn`."""
    sources = {family.model.__module__: inspect.getsource(inspect.getmodule(family.model)) for family in families()}
    where: dict[tuple[str, ...], str] = {}
    for module, source in sources.items():
        lines = [line.strip() for line in source.splitlines()]
        lines = [line for line in lines if line and not line.startswith(("import ", "from "))]
        for start in range(len(lines) - 12):
            passage = tuple(lines[start : start + 13])
            assert where.setdefault(passage, module) == module, "\n".join(passage)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.model.__name__)
def test_a_config_saved_as_json_is_the_config(family):
    for config in family.variants.values():
        again = family.config_from(json.loads(json.dumps(asdict(config))))
        assert again == config
        assert hash(again) == hash(config)
