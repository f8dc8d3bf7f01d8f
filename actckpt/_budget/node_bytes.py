"""What a node of the graph of autograd needs while backward runs it, by its name and the sizes of its gradients."""

from __future__ import annotations

from typing import Any

import torch

from actckpt._core import torch_private

__all__ = [
    "MAKE_MORE",
    "beside_bytes",
    "gives_views",
    "gives_what_it_takes",
    "is_of_function",
    "is_of_leaf",
    "is_view",
    "running_bytes",
    "saves_constants",
    "saves_operands",
    "saves_result",
    "taken_bytes",
]

#: What these nodes give back are views of the gradient of their result.
_GIVE_VIEWS = ("CatBackward", "StackBackward")
#: And these give back what they take, or views of that.
_GIVE_WHAT_THEY_TAKE = (
    *("AddBackward", "AliasBackward", "CatBackward", "ExpandBackward", "PermuteBackward", "ReshapeAliasBackward"),
    *("SqueezeBackward", "StackBackward", "TBackward", "TransposeBackward"),
    *("UnsafeViewBackward", "UnsqueezeBackward", "ViewBackward"),
)
#: These are several operators. By how many tensors of the larger size they make on the way; most others are one kernel.
#: Measured: tests/unit/budget/test_node_bytes.py has all of which torch has functions.
MAKE_MORE: dict[int, tuple[str, ...]] = {
    1: (
        *("AbsBackward", "AmaxBackward", "AminBackward", "BinaryCrossEntropyBackward"),
        *("BinaryCrossEntropyWithLogitsBackward", "ClampBackward", "ClampMaxBackward", "ClampMinBackward"),
        *("CopysignBackward", "CoshBackward", "DigammaBackward", "DivBackward", "Exp2Backward", "Expm1Backward"),
        *("FmaxBackward", "FminBackward", "FmodBackward", "GatherBackward", "HypotBackward", "I0Backward"),
        *("IndexBackward", "IndexSelectBackward", "LerpBackward", "LgammaBackward"),
        *("LinalgEighBackward", "LinalgSolveExBackward", "LinalgSolveTriangularBackward", "LinalgSvdBackward"),
        *("Log10Backward", "Log1PBackward", "Log2Backward", "MaskedSelectBackward", "MaxBackward", "MaximumBackward"),
        *("MedianBackward", "MinBackward", "MinimumBackward", "NanToNumBackward", "NanmedianBackward"),
        *(
            "NansumBackward",
            "NextafterBackward",
            "NormBackward",
            "PolygammaBackward",
            "PowBackward2",
            "PreluKernelBackward",
        ),
        *("RemainderBackward", "SinBackward", "SinhBackward", "SortBackward", "SqrtBackward", "StdBackward"),
        *("TakeBackward", "UnsafeMaskedIndexBackward", "VarBackward"),
    ),
    2: (
        *("AsStridedBackward", "AtanBackward", "CdistBackward", "CholeskyInverseBackward", "CholeskySolveBackward"),
        *(
            "CosBackward",
            "CumsumBackward",
            "DistBackward",
            "LdexpBackward",
            "LinalgInvExBackward",
            "LogsumexpBackward",
            "PowBackward0",
        ),
        *("ReciprocalBackward", "RsqrtBackward", "SpecialXlog1PyBackward", "TanBackward", "TraceBackward"),
        "XlogyBackward",
    ),
    3: (
        *("AcoshBackward", "AddcdivBackward", "AsinhBackward", "AtanhBackward", "LinalgDetBackward"),
        *("Logaddexp2Backward", "LogaddexpBackward", "SpecialEntrBackward", "SpecialErfcxBackward"),
    ),
    4: (
        *("AsinBackward", "ErfBackward", "ErfcBackward", "ErfinvBackward", "LinalgVectorNormBackward", "PowBackward1"),
        *("SpecialI0EBackward", "SpecialNdtriBackward"),
    ),
    5: ("AcosBackward", "Atan2Backward", "ProdBackward", "SpecialI1Backward"),
    6: ("MvlgammaBackward", "SpecialLogNdtrBackward"),
    7: ("LogcumsumexpBackward", "SincBackward", "SpecialI1EBackward"),
    8: ("CumprodBackward", "LinalgMatrixExpBackward", "RenormBackward"),
    12: ("LinalgPinvBackward",),
}
#: What operators make beside their results, and how many times their bytes that is (integers have 64 bits).
_SAVED_BESIDE = {"_raw_saved_buffer": 1, "_raw_saved_index": 2, "_raw_saved_indices": 2}
#: Products of matrices.
_MATRICES = ("AddmmBackward", "BaddbmmBackward", "BmmBackward", "MmBackward")
#: The results of these are views of what they were given.
_VIEWS = (
    *("AliasBackward", "AsStridedBackward", "DiagonalBackward", "ExpandBackward", "PermuteBackward"),
    *("ReshapeAliasBackward", "SelectBackward", "SliceBackward", "SplitBackward", "SplitWithSizesBackward"),
    *("SqueezeBackward", "TBackward", "TransposeBackward", "UnbindBackward", "UnfoldBackward", "UnsafeSplitBackward"),
    *("UnsafeViewBackward", "UnsqueezeBackward", "ViewBackward", "ViewAsComplexBackward", "ViewAsRealBackward"),
)


