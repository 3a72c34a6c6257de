"""`preprocessing` does to an image what torchvision, timm and transformers do before they evaluate."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torchvision
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.models import get_pretrained_cfg
from torchvision.transforms._presets import ImageClassification, SemanticSegmentation
from transformers import AutoImageProcessor

from eqzoo import CheckpointError
from eqzoo._facts import timm_facts, torchvision_facts
from eqzoo._preprocessing import preprocessing

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def _photographs() -> dict[str, Image.Image]:
    china, flower = (Image.fromarray(array) for array in load_sample_images().images)
    return {
        "landscape": china,
        "portrait": flower.crop((100, 20, 313, 327)),
        "odd": china.crop((3, 5, 290, 288)),
        "square": flower.crop((50, 0, 299, 249)),
        "tiny": china.crop((200, 100, 219, 131)),
        "narrow": flower.crop((0, 100, 639, 141)),
    }


PHOTOGRAPHS = _photographs()
ALL = tuple(PHOTOGRAPHS.values())


def _distinct(facts):
    """One name for each distinct preprocessing."""
    return sorted({json.dumps(fact["preprocessing"]): name for name, fact in reversed(facts.items())}.values())


def _timm_transform(config, **changes):
    return timm.data.create_transform(**timm.data.resolve_data_config(changes, pretrained_cfg=config))


def _folder(path, **files):
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def _assert_equal(prepare, upstream, images=ALL):
    """Equal but for the last bit, on every image: upstream's result is channels first."""
    for image in images:
        expected = np.moveaxis(np.asarray(upstream(image)), 0, -1)
        ours = prepare(image)
        assert ours.dtype == np.float32
        assert ours.shape == expected.shape
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", _distinct(torchvision_facts()))
def test_torchvision_weights_are_prepared_as_their_preset_does(name):
    architecture, weights = name.split(".")
    upstream = torchvision.models.get_model_weights(architecture)[weights].transforms()
    _assert_equal(preprocessing(f"torchvision/{name}"), upstream)


@pytest.mark.parametrize("name", _distinct(timm_facts()))
def test_timm_weights_are_prepared_as_timm_does(name):
    config = get_pretrained_cfg(name).to_dict()
    _assert_equal(preprocessing(f"timm/{name}"), _timm_transform(config))


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("input_size", [(3, 97, 97), (3, 120, 75), (3, 75, 120)])
@pytest.mark.parametrize(("interpolation", "crop_pct"), [("lanczos", 0.9), ("nearest", 1.0), ("hamming", 0.66)])
def test_a_folder_of_timm_is_prepared_as_its_config_says(tmp_path, crop_mode, input_size, interpolation, crop_pct):
    config = {
        "input_size": input_size,
        "crop_mode": crop_mode,
        "crop_pct": crop_pct,
        "interpolation": interpolation,
        "mean": (0.1, 0.5, 0.9),
        "std": (0.2, 0.3, 0.4),
    }
    folder = _folder(tmp_path, config={"architecture": "resnet18", "pretrained_cfg": config})
    _assert_equal(preprocessing(folder), _timm_transform(config))


@pytest.mark.parametrize("config", [{}, {"input_size": [3, 64, 64], "crop_pct": 0.8, "mean": None, "crop_mode": ""}])
def test_timm_configs_without_options_or_nesting_get_timms_defaults(tmp_path, config):
    folder = _folder(tmp_path, config={"architecture": "resnet18", **config})
    _assert_equal(preprocessing(folder), _timm_transform({"architecture": "resnet18", **config}))


def test_a_model_of_one_channel_gets_grey_images(tmp_path):
    config = {"input_size": (1, 28, 28), "crop_pct": 0.9, "crop_mode": "border", "mean": (0.13,), "std": (0.3,)}
    folder = _folder(tmp_path, config={"pretrained_cfg": config})
    upstream = _timm_transform(config)
    _assert_equal(preprocessing(folder), lambda image: upstream(image.convert("L")))


