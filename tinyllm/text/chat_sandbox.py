"""The Jinja2 environment of chat templates: set up as Hugging Face does, its work bounded and its output traced.

Template source and variables flow in, text flows out that knows which of its characters the template itself wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from threading import Lock
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import Markup

from tinyllm.text.chat_limits import Budget, check_digits
from tinyllm.text.traced_text import TracedText, scaffold, scaffold_of


class TemplateRefusalError(TemplateError):
    """The template called `raise_exception`: it refuses the messages on purpose."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template, which is compiled at once; it renders for one thread at a time.

    Raises what Jinja2 raises for a template that cannot be compiled.
    """

    def __init__(self, source: str):
        self.literals: list[TracedText] = []
        self.budget = Budget()
        self._rendering = Lock()
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.filters.update(tojson=_tojson, join=_traced_join(self.filters["join"]))
        self.filters = {name: self._charged(name, function) for name, function in self.filters.items()}
        self.tests = {name: self._charged(name, function) for name, function in self.tests.items()}
        self.globals.update(raise_exception=_raise_exception, namespace=QuietNamespace)
        self.template: Template = self.from_string(source)

    def render(self, variables: Mapping[str, Any], now: datetime | None = None) -> TracedText:
        """The template's text; `strftime_now` tells `now`. Raises whatever the template's own code raises."""

        def strftime_now(form: str) -> str:
            return (now or datetime.now()).strftime(form)

        with self._rendering:
            self.budget = Budget(Budget().weigh(dict(variables)))
            try:
                context = self.template.new_context({**variables, "strftime_now": strftime_now})
                return self.concat(self.template.root_render_func(context))
            finally:
                self.budget = Budget()  # lets go of the containers that were weighed

    def concat(self, pieces: Iterable[str]) -> TracedText:
        pieces = list(pieces)
        self.budget.spend(sum(map(len, pieces)))
        return TracedText("").join(pieces)

    def charge(self, value: Any) -> Any:
        return self.budget.charge(value)

    def charge_reading(self, value: Any) -> Any:
        return self.budget.charge_reading(value)

    def charge_loop(self, items: Iterable[Any]) -> Iterable[Any]:
        return self.budget.charge_loop(items)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        subject = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "") if isinstance(subject, str | bytes | int) else ""
        if name == "join" and args:
            args = (list(args[0]), *args[1:])
        if __obj is __self.globals["lipsum"]:
            name = "lipsum"
        __self.budget.before_call(name, subject, args, kwargs)
        return __self.charge(super().call(__context, __obj, *args, **kwargs))

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter or test `function`, paying before and after."""
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context or environment that Jinja2 puts first

        @wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            subject, *rest = args[passed:]
            subject = self.budget.charge_subject(name, subject)
            self.budget.before_call(name, subject, rest, kwargs)
            return self.charge(function(*args[:passed], subject, *rest, **kwargs))

        return charged

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.before_operator(operator, left, right)
        return self.charge(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        return self.charge(value) if isinstance(argument, slice) else value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None or isinstance(value.__self__, Markup):
            return wrapped
        text, formatter = value.__self__, TracingFormatter(self)
        if value.__name__ == "format_map":
            return lambda mapping: formatter.vformat(text, (), mapping)
        return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)


class TracingCodeGenerator(CodeGenerator):
    """Compiles a template's literals to scaffold, and sends loops and container displays by the budget."""

    environment: ChatEnvironment

    def _literal(self, text: str) -> str:
        self.environment.literals.append(scaffold(text))
        return f"environment.literals[{len(self.environment.literals) - 1}]"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if type(value) is str:  # Markup stays Markup
            self.write(self._literal(value))
        else:
            super().visit_Const(node, frame)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _visit_charged(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.charge(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._visit_charged(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._visit_charged(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._visit_charged(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} environment.charge_reading(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        charge_loop = nodes.EnvironmentAttribute("charge_loop")
        node.iter = nodes.Call(charge_loop, [node.iter], [], None, None).set_lineno(node.lineno)
        super().visit_For(node, frame)


ChatEnvironment.code_generator_class = TracingCodeGenerator


class TracingFormatter(SandboxedFormatter):
    """`str.format` that follows the format string's characters into the result."""

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        traced = scaffold if all(scaffold_of(format_string)) else TracedText
        pieces: list[str] = []
        unnamed = 0
        for literal, field, spec, conversion in self.parse(format_string):
            pieces.append(traced(literal))
            if field is None:
                continue
            if not field or field[0] in ".[":
                field, unnamed = f"{unnamed}{field}", unnamed + 1
            value = self.convert_field(self.get_field(field, args, kwargs)[0], conversion)
            if "{" in spec:
                spec = self.vformat(spec, args, kwargs)
            check_digits(spec)
            pieces.append(value if isinstance(value, str) and not spec else self.format_field(value, spec))
        return self._env.concat(pieces)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; for rendering it emits its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja2's own convention)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_emit"), [], [], body).set_lineno(lineno)

    def _emit(self, caller: Callable[[], str]) -> str:
        return caller()


class QuietNamespace(Namespace):
    """A namespace whose text does not spell out its content, which may hold other namespaces without end."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _traced_join(join: Callable[..., str]) -> Callable[..., str]:
    @pass_eval_context
    def traced_join(eval_ctx: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        items = list(value)
        separator = str(d)
        if not isinstance(separator, TracedText):
            separator = TracedText(separator)
        eval_ctx.environment.budget.before_call("join", separator, [items], {})
        return join(eval_ctx, items, separator, attribute)

    return traced_join
