"""How torchvision and timm write an Inception v3 down: names of tensors, and options."""

from eqzoo.checkpoint import BATCH_NORM, Drop, Rule, prefixed
from eqzoo.models._family import Options, Upstream

_CONV = (Rule(r"conv\.weight", "conv.weight"), *prefixed(r"bn\.", "norm.", BATCH_NORM))

_BRANCHES = {
    "A": {"1x1": "0.0", r"5x5_(\d)": "1.{0-1}", r"3x3dbl_(\d)": "2.{0-1}"},
    "B": {"3x3": "0.0", r"3x3dbl_(\d)": "1.{0-1}"},
    "C": {"1x1": "0.0", r"7x7_(\d)": "1.{0-1}", r"7x7dbl_(\d)": "2.{0-1}"},
    "D": {r"3x3_(\d)": "0.{0-1}", r"7x7x3_(\d)": "1.{0-1}"},
    "E": {
        "1x1": "0.0",
        "3x3_1": "1.0",
        "3x3_2a": "1.1",
        "3x3_2b": "1.2",
        r"3x3dbl_([12])": "2.{0-1}",
        "3x3dbl_3a": "2.2",
        "3x3dbl_3b": "2.3",
    },
}


def _block_rules(kind: str) -> tuple[Rule, ...]:
    """The rules of a block of torchvision's class Inception`kind`."""
    branches = [
        rule
        for name, place in _BRANCHES[kind].items()
        for rule in prefixed(rf"branch{name}\.", f"branches.{place}.", _CONV)
    ]
    return (*branches, *prefixed(r"branch_pool\.", "pooled.", _CONV))


# The same names in both libraries. Files may have an auxiliary head though the model has none.
TIMM = (
    *prefixed(r"Conv2d_1a_3x3\.", "stem.0.0.", _CONV),
    *prefixed(r"Conv2d_2a_3x3\.", "stem.0.1.", _CONV),
    *prefixed(r"Conv2d_2b_3x3\.", "stem.0.2.", _CONV),
    *prefixed(r"Conv2d_3b_1x1\.", "stem.1.0.", _CONV),
    *prefixed(r"Conv2d_4a_3x3\.", "stem.1.1.", _CONV),
    *(
        rule
        for stage, kinds in enumerate(("bA cA dA", "aB bC cC dC eC", "aD bE cE"))
        for block, (letter, kind) in enumerate(kinds.split())
        for rule in prefixed(rf"Mixed_{stage + 5}{letter}\.", f"stages.{stage}.{block}.", _block_rules(kind))
    ),
    *prefixed(r"AuxLogits\.conv(\d)\.", "aux_head.conv{0}.", _CONV),
    Rule(r"AuxLogits\.fc\.(weight|bias)", "aux_head.fc.{0}"),
    Drop(r"AuxLogits\..*"),
    Rule(r"fc\.(weight|bias)", "head.{0}"),
)

TORCHVISION_OPTIONS = Options(
    {
        "num_classes": "num_classes",
        "aux_logits": "aux_heads",
        "transform_input": "transform_input",
        "dropout": "dropout",
    }
)
TIMM_OPTIONS = Options(
    {"num_classes": "num_classes", "in_chans": "in_channels", "drop_rate": "dropout", "aux_logits": "aux_heads"},
    fixed={"global_pool": "avg", "norm_layer": "batchnorm2d", "norm_eps": 1e-3, "act_layer": "relu"},
)

UPSTREAMS = {
    "torchvision": Upstream(TIMM, TORCHVISION_OPTIONS, names=("torchvision/*",)),
    "timm": Upstream(TIMM, TIMM_OPTIONS, names=("timm/*",)),
}
