"""Convolutions, norms over the batch and over groups, long skips, patches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import Case, case
from tests.zoo.plain import Residual


def stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, channels: int = 4, depth: int = 2) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth)]
        self.stem, self.middle, self.out = nn.Conv2d(3, channels, 3, padding=1), stage(widths[-1], widths[-1]), nn.Conv2d(channels, 2, 1)
        self.down = nn.ModuleList(stage(a, b) for a, b in zip([channels, *widths[:-1]], widths, strict=True))
        back = widths[::-1]
        self.up = nn.ModuleList(stage(a + b, b) for a, b in zip([back[0], *back[:-1]], back, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        h, skips = self.stem(x), []
        for down in self.down:
            h = down(h)
            skips.append(h)
            h = F.max_pool2d(h, 2)
        h = self.middle(h)
        for up in self.up:
            skip = skips.pop()
            h = up(torch.cat([F.interpolate(h, size=skip.shape[-2:], mode="nearest"), skip], dim=1))
        return self.out(h)


@case()
def unet() -> Case:
    return {"model": UNet(), "args": (torch.randn(6, 3, 8, 8),), "targets": torch.randint(0, 2, (6, 8, 8)), "loss_fn": F.cross_entropy}


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(h)) + self.skip(x))


@case(mixes_batch=True)
def resnet() -> Case:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), Bottleneck(4, 4, 1), Bottleneck(4, 8, 2), *head)
    x = torch.randn(8, 3, 8, 8) + torch.arange(8.0)[:, None, None, None] * 0.1
    return {"model": model, "args": (x,), "targets": torch.randint(0, 5, (8,)), "loss_fn": F.cross_entropy}


@case(mixes_batch=True)
def batchnorm_without_weights() -> Case:
    norms = (nn.BatchNorm1d(12, affine=False), nn.BatchNorm1d(12, momentum=0.3), nn.BatchNorm1d(12, track_running_stats=False))
    layers = [layer for norm in norms for layer in (nn.Linear(12, 12), norm, nn.Tanh())]
    x = torch.randn(7, 12) + torch.arange(7.0)[:, None] * 0.3
    return {"model": nn.Sequential(*layers, nn.Linear(12, 4)), "args": (x,), "targets": torch.randint(0, 4, (7,)), "loss_fn": F.cross_entropy}


class VisionTransformer(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.patches, self.token, self.position = (
            nn.Conv2d(3, dim, 4, 4),
            nn.Parameter(torch.zeros(1, 1, dim)),
            nn.Parameter(torch.randn(1, 5, dim) * 0.1),
        )
        self.attention = nn.ModuleList(nn.MultiheadAttention(dim, 2, batch_first=True) for _ in range(2))
        self.norms, self.blocks = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2)), nn.ModuleList(Residual(dim) for _ in range(2))
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], 1) + self.position
        for attention, norm, block in zip(self.attention, self.norms, self.blocks, strict=True):
            z = norm(h)
            h = block(h + attention(z, z, z, need_weights=False)[0])
        return self.head(h[:, 0])


@case()
def vision_transformer() -> Case:
    return {"model": VisionTransformer(), "args": (torch.randn(6, 3, 8, 8),), "targets": torch.randint(0, 5, (6,)), "loss_fn": F.cross_entropy}
