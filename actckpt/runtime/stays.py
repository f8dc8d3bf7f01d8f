"""Which saved tensors must stay where they are: rules of packages that the runtime does not know."""

from collections.abc import Callable

from torch import Tensor

__all__ = ["Rule", "add_rule", "must_stay", "remove_rule"]

#: Asked when a tensor is packed, on the stream that is current there: whether it must not be moved.
Rule = Callable[[Tensor], bool]

#: What `add_rule` was given.
rules: list[Rule] = []


def add_rule(rule: Rule) -> None:
    """Ask `rule` about every tensor from now on."""
    if rule not in rules:
        rules.append(rule)


def remove_rule(rule: Rule) -> None:
    """Undo `add_rule`.

    Raises:
        ValueError: `rule` was not added.
    """
    rules.remove(rule)


def must_stay(tensor: Tensor) -> bool:
    """Whether any rule wants the tensor to stay."""
    return any(rule(tensor) for rule in rules)