def taken_bytes(node: Any) -> int:
    """Return the bytes of the gradients that a node takes, which are as large as its results."""
    return sum(torch_private.gradient_bytes(node, index) for index in range(torch_private.num_gradients(node)))


def running_bytes(node: Any) -> tuple[int, int]:
    """Return the bytes of the gradients that a node takes and gives, without what it saved, and those left.

    Returns:
        While it runs, with what it makes on the way, and once it has run.
    """
    taken = taken_bytes(node)
    if gives_what_it_takes(node):
        return taken, taken
    given = sum(torch_private.gradient_bytes(*edge) for edge in node.next_functions if not is_of_leaf(edge[0]))
    name = _name(node)
    num_more = next((num for num, names in MAKE_MORE.items() if name.startswith(names)), 0)
    return taken + given + num_more * max(taken, given), given


def gives_what_it_takes(node: Any) -> bool:
    """Return whether the gradients that a node gives are the one that it takes, or views of it."""
    return _name(node).startswith(_GIVE_WHAT_THEY_TAKE)


def gives_views(node: Any) -> bool:
    """Return whether the gradients that a node gives are parts of the one that it takes."""
    return _name(node).startswith(_GIVE_VIEWS)


def is_view(node: Any) -> bool:
    """Return whether the results of a node are views of what it was given."""
    return _name(node).startswith(_VIEWS)


def saves_result(node: Any) -> bool:
    """Return whether a node saved its result, or may have."""
    # Of the type: the node's own would unpack what was saved.
    return hasattr(type(node), "_saved_result") or is_of_function(node)


def is_of_function(node: Any) -> bool:
    """Return whether a node is of a `torch.autograd.Function`, of which nothing tells what it saved."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def beside_bytes(node: Any) -> int:
    """Return the bytes of what a node saved that its operator made beside its results."""
    times = (_SAVED_BESIDE.get(name, 0) for name in dir(type(node)) if name.startswith("_raw_saved_"))
    return sum(times) * taken_bytes(node)


def saves_constants(node: Any) -> bool:
    """Return whether a node saved what it was given that has no gradient, or may have. Weights were there before."""
    return _saves_any(node) and not _name(node).startswith(_MATRICES)


def saves_operands(node: Any) -> bool:
    """Return whether a node saved what it was given and has a gradient, or may have."""
    if _name(node).startswith(_MATRICES) and any(factor is None for factor, _ in node.next_functions[-2:]):
        return False  # each factor is saved for the gradient of the other one
    return _saves_any(node)


def _saves_any(node: Any) -> bool:
    return any(name.startswith("_raw_saved_") and name != "_raw_saved_result" for name in dir(type(node)))


def is_of_leaf(node: Any) -> bool:
    """Return whether a node adds up the gradient of a leaf, also of a transposed one: they count with parameters."""
    if type(node).__name__.startswith("TBackward"):
        node = node.next_functions[0][0]
    return node is None or type(node).__name__ == "AccumulateGrad"


def _name(node: Any) -> str:
    return str(type(node).name(node))
