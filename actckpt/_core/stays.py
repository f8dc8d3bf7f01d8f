"""Which saved tensors must stay where they are, or be given back as aliases: rules of packages not known here."""

from collections.abc import Callable

from torch import Tensor

__all__ = ["AliasRule", "Rule", "add_alias_rule", "add_rule", "alias_rules", "must_stay", "remove_rule"]

#: Asked when a tensor is packed, on the stream that is current there: whether it must not be moved.
Rule = Callable[[Tensor], bool]
#: Asked when a tensor is packed: whether backward may clear what it is given, so that it must not get the very object.
AliasRule = Callable[[], bool]

#: What `add_rule` was given.
rules: list[Rule] = []
#: What `add_alias_rule` was given.
alias_rules: list[AliasRule] = []


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


def add_alias_rule(rule: AliasRule) -> None:
    """Ask `rule` for every saved tensor that needs no grad, from now on."""
    if rule not in alias_rules:
        alias_rules.append(rule)


def must_stay(tensor: Tensor) -> bool:
    """Whether any rule wants the tensor to stay."""
    return any(rule(tensor) for rule in rules)
