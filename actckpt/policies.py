"""Policies: which saved tensors are kept, recomputed or offloaded.

Every form that `region`, `checkpoint` and `apply` accept becomes a `Choice`, which the recorder queries.
"""

import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from actckpt._core import torch_private
from actckpt._replay.choice import Choice, Table, is_place
from actckpt._replay.operators import operator_of
from actckpt._text import operator_names
from actckpt._text.operator_names import Operators
from actckpt._text.places import Place, Selector
from actckpt._text.presets import OTHER_NAMES, PRESETS
from actckpt._text.suggestions import did_you_mean
from actckpt.action import Action, SavedTensorInfo
from actckpt.planner.plans import Plan

__all__ = [
    "PerOp",
    "Policy",
    "PolicyName",
    "PresetName",
    "TorchPolicy",
]

#: Names with these prefixes are operators; other namespaces may also be module names.
_TORCH_NAMESPACES = ("aten.", "prims.")
_NAMES = tuple(action.value for action in Action)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)

_BUDGET = re.compile(r"auto|\s*[\d.]+\s*(%|[KMGT]i?B?)\s*", re.IGNORECASE)
#: Advice for a saved plan.
_OF_A_PLAN = "A plan runs on a whole model: actckpt.apply(model, policy=actckpt.Plan.{})."

_ACTION_OF_TORCH = {
    CheckpointPolicy.MUST_SAVE: Action.KEEP,
    CheckpointPolicy.PREFER_SAVE: Action.KEEP,
    CheckpointPolicy.MUST_RECOMPUTE: Action.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Action.RECOMPUTE,
    **{
        getattr(CheckpointPolicy, name): action
        for name, action in {"MUST_CPU_OFFLOAD": Action.OFFLOAD, "PREFER_CPU_OFFLOAD": Action.PREFER_OFFLOAD}.items()
        if hasattr(CheckpointPolicy, name)
    },
    True: Action.KEEP,
    False: Action.RECOMPUTE,
}


#: The actions by name.
PolicyName = Literal["keep", "recompute", "offload", "prefer_offload"]

#: The results of some operators are kept, the rest is recomputed.
PresetName = Literal["attention", "matmuls", "dots_with_no_batch_dims"]


class PerOp:
    """A policy by operator.

    Args:
        actions: by operator: `torch.ops.aten.mm.default`, `torch.ops.aten.mm` (all its overloads), or a
            name (`"aten.mm"`).
        default: for values of all other operators.
    Raises:
        ValueError: an operator that does not exist, with similar names, or a value that is no `Action`.

    Example::

        >>> import torch, actckpt
        >>> policy = actckpt.policies.PerOp({torch.ops.aten.mm: actckpt.Action.OFFLOAD})
        >>> policy.default
        <Action.RECOMPUTE: 'recompute'>
    """

    def __init__(
        self,
        actions: Mapping[Any, Action | PolicyName],
        default: Action | PolicyName = Action.RECOMPUTE,
    ) -> None:
        if not isinstance(actions, Mapping):
            raise ValueError(
                f"PerOp: {actions!r} is a {type(actions).__name__}. Pass a dict {{operator: action}}; to keep what "
                "some operators make, pass the list of them itself as policy."
            )
        self.actions: dict[Any, Action] = {
            overload: _action(action, f"the action of {op}")
            for op, action in actions.items()
            for overload in _overloads(op)
        }
        #: The same by name.
        self.names: dict[str, Action] = {operator_of(op).name: action for op, action in self.actions.items()}
        self.default: Action = _action(default, "default")
        #: Whether any action offloads.
        self.moves: bool = not {self.default, *self.actions.values()} <= {Action.KEEP, Action.RECOMPUTE}

    def __getstate__(self) -> dict[str, Any]:
        return operator_names.portable(self.__dict__)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        actions = ", ".join(f"{op}: {action.value}" for op, action in self.actions.items())
        return f"PerOp({{{actions}}}, default={self.default.value})"


class TorchPolicy(Protocol):
    """A policy function of `torch.utils.checkpoint.create_selective_checkpoint_contexts`."""

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Any, /, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy | bool: ...


#: Every form of a policy, documented in `region`.
Policy = (
    PolicyName
    | PresetName
    | Action
    | Operators
    | PerOp
    | Mapping[Any, Action | PolicyName]
    | Callable[[SavedTensorInfo], Action | PolicyName]
    | TorchPolicy
)


