"""Turns a kernel written with compile-time parameters into a plain function for Numba, by rewriting its syntax tree.

`for i in static(range(4))` is unrolled, `if static(flag)` keeps one branch, `acc[i]` with a constant index becomes a
variable of its own (a register), and parameters are replaced by their values.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from numba import njit

# A function of the vocabulary: it disappears into the kernel that uses it.
inline = njit(forceinline=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def static(value: Any) -> Any:
    """Marks an expression of compile-time values; `specialize` evaluates it."""
    return value


@functools.cache
def _source_tree(function: Callable) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function} is not a plain function")
    tree.decorator_list = []
    return tree


class _Specializer(ast.NodeTransformer):
    def __init__(self, names: dict[str, Any], constants: dict[str, Any]):
        self.names, self.constants = names, dict(constants)

    def _evaluate(self, node: ast.expr) -> Any:
        expression = ast.fix_missing_locations(ast.Expression(copy.deepcopy(node)))
        return eval(compile(expression, "<static>", "eval"), {**self.names, **self.constants})

    def _is_static(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "static"

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            result.extend(new if isinstance(new, list) else [new])
        return result

    def visit_For(self, node: ast.For) -> Any:
        if not self._is_static(node.iter):
            node.target, node.iter = self.visit(node.target), self.visit(node.iter)
            node.body = self._block(node.body)
            return node
        name = node.target.id  # type: ignore[attr-defined]
        outer, result = self.constants.get(name), []
        for value in self._evaluate(node.iter):
            self.constants[name] = value
            result += self._block(copy.deepcopy(node.body))
        self.constants.pop(name, None)
        if outer is not None:
            self.constants[name] = outer
        return result

    def visit_If(self, node: ast.If) -> Any:
        if self._is_static(node.test):
            return self._block(node.body if self._evaluate(node.test) else node.orelse)
        node.test = self.visit(node.test)
        node.body, node.orelse = self._block(node.body), self._block(node.orelse)
        return node

    def visit_While(self, node: ast.While) -> Any:
        node.test, node.body = self.visit(node.test), self._block(node.body)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        if self._is_static(node):
            return ast.copy_location(ast.Constant(self._evaluate(node)), node)
        node.args = [self.visit(a) for a in node.args]
        node.func = self.visit(node.func)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        index = self._evaluate(node.slice)
        parts = index if isinstance(index, tuple) else (index,)
        name = "_".join([node.value.id, *map(str, parts)])  # type: ignore[attr-defined]
        return ast.copy_location(ast.Name(name, node.ctx), node)

    def visit_Name(self, node: ast.Name) -> Any:
        value = self.constants.get(node.id)
        if isinstance(node.ctx, ast.Load) and isinstance(value, bool | int | float):
            return ast.copy_location(ast.Constant(value), node)
        return node


def specialize(function: Callable, **constants: Any) -> Callable:
    """`function` with the given compile-time names fixed: numbers become literals, functions become globals."""
    tree = copy.deepcopy(_source_tree(function))
    names = {**function.__globals__, **constants}
    transformer = _Specializer(names, constants)
    tree.body = transformer._block(tree.body)
    tree.returns = None
    for argument in tree.args.args:
        argument.annotation = None
    module = ast.fix_missing_locations(ast.Module([tree], []))
    space = dict(names)
    exec(compile(module, inspect.getfile(function), "exec"), space)
    return space[function.__name__]