# As published on the hub: microsoft/resnet-50, google/vit, microsoft/swin, facebook/deit, facebook/convnext,
# facebook/dinov2, openai/clip; then what transformers saves today, and options few use.
PROCESSORS = {
    "resnet": (
        "resnet",
        {"crop_pct": 0.875, "feature_extractor_type": "ConvNextFeatureExtractor", "resample": 3, "size": 224}
        | IMAGENET,
    ),
    "vit without a type": ("vit", {"do_normalize": True, "do_resize": True, "size": 224} | HALF),
    "swin": ("swin", {"feature_extractor_type": "ViTFeatureExtractor", "resample": 3, "size": 224} | IMAGENET),
    "deit": (
        "deit",
        {"crop_size": 224, "do_center_crop": True, "feature_extractor_type": "DeiTFeatureExtractor", "size": 256}
        | {"resample": 3}
        | IMAGENET,
    ),
    "convnext 384": (
        "convnext",
        {"crop_pct": 0.95, "image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}} | IMAGENET,
    ),
    "dinov2": (
        "dinov2",
        {
            "crop_size": {"height": 224, "width": 224},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_rescale": True,
            "image_processor_type": "BitImageProcessor",
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "size": {"shortest_edge": 256},
        }
        | IMAGENET,
    ),
    "clip": (
        "clip",
        {"crop_size": 224, "do_center_crop": True, "feature_extractor_type": "CLIPFeatureExtractor", "size": 224}
        | CLIP,
    ),
    "vit, saved today": (
        "vit",
        {
            "crop_size": None,
            "data_format": "channels_first",
            "default_to_square": True,
            "device": None,
            "do_center_crop": None,
            "do_pad": None,
            "image_processor_type": "ViTImageProcessorFast",
            "resample": 2,
            "size": {"height": 384, "width": 384},
        }
        | HALF,
    ),
    **{
        f"{kind} by default": (model_type, {"image_processor_type": kind})
        for model_type, kind in {
            "vit": "ViTImageProcessor",
            "deit": "DeiTImageProcessor",
            "convnext": "ConvNextImageProcessor",
            "dinov2": "BitImageProcessor",
            "clip": "CLIPImageProcessor",
        }.items()
    },
    **{f"{model_type} without a type": (model_type, {"size": 97}) for model_type in ("deit", "convnextv2", "swinv2")},
    **{f"{model_type} without a type": (model_type, {"size": 97}) for model_type in ("regnet", "dinov2", "clip")},
    "a crop larger than the image": (
        "deit",
        {"image_processor_type": "DeiTImageProcessor", "size": {"height": 201, "width": 150}}
        | {"crop_size": {"height": 128, "width": 163}, "resample": 1},
    ),
    "an odd surplus": ("vit", {"size": 99, "crop_size": 96, "do_center_crop": True, "default_to_square": False}),
    "numbers from -1 to 1": (
        "clip",
        {"image_processor_type": "CLIPImageProcessor", "rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0]}
        | {"image_std": [1.0, 1.0, 1.0], "resample": 4},
    ),
    "not normalised": ("vit", {"do_normalize": False, "resample": 5}),
    "not rescaled": (
        "vit",
        {"do_rescale": False, "image_mean": [120.0, 110.0, 100.0], "image_std": [60.0, 50.0, 40.0]},
    ),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_a_folder_of_transformers_is_prepared_as_its_image_processor_does(tmp_path, case):
    model_type, options = PROCESSORS[case]
    folder = _folder(tmp_path, config={"model_type": model_type}, preprocessor_config=options)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    _assert_equal(preprocessing(folder), lambda image: processor(image, return_tensors="np")["pixel_values"][0])


def _transparent() -> Image.Image:
    image = PHOTOGRAPHS["odd"].convert("RGBA")
    image.putalpha(PHOTOGRAPHS["odd"].convert("L"))
    return image


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "LA"])
def test_other_colour_modes_become_rgb_as_upstream(tmp_path, mode):
    image = PHOTOGRAPHS["odd"].convert(mode)
    upstream = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.transforms()
    _assert_equal(
        preprocessing("torchvision/resnet50.IMAGENET1K_V2"), lambda image: upstream(image.convert("RGB")), [image]
    )
    folder = _folder(tmp_path, preprocessor_config=PROCESSORS["clip"][1])
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    _assert_equal(
        preprocessing(folder), lambda image: processor(image, return_tensors="np")["pixel_values"][0], [image]
    )


def test_transparency_is_dropped_by_timm_and_white_in_transformers(tmp_path):
    image = _transparent()
    upstream = _timm_transform(get_pretrained_cfg("resnet50.a1_in1k").to_dict())
    _assert_equal(preprocessing("timm/resnet50.a1_in1k"), lambda image: upstream(image.convert("RGB")), [image])

    folder = _folder(tmp_path, preprocessor_config=PROCESSORS["clip"][1])
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    palette = image.quantize(16)
    palette.info["transparency"] = 3
    _assert_equal(
        preprocessing(folder),
        lambda image: processor(image, return_tensors="np")["pixel_values"][0],
        [image, image.convert("LA"), palette],
    )


def test_arrays_are_prepared_as_the_images_they_hold():
    prepare = preprocessing("timm/resnet50.a1_in1k", image_size=32)
    colour, grey = PHOTOGRAPHS["odd"], PHOTOGRAPHS["odd"].convert("L")
    for image in (colour, grey, _transparent()):
        np.testing.assert_array_equal(prepare(np.asarray(image)), prepare(image))
        np.testing.assert_array_equal(prepare(jnp.asarray(np.asarray(image))), prepare(image))
    np.testing.assert_array_equal(prepare(np.asarray(grey)[..., None]), prepare(grey))


def test_images_of_any_size_stack_to_a_batch():
    prepare = preprocessing("torchvision/resnet50.IMAGENET1K_V2", image_size=64)
    batch = np.stack([prepare(image) for image in PHOTOGRAPHS.values()])
    assert batch.shape == (len(PHOTOGRAPHS), 64, 64, 3)
    assert batch.dtype == np.float32


@pytest.mark.parametrize("image_size", [112, 333])
def test_another_image_size_keeps_the_share_of_the_image_that_is_seen(tmp_path, image_size):
    name = "deit3_base_patch16_224.fb_in1k"
    upstream = _timm_transform(get_pretrained_cfg(name).to_dict(), input_size=(3, image_size, image_size))
    _assert_equal(preprocessing(f"timm/{name}", image_size=image_size), upstream)

    resize = image_size * 256 // 224
    upstream = ImageClassification(crop_size=image_size, resize_size=resize)
    _assert_equal(preprocessing("torchvision/resnet50.IMAGENET1K_V1", image_size=image_size), upstream)

    upstream = SemanticSegmentation(resize_size=image_size)
    source = "torchvision/fcn_resnet50.COCO_WITH_VOC_LABELS_V1"
    _assert_equal(preprocessing(source, image_size=image_size), upstream)

    for case, changes in {
        "resnet": {"size": image_size},
        "vit without a type": {"size": image_size},
        "dinov2": {"size": {"shortest_edge": resize}, "crop_size": image_size},
    }.items():
        model_type, options = PROCESSORS[case]
        folder = _folder(tmp_path, config={"model_type": model_type}, preprocessor_config=options | changes)
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        _folder(tmp_path, preprocessor_config=options)
        prepare = preprocessing(folder, image_size=image_size)
        _assert_equal(prepare, lambda image: processor(image, return_tensors="np")["pixel_values"][0])


def test_for_segmentation_the_whole_image_stays():
    prepare = preprocessing("torchvision/fcn_resnet50.COCO_WITH_VOC_LABELS_V1")
    assert (prepare.resize, prepare.resize_mode, prepare.crop) == ((520, 520), "cover", None)
    assert prepare(PHOTOGRAPHS["landscape"]).shape == (520, 779, 3)


def test_it_prints_as_what_it_does():
    prepare = preprocessing("torchvision/resnet50.IMAGENET1K_V2")
    assert repr(prepare) == (
        "Preprocessing(\n"
        "    resize=(232, 232),\n"
        "    resize_mode='cover',\n"
        "    interpolation='bilinear',\n"
        "    crop=(224, 224),\n"
        "    mean=(0.485, 0.456, 0.406),\n"
        "    std=(0.229, 0.224, 0.225),\n"
        "    upstream='torchvision',\n"
        ")"
    )


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), "dtype float32, expected uint8 .*`np.uint8"),
        (np.zeros((3, 8, 8), np.uint8), r"shape \(3, 8, 8\).* channels first"),
        (np.zeros((2, 8, 8, 3), np.uint8), "of a batch prepare each image"),
        (np.zeros((0, 8, 3), np.uint8), r"shape \(0, 8, 3\)"),
        ([np.zeros((8, 8, 3), np.uint8)], "is a list, expected one PIL image or array; .*`np.stack"),
        ("cat.jpg", "is a str, expected one PIL image"),
    ],
)
def test_what_is_no_image_is_refused_with_a_remedy(image, message):
    with pytest.raises((TypeError, ValueError), match=message):
        preprocessing("timm/resnet50.a1_in1k")(image)


