"""What people may write for a budget, in bytes."""

from __future__ import annotations

import math
import numbers
import os

import torch

from actckpt._core import devices
from actckpt._core.devices import Accelerator
from actckpt._offload.limits import available_host_bytes, total_host_bytes
from actckpt._text.sizes import format_bytes, number_in, parse_bytes
from actckpt.planner.plans import Plan

__all__ = ["activation_budget_bytes", "budget_bytes"]

#: Fewer bytes were meant as something else: 24 is not a budget, "24GiB" is.
_LEAST_BYTES = 2**20
_FORMS = "bytes as a whole number, a text like '24GiB', a share of the device in (0, 1], or 'auto'"
_ACTIVATION_FORMS = "a percentage like '50%', a text like '2GiB', or bytes as a whole number"
#: Shares of predicted bytes are rounded up to this many.
_ROUND_BYTES = 2**10
#: Of what is free, `"auto"` leaves this much.
_AUTO = 0.95


def budget_bytes(budget: object, device: torch.device, *, held_bytes: float) -> float:
    """Return a budget for all memory.

    Args:
        budget: a number of bytes, a text with a unit, a share of the device in (0, 1], or `"auto"`.
        held_bytes: what this process holds already, by the same measure as the peak.
    Raises:
        ValueError: it is none of these, or a share of memory whose size torch does not tell.
    """
    _check_no_plan(budget, "budget")
    if isinstance(budget, str):
        text = budget.strip()
        if text == "auto":
            return _AUTO * (_free_bytes(device, budget) + held_bytes)
        if text.endswith("%"):
            raise ValueError(_is_percentage(budget))
        if text[-1:].isdigit():
            raise ValueError(_has_no_unit(budget))
        return _checked(parse_bytes(budget, what="budget", forms=_FORMS), budget)
    is_float = isinstance(budget, numbers.Real) and not isinstance(budget, (numbers.Integral, bool))
    if is_float and 0.0 < float(budget) <= 1.0:  # type: ignore[arg-type]
        return float(budget) * _total_bytes(device, budget)  # type: ignore[arg-type]
    return _checked(parse_bytes(budget, what="budget", forms=_FORMS), budget)


def activation_budget_bytes(budget: object, *, plain_bytes: float) -> float:
    """Return a budget for activations alone.

    Args:
        budget: a number of bytes, a text with a unit, or a percentage of what the step needs without actckpt.
        plain_bytes: that.
    Raises:
        ValueError: it is none of these.
    """
    _check_no_plan(budget, "activation_budget")
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1]) / 100
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ValueError(f"activation_budget={budget!r} is no share. Pass a percentage above 0, up to '100%'.")
        return float(math.ceil(share * plain_bytes / _ROUND_BYTES) * _ROUND_BYTES)
    if isinstance(budget, float) and 0 < budget <= 1:
        raise ValueError(
            f"activation_budget={budget!r} is no size. For a share pass a percentage: '{100 * budget:g}%'."
        )
    if isinstance(budget, str) and budget.strip() == "auto":
        raise ValueError("activation_budget='auto' is none: what is free counts for all memory. Pass budget='auto'.")
    if isinstance(budget, str) and (number := number_in(budget)) is not None:
        share = 100 * number if 0 < number < 1 else number
        example = f"{share:.15g}" if 0 < share <= 100 else "50"
        raise ValueError(
            f"activation_budget={budget!r} has no unit. Pass a percentage like '{example}%', a text like '2GiB', or "
            "bytes as a whole number."
        )
    nbytes = parse_bytes(budget, what="activation_budget", forms=_ACTIVATION_FORMS)
    if not nbytes:
        raise ValueError(f"activation_budget={budget!r} is 0 bytes, and a step needs some. Pass {_ACTIVATION_FORMS}.")
    return float(nbytes)


def _is_percentage(budget: str) -> str:
    percent = number_in(budget.strip()[:-1])
    if percent is None or not 0 < percent <= 100:
        return (
            f"budget={budget!r} is no share. For one of the device pass a number in (0, 1], for one of the activations "
            "activation_budget= with a percentage up to '100%'."
        )
    return (
        f"budget={budget!r} is a percentage. For a share of the device pass budget={percent / 100:g}, for one of the "
        f"activations activation_budget='{percent:g}%'."
    )


def _has_no_unit(budget: str) -> str:
    number = number_in(budget)
    if number is not None and 0 < number <= 1:
        return f"budget={budget!r} has no unit. For a share of the device pass the number: budget={number:g}."
    example = "24" if number is None or not 1 < number < 2**20 else f"{number:g}"
    return (
        f"budget={budget!r} has no unit. Pass a text like '{example}GiB' or '{example}GB', or bytes as a whole number."
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


def _checked(nbytes: int, budget: object) -> float:
    if nbytes < _LEAST_BYTES:
        example = nbytes if isinstance(budget, int) and 1 < nbytes < 1024 else 24
        raise ValueError(
            f"budget={budget!r} is {nbytes} bytes, less than {format_bytes(_LEAST_BYTES)}. Pass a text with a larger "
            f"unit, like '{example}GiB'."
        )
    return float(nbytes)


def _total_bytes(device: torch.device, budget: object) -> float:
    accelerator = devices.accelerator_of(device.type)
    return float(total_host_bytes() if accelerator is None else _memory_info(accelerator, device, budget)[1])


def _free_bytes(device: torch.device, budget: object) -> float:
    accelerator = devices.accelerator_of(device.type)
    if accelerator is None:
        return float(available_host_bytes())
    return float(_memory_info(accelerator, device, budget)[0] + accelerator.unused_bytes(device))


def _memory_info(accelerator: Accelerator, device: torch.device, budget: object) -> tuple[int, int]:
    found = accelerator.memory_info(device)
    if found is None:
        raise ValueError(
            f"budget={budget!r} needs to know how much memory {device} has, and torch does not tell. Pass a text like "
            "'24GiB'."
        )
    return found
