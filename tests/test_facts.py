"""The facts that eqzoo carries about upstream's checkpoints are those that upstream states."""

import json
import re

import pytest
import transformers

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo._facts import imagenet_classes, timm_facts, torchvision_facts, transformers_facts
from eqzoo._registry import variant
from tests.scripts import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("make_facts")


def test_files_hold_what_the_installed_upstreams_state(script):
    files = script.files()
    assert {path.name for path in files} == {"torchvision.json", "timm.json", "imagenet_classes.json"}
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, "run python scripts/make_facts.py"


def test_check_fails_for_a_file_that_is_out_of_date(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "files", lambda: {tmp_path / "timm.json": "new"})
    monkeypatch.setattr("sys.argv", ["make_facts.py", "--check"])
    (tmp_path / "timm.json").write_text("old", encoding="utf-8")
    with pytest.raises(SystemExit, match="out of date"):
        script.main()
    (tmp_path / "timm.json").write_text("new", encoding="utf-8")
    script.main()


def test_each_of_imagenets_classes_has_a_name_of_its_own():
    names = imagenet_classes()
    assert len(set(names)) == 1000
    assert (names[0], names[281], names[-1]) == ("tench", "tabby", "toilet tissue")


def test_every_source_is_of_a_known_model():
    known = set(eqzoo.list_models())
    for upstream, facts in (("torchvision", torchvision_facts()), ("timm", timm_facts())):
        for name in facts:
            architecture = name.partition(".")[0]
            assert {architecture, f"{upstream}/{architecture}"} & known, name
    assert {fact["variant"] for fact in transformers_facts().values()} <= known


def test_every_transformers_model_has_a_source():
    names = {name for name in eqzoo.list_models() if "gpt2" in name}
    variants = {fact["variant"] for fact in transformers_facts().values()}
    assert names <= variants <= set(eqzoo.list_models())


def test_the_config_of_a_language_models_source_is_its_variants():
    sources = {
        name: fact for name, fact in transformers_facts().items() if "vocab" in vars(variant(fact["variant"])[1])
    }
    assert len(sources) > 100
    for name, fact in sources.items():
        stated = transformers.AutoConfig.for_model(**fact["config"]).to_dict() | fact["config"]
        assert from_config_json(json.loads(json.dumps(stated))).config == variant(fact["variant"])[1], name


def test_every_url_ends_in_its_hash():
    for name, fact in torchvision_facts().items():
        assert re.fullmatch("[0-9a-f]{8,64}", fact["sha256"]), name
        assert re.fullmatch(rf"https://\S+-{fact['sha256']}\.pth", fact["url"]), name


def test_weights_for_segmentation_name_their_classes_and_options():
    facts = torchvision_facts()
    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        fact = facts[f"{name}.COCO_WITH_VOC_LABELS_V1"]
        assert (len(fact["classes"]), fact["classes"][0], fact["classes"][-1]) == (21, "__background__", "tvmonitor")
        assert fact.get("options") == (None if name.startswith("lraspp") else {"aux_loss": True})
    assert facts["fcn_resnet50.COCO_WITH_VOC_LABELS_V1"]["mean_iou"] == 60.5


def test_licences_are_the_weights_own():
    torchvision = torchvision_facts()
    assert torchvision["resnet50.IMAGENET1K_V2"]["licence"] == "BSD-3-Clause"
    assert "SWAG/blob/main/LICENSE" in torchvision["vit_b_16.IMAGENET1K_SWAG_E2E_V1"]["licence"]
    assert timm_facts()["resnet50.a1_in1k"]["licence"] == "apache-2.0"
    assert timm_facts()["resnet50.fb_swsl_ig1b_ft_in1k"]["licence"] == "cc-by-nc-4.0"
    assert transformers_facts()["openai-community/gpt2"]["licence"] == "mit"
