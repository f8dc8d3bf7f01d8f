"""What is changed in TransformerEngine's sources while they are loaded; lines keep their numbers."""

from __future__ import annotations

import ast

__all__ = ["rewritten"]

#: Of torch: the host's generator is another one than the device's, which is torch's own here.
_HOST_CALLS = ("get_rng_state", "set_rng_state")
#: Calls that mean the GPU where they are given no device.
_MEANS_THE_DEVICE = ("is_autocast_enabled",)


def rewritten(source: bytes, path: str) -> ast.Module:
    """Return the syntax tree of a source file, changed."""
    tree: ast.Module = _OnCpu().visit(ast.parse(source, path))
    return ast.fix_missing_locations(tree)


class _OnCpu(ast.NodeTransformer):
    """Put the CPU in the place of the GPU, and `_device` in that of torch.cuda."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("cpu") if node.value == "cuda" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _is_torch(node, "cuda"):
            return _name("_device")
        if _is_torch(node.value, "version") and node.attr == "cuda":
            return ast.Constant("12.9")
        if _is_torch(node.value, "jit") and node.attr == "script":  # saves other tensors once it has watched some calls
            return ast.Attribute(_name("_device"), "as_written", ast.Load())
        self.generic_visit(node)
        node.attr = {"is_cuda": "is_cpu", "cuda": "cpu"}.get(node.attr, node.attr)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.name = "is_cpu" if node.name == "is_cuda" else node.name
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda":
            node.module = "te_on_cpu.device"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if any(_is_torch(node.func, name) for name in _HOST_CALLS):
            node.func = ast.Attribute(_name("_device"), f"host_{node.func.attr}", ast.Load())  # type: ignore[attr-defined]
        elif any(_is_torch(node.func, name) for name in _MEANS_THE_DEVICE) and not node.args:
            node.args = [ast.Constant("cpu")]
        elif _is_torch(node.func, "device"):
            node.args = node.args[:1]  # the CPU has no index
        return node


def _is_torch(node: ast.AST, name: str) -> bool:
    """Whether this is `torch.name`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    )


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())