@pytest.mark.parametrize(
    ("source", "revision"), [("somebody/net", None), ("timm/resnet50.mine", None), ("timm/resnet50.a1_in1k", "v2")]
)
def test_what_the_facts_do_not_know_is_read_from_the_repository(tmp_path, monkeypatch, source, revision):
    asked = []
    folder = _folder(tmp_path, config={"pretrained_cfg": {"input_size": [3, 33, 33]}})
    monkeypatch.setattr(
        "eqzoo._preprocessing.fetch_config", lambda source, *, revision: asked.append((source, revision)) or folder
    )
    assert preprocessing(source, revision=revision).crop == (33, 33)
    assert asked == [(source, revision)]
    assert preprocessing("timm/resnet50.a1_in1k").crop == (224, 224)
    assert len(asked) == 1, "the facts know it: nothing is fetched"


def test_a_file_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match="is a file, which holds no preprocessing; pass the folder"):
        preprocessing(file)


def test_a_misspelt_name_and_a_bad_size_are_refused():
    with pytest.raises(ValueError, match="no weights 'resnet50.IMAGENET1K_V3'; did you mean resnet50.IMAGENET1K_V"):
        preprocessing("torchvision/resnet50.IMAGENET1K_V3")
    with pytest.raises(ValueError, match="no weights 'resnet50'; did you mean resnet50.IMAGENET1K_V"):
        preprocessing("torchvision/resnet50")
    with pytest.raises(ValueError, match="revision='main' was given, but torchvision's weights have none"):
        preprocessing("torchvision/resnet50.IMAGENET1K_V2", revision="main")
    with pytest.raises(ValueError, match="image_size=0"):
        preprocessing("timm/resnet50.a1_in1k", image_size=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_processor_type": "MyImageProcessor"}, "image processor MyImageProcessor is unknown; .* ViTImageProc"),
        ({"size": 224}, "none stated, for a model of type 'gpt2'"),
        ({"image_processor_type": "ViTImageProcessor", "reduce_labels": True}, "ViTImageProcessor with reduce_labels"),
        ({"image_processor_type": "ViTImageProcessor", "do_pad": True}, "do_pad=True"),
        ({"image_processor_type": "ViTImageProcessor", "do_resize": False}, "do_resize=False"),
        ({"image_processor_type": "ViTImageProcessor", "resample": -1}, "resample=-1"),
        ({"image_processor_type": "ViTImageProcessor", "size": {"longest_edge": 8}}, "size={'longest_edge': 8}"),
        ({"image_processor_type": "ViTImageProcessor", "size": {"shortest_edge": 8}}, "images of different sizes"),
        ({"image_processor_type": "ViTImageProcessor", "size": "big"}, "big"),
        ({"image_processor_type": "ViTImageProcessor", "size": -4}, "positive whole numbers"),
        ({"image_processor_type": "ViTImageProcessor", "image_mean": [0.5]}, "mean="),
        ({"image_processor_type": "ViTImageProcessor", "image_std": [1, 0, 1]}, "no std of 0"),
        ({"image_processor_type": "ViTImageProcessor", "rescale_factor": 0}, "division by zero"),
        ({"image_processor_type": "ConvNextImageProcessor", "size": {"height": 8, "width": 8}}, "'height': 8"),
        ({"image_processor_type": "ConvNextImageProcessor", "do_center_crop": True}, "do_center_crop=True"),
        ({"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}, "images of different sizes"),
        ({"image_processor_type": "CLIPImageProcessor", "use_square_size": True}, "use_square_size=True is unknown"),
    ],
)
def test_a_processor_or_option_that_is_not_known_is_refused_by_name(tmp_path, options, message):
    folder = _folder(tmp_path, config={"model_type": "gpt2"}, preprocessor_config=options)
    with pytest.raises(CheckpointError, match=message):
        preprocessing(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"crop_mode": "spiral"}, "crop_mode='spiral' is unknown; eqzoo knows center, border, squash"),
        ({"interpolation": "random"}, "random"),
        ({"input_size": [1, 28, 28]}, "1 channels, but mean="),
        ({"input_size": [3, 224]}, "not enough values"),
        ({"input_size": 224}, "224|int"),
        ({"input_size": [3, 64.5, 64.5]}, "64.5"),
        ({"mean": "grey"}, "could not convert"),
    ],
)
def test_a_timm_config_that_is_not_understood_is_refused(tmp_path, config, message):
    with pytest.raises(CheckpointError, match=message):
        preprocessing(_folder(tmp_path, config={"pretrained_cfg": config}))


def test_a_folder_without_preprocessing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="describes no image preprocessing"):
        preprocessing(_folder(tmp_path, config={"model_type": "gpt2"}))
    (tmp_path / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a list, expected an object"):
        preprocessing(tmp_path)
    (tmp_path / "preprocessor_config.json").write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match="is no JSON"):
        preprocessing(tmp_path)


def test_without_pillow_the_remedy_is_named(monkeypatch):
    prepare = preprocessing("timm/resnet50.a1_in1k")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'eqzoo\[vision\]'"):
        prepare(PHOTOGRAPHS["tiny"])
