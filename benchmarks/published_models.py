"""The models of published tables of rematerialization, with random weights, for small inputs on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["MODELS"]


def _conv(
    inputs: int, outputs: int, size: int, *, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([nn.ReLU()] if relu else []))


class _Bottleneck(nn.Module):
    """A block of ResNet, or of MobileNet v2 if `groups` is the inner width: then nothing follows the sum."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.reduce, self.conv = _conv(inputs, inner, 1), _conv(inner, inner, 3, stride=stride, groups=groups)
        self.expand, self.is_inverted = _conv(inner, outputs, 1, relu=False), groups > 1
        has_same_shape = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if has_same_shape or self.is_inverted else _conv(inputs, outputs, 1, stride=stride)
        )
        self.adds = has_same_shape or not self.is_inverted

    def forward(self, x: Tensor) -> Tensor:
        out = self.expand(self.conv(self.reduce(x)))
        if self.adds:
            out = out + self.shortcut(x)
        return out if self.is_inverted else torch.relu(out)


def _classifier(width: int, *layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def _resnet50() -> nn.Module:
    blocks, width = list[nn.Module](), 64
    for number, (inner, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for index in range(count):
            blocks.append(_Bottleneck(width, inner, 4 * inner, 2 if number and not index else 1))
            width = 4 * inner
    return _classifier(width, _conv(3, 64, 7, stride=2), nn.MaxPool2d(3, 2, 1), *blocks)


def _mobilenet() -> nn.Module:
    blocks, width = list[nn.Module](), 32
    for factor, outputs, count, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for index in range(count):
            inner = factor * width
            blocks.append(_Bottleneck(width, inner, outputs, 1 if index else stride, groups=inner))
            width = outputs
    return _classifier(1280, _conv(3, 32, 3, stride=2), *blocks, _conv(width, 1280, 1))


def _vgg16() -> nn.Module:
    layers, width = list[nn.Module](), 3
    for outputs, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(nn.Sequential(nn.Conv2d(width, outputs, 3, padding=1), nn.ReLU()))
            width = outputs
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head)


class _Inception(nn.Module):
    def __init__(self, inputs: int, *widths: int) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pool = widths
        self.branches = nn.ModuleList(
            [
                _conv(inputs, one, 1),
                nn.Sequential(_conv(inputs, reduce3, 1), _conv(reduce3, three, 3)),
                nn.Sequential(_conv(inputs, reduce5, 1), _conv(reduce5, five, 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, pool, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _googlenet() -> nn.Module:
    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, 1)

    stem = (_conv(3, 64, 7, stride=2), pool(), _conv(64, 64, 1), _conv(64, 192, 3), pool())
    early = (_Inception(192, 64, 96, 128, 16, 32, 32), _Inception(256, 128, 128, 192, 32, 96, 64), pool())
    middle = (
        _Inception(480, 192, 96, 208, 16, 48, 64),
        _Inception(512, 160, 112, 224, 24, 64, 64),
        _Inception(512, 128, 128, 256, 24, 64, 64),
        _Inception(512, 112, 144, 288, 32, 64, 64),
        _Inception(528, 256, 160, 320, 32, 128, 128),
        pool(),
    )
    late = (_Inception(832, 256, 160, 320, 32, 128, 128), _Inception(832, 384, 192, 384, 48, 128, 128))
    return _classifier(1024, *stem, *early, *middle, *late)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(_conv(inputs, outputs, 3), _conv(outputs, outputs, 3))


class _UNet(nn.Module):
    """Five scales; the way up doubles sizes by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        widths, ups = (64, 128, 256, 512, 512), (256, 128, 64, 64)
        self.down = nn.ModuleList(_double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(
            _double(a + b, c) for a, b, c in zip((512, *ups), (512, 256, 128, 64), ups, strict=False)
        )
        self.head = nn.Conv2d(64, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True)
            x = block(torch.cat([skips.pop(), x], 1))
        return self.head(x)


class _Cell(nn.Module):
    """An LSTM cell of nodes: the children's states are summed (a Tree-LSTM), or there is one child (an LSTM)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.of_input, self.of_states = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u, f = (self.of_input(x) + self.of_states(h)).chunk(4, -1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * c
        return torch.sigmoid(o) * torch.tanh(c), c


class _Cells(nn.Module):
    """One cell, called for each node: of a row, or of a binary tree from its leaves."""

    def __init__(self, width: int, num: int, *, is_tree: bool) -> None:
        super().__init__()
        self.cells, self.num, self.width, self.is_tree = nn.ModuleList([_Cell(64, width)]), num, width, is_tree

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], self.width)
        cell = self.cells[0]
        if not self.is_tree:
            state = zeros, zeros
            for number in range(self.num):
                state = cell(x[:, number], *state)
            return state[0]
        states = [cell(x[:, number], zeros, zeros) for number in range(self.num)]
        while len(states) > 1:
            pairs = zip(states[::2], states[1::2], strict=True)
            states = [cell(x[:, 0], a[0] + b[0], a[1] + b[1]) for a, b in pairs]
        return states[0][0]


def _transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True), 6)


#: By name: makes a model, and the shape of its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-50": (_resnet50, (4, 3, 96, 96)),
    "GoogLeNet": (_googlenet, (4, 3, 96, 96)),
    "UNet": (_UNet, (1, 3, 96, 96)),
    "MobileNet v2": (_mobilenet, (4, 3, 96, 96)),
    "VGG-16": (_vgg16, (2, 3, 96, 96)),
    "transformer": (_transformer, (4, 256, 256)),
    "LSTM": (lambda: _Cells(256, 64, is_tree=False), (64, 64, 64)),
    "Tree-LSTM": (lambda: _Cells(256, 32, is_tree=True), (64, 32, 64)),
}
