"""Devices to estimate steps for: their compute rates, bandwidths and memory."""

from __future__ import annotations

import dataclasses
import math

from actckpt._text.suggestions import did_you_mean

__all__ = ["Target", "named_target"]

#: Defaults: PCIe 5.0 and 4.0, sixteen lanes, one direction.
_PCIE5, _PCIE4 = 64e9, 32e9


@dataclasses.dataclass(frozen=True)
class Target:
    """A device by its rates.

    Attributes:
        name: for tables.
        flops_per_s: dense 16-bit matrix products.
        float32_flops_per_s: 32-bit (and 64-bit) products and sums.
        memory_bytes_per_s: memory bandwidth.
        link_bytes_per_s: bandwidth to host memory, one direction.
        memory_bytes: memory size that its driver reports.

    Raises:
        ValueError: a rate is not a finite number above 0.

    Example::

        >>> import actckpt, dataclasses
        >>> half = dataclasses.replace(actckpt.Target.named("h100"), name="half an h100", memory_bytes=40 * 2**30)
        >>> half.flops_per_s
        989000000000000.0
    """

    name: str
    flops_per_s: float
    float32_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    memory_bytes: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                raise ValueError(f"target {self.name!r}: {field.name}={value!r} is not a rate. Pass a number above 0.")

    @staticmethod
    def named(name: str) -> Target:
        """Return a device of the table in docs/estimate.md: h100, h200, a100, b200, mi300x, l40s, rtx4090 or cpu.

        Raises:
            ValueError: the table does not have it.
        """
        return named_target(name)

    @property
    def is_cpu(self) -> bool:
        """Whether operators run with CPU kernels, so that no replacement is needed."""
        return self.name == "cpu"


_GIB = 2**30

#: Dense products, without sparsity, from the vendors' data sheets of the H100 SXM5, H200 SXM, A100 SXM4, B200 (an
#: eighth of an HGX B200), Instinct MI300X, L40S and GeForce RTX 4090 (Ada architecture white paper: 32-bit sums).
#: Memory of the H100, H200 and A100 is the total that cards report; that of the others is from data sheets. The CPU is
#: not a
#: product: figures of that order.
_TARGETS = {
    target.name: target
    for target in (
        Target("h100", 989e12, 67e12, 3.35e12, _PCIE5, int(79.1 * _GIB)),
        Target("h200", 989e12, 67e12, 4.8e12, _PCIE5, int(139.8 * _GIB)),
        Target("a100", 312e12, 19.5e12, 2.039e12, _PCIE4, int(79.1 * _GIB)),
        Target("b200", 2250e12, 75e12, 7.7e12, _PCIE5, 180 * 10**9),
        Target("mi300x", 1307e12, 163.4e12, 5.3e12, _PCIE5, 192 * 10**9),
        Target("l40s", 362e12, 91.6e12, 864e9, _PCIE4, 48 * 10**9),
        Target("rtx4090", 165.2e12, 82.6e12, 1008e9, _PCIE4, 24 * 10**9),
        Target("cpu", 1e12, 1e12, 100e9, 2e9, 64 * _GIB),
    )
}


def named_target(name: str) -> Target:
    """Return the target with a name.

    Raises:
        ValueError: there is none; lists the nearest, and all.
    """
    target = _TARGETS.get(name.strip().lower()) if isinstance(name, str) else None
    if target is None:
        near = did_you_mean([str(name).lower()], list(_TARGETS), show=repr)
        raise ValueError(
            f"target={name!r} is not known. Pass one of {', '.join(_TARGETS)}, or an actckpt.Target with rates of your "
            f"own.{near}"
        )
    return target