def choice_of(policy: Any) -> Choice:
    """Return the recorder's form of a policy.

    Raises:
        ValueError: it is not a policy.
    """
    if isinstance(policy, str) and policy in PRESETS:
        return _preset(policy)
    if isinstance(policy, (str, Action, CheckpointPolicy)):
        return Choice(default=_action(policy, "policy"))
    if isinstance(policy, (list, tuple)):
        return _keeping(tuple(policy))
    if isinstance(policy, PerOp):
        return Choice(policy.names, policy.default, operators=tuple(policy.actions), is_per_operator=True)
    if isinstance(policy, Mapping):
        entries = tuple(policy.items())
        try:
            return _tabulated(entries)
        except TypeError:  # unhashable: raises what is wrong with it
            if "plan_version" in policy:
                raise ValueError(f"policy is a plan as plain data. {_OF_A_PLAN.format('from_dict(...)')}") from None
            return _tabulated.__wrapped__(entries)
    mistaken = _mistaken_for_a_policy(policy)
    if mistaken:
        raise ValueError(f"policy is {mistaken}")
    if isinstance(policy, Iterable):
        return _keeping(tuple(policy))
    if callable(policy):
        if is_torch_policy(policy):
            return Choice(after_call=functools.partial(_ask_torch, policy))
        return Choice(for_value=lambda info: _ask_value(policy, info))
    raise ValueError(
        f"policy={policy!r} is a {type(policy).__name__}. Pass 'keep', 'recompute', 'offload', 'prefer_offload', "
        "'attention', 'matmuls', an Action, a list of operators to keep, a dict {place: action}, "
        "actckpt.policies.PerOp, or a function."
    )


def _mistaken_for_a_policy(policy: Any) -> str:
    """Return what an object is that looks like a policy but is none; empty if it may be one."""
    if isinstance(policy, Plan):
        return "a Plan, which is for the blocks of a whole model: actckpt.apply(model, policy=plan)."
    if isinstance(policy, os.PathLike):
        return f"a path. {_of_a_plan_in(os.fspath(policy))}"
    if isinstance(policy, _OPERATORS):
        return f"one operator, {policy}. Pass a list of the operators to keep: policy=[torch.ops.{policy}]."
    if isinstance(policy, torch.nn.Module):
        return f"a module, {type(policy).__name__}. To run it in a region: actckpt.region()(module)."
    if isinstance(policy, type):
        return (
            f"a class, {policy.__name__}. Policies go by operator: pass a list of the operators to keep, such as "
            "['aten.mm']. To checkpoint the modules of a class: actckpt.apply(model, blocks=TheClass)."
        )
    if isinstance(policy, torch.Tensor):
        return f"a tensor of shape {tuple(policy.shape)}. To run code in a region: with actckpt.region(): y = layer(x)."
    if isinstance(policy, types.MethodType) and policy.__func__ is getattr(type(policy.__self__), "forward", None):
        return f"the forward of a {type(policy.__self__).__name__}. To run it in a region: actckpt.region()(module)."
    name = getattr(policy, "__name__", "")
    if any(getattr(functions, name, None) is policy for functions in (torch, torch.nn.functional)):
        return f"a function of torch, {name}. Pass a list of the operators to keep, such as ['aten.mm', 'aten.addmm']."
    return ""


@functools.lru_cache(maxsize=256)
def _keeping(ops: tuple[Any, ...]) -> Choice:
    operators = tuple(dict.fromkeys(overload for op in ops for overload in _overloads(op)))
    kept = {operator_of(overload).name: Action.KEEP for overload in operators}
    return Choice(kept, Action.RECOMPUTE, operators=operators)


@functools.cache
def _preset(name: str) -> Choice:
    kept = {overload: Action.KEEP for operator in PRESETS[name] for overload in _overload_names(operator)}
    return Choice(kept, Action.RECOMPUTE, operators=tuple(kept), preset=name)


def _overload_names(name: str) -> list[str]:
    """Return the names of an operator's overloads; if its package is not imported, the expected one."""
    namespace, _, base = name.partition(".")
    if namespace == "higher_order":
        return [name]
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return [f"{name}.{overload}" for overload in (packet.overloads() if packet is not None else ["default"])]


@functools.lru_cache(maxsize=256)
def _tabulated(entries: tuple[tuple[Any, Any], ...]) -> Choice:
    actions: dict[str, Action] = {}
    for key, action in entries:
        text = _entry(key)
        actions.pop(text, None)  # the last entry wins, at its position
        actions[text] = _action(action, f"the action of {text}")
    return Choice(operators=tuple(actions), table=Table(actions, Action.RECOMPUTE))


