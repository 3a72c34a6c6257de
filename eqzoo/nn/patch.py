"""Images as tokens."""

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn._init import Init
from eqzoo.nn.conv import Conv2d


class PatchEmbed(eqx.Module):
    """Cuts an image into square patches and maps each to a token, in row-major order."""

    conv: Conv2d
    patch_size: int = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        dim: int,
        patch_size: int,
        *,
        use_bias: bool = True,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        self.conv = Conv2d(in_channels, dim, patch_size, stride=patch_size, use_bias=use_bias, init=init, key=key)
        self.patch_size = patch_size

    def __call__(self, x: Float[Array, "height width channels"]) -> Float[Array, "tokens dim"]:
        height, width, _ = x.shape
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"PatchEmbed: an image of {height}x{width} doesn't divide into patches of {self.patch_size}; "
                f"resize it to multiples of {self.patch_size}"
            )
        y = self.conv(x)
        return y.reshape(-1, y.shape[-1])
