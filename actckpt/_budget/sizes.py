"""Budgets as users write them, converted to bytes."""

from __future__ import annotations

import math
import numbers
import os

import torch

from actckpt._core import devices, simulated
from actckpt._core.devices import Accelerator
from actckpt._offload.limits import available_host_bytes, total_host_bytes
from actckpt._text.sizes import format_bytes, number_in, parse_bytes
from actckpt.planner.plans import Plan

__all__ = ["activation_budget_bytes", "budget_bytes"]

#: A smaller number is probably a mistake: 24 is not a budget, "24GiB" is.
_LEAST_BYTES = 2**20
_FORMS = (
    "bytes as a whole number, a text like '24GiB', a share of the device like '90%' or 0.9 (at most '100%' or 1.0), or "
    "'auto'"
)
_ACTIVATION_FORMS = "a share like '50%' or 0.5 (at most '100%' or 1.0), a text like '2GiB', or bytes as a whole number"
#: Shares of predicted bytes are rounded up to a multiple of this.
_ROUND_BYTES = 2**10
#: The share of free memory that `"auto"` uses.
_AUTO = 0.95


def budget_bytes(budget: object, device: torch.device, *, held_bytes: float) -> float:
    """Return a budget for all memory.

    Args:
        budget: a number of bytes, a text with a unit, a share of the device (`"90%"`, 0.9), or `"auto"`.
        held_bytes: bytes that this process holds already, measured like the peak.
    Raises:
        ValueError: it is none of these, or a share of a memory size that torch does not report.
    """
    _check_no_plan(budget, "budget")
    if isinstance(budget, str) and budget.strip() == "auto":
        return _AUTO * (simulated.memory_bytes() or _free_bytes(device, budget) + held_bytes)
    share = _share(budget, "budget", _FORMS)
    if share is not None:
        return share * (simulated.memory_bytes() or _total_bytes(device, budget))
    _check_has_unit(budget, "budget")
    nbytes = parse_bytes(budget, what="budget", forms=_FORMS)
    if nbytes < _LEAST_BYTES:
        example = nbytes if not isinstance(budget, str) and 1 < nbytes < 1024 else 24
        raise ValueError(
            f"budget={budget!r} is {nbytes} bytes, less than {format_bytes(_LEAST_BYTES)}. Pass a text with a larger "
            f"unit, like '{example}GiB'."
        )
    return float(nbytes)


def activation_budget_bytes(budget: object, *, plain_bytes: float) -> float:
    """Return a budget for activations alone.

    Args:
        budget: a number of bytes, a text with a unit, or a share of what the step needs without actckpt (`"50%"`, 0.5).
        plain_bytes: what the step needs without actckpt.
    Raises:
        ValueError: it is none of these.
    """
    _check_no_plan(budget, "activation_budget")
    if isinstance(budget, str) and budget.strip() == "auto":
        raise ValueError("activation_budget='auto' is none: what is free counts for all memory. Pass budget='auto'.")
    share = _share(budget, "activation_budget", _ACTIVATION_FORMS)
    if share is not None:
        return float(math.ceil(share * plain_bytes / _ROUND_BYTES) * _ROUND_BYTES)
    _check_has_unit(budget, "activation_budget")
    if _is_float(budget) and 1 < budget <= 100:  # type: ignore[operator]
        raise ValueError(
            f"activation_budget={budget!r} is {budget:g} bytes. Pass {_ACTIVATION_FORMS}. Did you mean '{budget:g}%'?"
        )
    nbytes = parse_bytes(budget, what="activation_budget", forms=_ACTIVATION_FORMS)
    if not nbytes:
        raise ValueError(f"activation_budget={budget!r} is 0 bytes, and a step needs some. Pass {_ACTIVATION_FORMS}.")
    return float(nbytes)


def _is_float(budget: object) -> bool:
    return isinstance(budget, numbers.Real) and not isinstance(budget, numbers.Integral)


def _share(budget: object, what: str, forms: str) -> float | None:
    """Return the share in (0, 1] that a budget denotes; None: it is a size."""
    if isinstance(budget, str) and budget.strip().endswith("%"):
        percent = number_in(budget.strip()[:-1])
        if percent is None or not 0 < percent <= 100:
            raise ValueError(f"{what}={budget!r} is no share. Pass {forms}.")
        return percent / 100
    return float(budget) if _is_float(budget) and 0 < budget <= 1 else None  # type: ignore[arg-type, operator]


def _check_has_unit(budget: object, what: str) -> None:
    number = number_in(budget) if isinstance(budget, str) else None
    if number is None:
        return
    percent = 100 * number if number <= 1 else number
    share = f"{percent:.15g}%" if 0 < percent <= 100 else "50%"
    size = f"{number:g}" if 1 <= number <= 1024 else "24"
    raise ValueError(
        f"{what}={budget!r} has no unit. Pass a share like '{share}', a text like '{size}GiB' or '{size}GB', or bytes "
        "as a whole number."
    )


def _check_no_plan(budget: object, what: str) -> None:
    if isinstance(budget, Plan):
        raise ValueError(
            f"{what} is a Plan, which has a budget of its own. It is a policy: actckpt.apply(model, policy=plan)."
        )
    if isinstance(budget, os.PathLike) or (isinstance(budget, str) and budget.endswith(".json")):
        raise ValueError(
            f"{what}={os.fspath(budget)!r} is a path. A plan that was saved there is a policy: "
            f"actckpt.apply(model, policy=actckpt.Plan.load({os.fspath(budget)!r}))."
        )


def _total_bytes(device: torch.device, budget: object) -> float:
    accelerator = devices.accelerator_of(device.type)
    return float(total_host_bytes() if accelerator is None else _memory_info(accelerator, device, budget)[1])


def _free_bytes(device: torch.device, budget: object) -> float:
    accelerator = devices.accelerator_of(device.type)
    if accelerator is None:
        return float(available_host_bytes())
    return float(_memory_info(accelerator, device, budget)[0] + accelerator.unused_bytes(device))


def _memory_info(accelerator: Accelerator, device: torch.device, budget: object) -> tuple[int, int]:
    memory = accelerator.memory_info(device)
    if memory is None:
        raise ValueError(
            f"budget={budget!r} needs to know how much memory {device} has, and torch does not tell. Pass a text like "
            "'24GiB'."
        )
    return memory