def _entry(key: Any) -> str:
    """Return the text of a table's key; raises if it is invalid, or names an operator that does not exist."""
    if isinstance(key, torch._ops.HigherOrderOperator):
        return f"higher_order.{key}"
    if isinstance(key, (Place, *_OPERATORS)):
        return str(key)
    if not isinstance(key, str):
        raise ValueError(
            f"policy: the key {key!r} of the dict is a {type(key).__name__}. Pass an actckpt.Place, its text, or a "
            "selector such as 'layers.*.mlp::aten.mm'."
        )
    if is_place(key):
        operator: str | None = Place.parse(key).operator
    else:
        selector = Selector.parse(key)
        operator = selector.operator or selector.name
    if operator is not None and operator.startswith(_TORCH_NAMESPACES) and not operator_names.exists(operator):
        near = operator_names.nearest(operator)
        raise ValueError(f"policy: {key!r} names an operator that does not exist, {operator}. Nearest: {near}.")
    return key


def selective_choice(context: object) -> Choice | None:
    """Return the choice behind the first context of `create_selective_checkpoint_contexts`, None for other contexts."""
    policy = torch_private.selective_policy(context)
    return None if policy is None else choice_of(policy)


def is_torch_policy(policy: Callable[..., Any]) -> bool:
    """Whether a function takes (ctx, op, *args, **kwargs), rather than one SavedTensorInfo."""
    try:
        parameters = inspect.signature(policy).parameters.values()
    except ValueError:  # a builtin without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return len(required) > 1 or takes_more


def _ask_torch(policy: Callable[..., Any], op: Any, args: Any, kwargs: Any, result: Any) -> Action:
    context: Any = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = result  # a keyword from torch 2.13 on
    answer = policy(context, op, *args, **kwargs)
    try:
        return _ACTION_OF_TORCH[answer]
    except (KeyError, TypeError):
        raise ValueError(
            f"The policy returned {answer!r}, a {type(answer).__name__}, for {op}. A function that takes (ctx, op, "
            "*args, **kwargs) returns a torch.utils.checkpoint.CheckpointPolicy."
        ) from None


def _ask_value(policy: Callable[..., Any], info: SavedTensorInfo) -> Action:
    answer = policy(info)
    if isinstance(answer, Action):
        return answer
    if isinstance(answer, str) and answer in _NAMES:
        return Action(answer)
    raise ValueError(
        f"The policy returned {answer!r}, a {type(answer).__name__}, for a saved tensor of {info.op or 'the region'} "
        f"of shape {info.shape}. A function of a SavedTensorInfo returns an actckpt.Action, or one of "
        f"{', '.join(map(repr, _NAMES))}."
    )


def _of_a_plan_in(path: str | bytes) -> str:
    return _OF_A_PLAN.format(f"load({path!r})")


def _action(action: Any, what: str) -> Action:
    if isinstance(action, Action):
        return action
    if isinstance(action, str) and action in _NAMES:
        return Action(action)
    if isinstance(action, CheckpointPolicy):
        raise ValueError(
            f"{what}=CheckpointPolicy.{action.name} is what torch's policy functions return. Pass "
            f"actckpt.{_ACTION_OF_TORCH[action]}, or a function (ctx, op, *args, **kwargs) that returns it."
        )
    text = action if isinstance(action, str) else ""
    if what == "policy" and _BUDGET.fullmatch(text):
        keyword = "activation_budget" if text.strip().endswith("%") else "budget"
        raise ValueError(f"policy={text!r} is a budget. Pass {keyword}={text!r} in the place of the policy.")
    if text.endswith(".json") or "/" in text:
        raise ValueError(f"{what}={text!r} is a path. {_of_a_plan_in(text)}")
    if ("." in text or "::" in text) and not text.startswith("Action."):
        raise ValueError(f"{what}={text!r} names an operator. Pass a list of the operators to keep: [{text!r}].")
    known = (*_NAMES, *PRESETS) if what == "policy" else _NAMES
    word = str(action).lower().removeprefix("action.")
    near = did_you_mean([OTHER_NAMES.get(word, word)], known, show=repr)
    if what == "policy" and not near and operator_names.exists(f"aten.{text}"):
        raise ValueError(f"policy={text!r} names an operator. Pass a list of the operators to keep: ['aten.{text}'].")
    raise ValueError(
        f"{what}={action!r} is not an action. Pass one of {', '.join(map(repr, known))}, or an actckpt.Action.{near}"
    )


def _overloads(op: Any) -> list[Any]:
    """Return the operators for `op`: an overload, a higher-order operator, a packet, or the name of one."""
    if isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if not isinstance(op, str):
        raise ValueError(
            f"policy: {op!r} is a {type(op).__name__}, not an operator. Pass for example torch.ops.aten.mm.default, "
            "torch.ops.aten.mm, or 'aten.mm'."
        )
    return _overloads(operator_names.named(op))
