"""The Jinja environment of chat templates: that of transformers, with tracked text.

Templates see the extensions, filters and globals of ``transformers.utils.chat_template_utils``.
All literals of a template are `TrackedText`, and joining strings keeps their masks.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import filters, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from services.tokenizer.tracked_text import TrackedText, format_fields, join


class _TrackedLiterals(CodeGenerator):
    """Compiles the literals of a template to calls of `TemplateEnvironment.literal`."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        self.write(_literal(node.as_const(frame.eval_ctx)))

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: N802
        if _escapes(frame):
            super().visit_TemplateData(node, frame)
        else:
            self.write(_literal(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        if _escapes(frame):
            super().visit_Concat(node, frame)
            return
        self.write("concat(map(str, ")
        self.visit_List(nodes.List(node.nodes), frame)
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _literal("".join(group))


def _literal(value: Any) -> str:
    """Return the source of a constant."""
    if type(value) is str:
        return f"environment.literal({value!r})"
    if type(value) is list:
        return f"[{', '.join(map(_literal, value))}]"
    if type(value) is tuple:
        return f"({''.join(f'{_literal(item)}, ' for item in value)})"
    if type(value) is dict:
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    return str(value) if isinstance(value, float) else repr(value)


def _escapes(frame: Frame) -> bool:
    return bool(frame.eval_ctx.volatile or frame.eval_ctx.autoescape)


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``, which marks text of the assistant for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The function ``dict`` of templates, without the other attributes of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which reach internals of Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self = args[0]
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates."""

    code_generator_class = _TrackedLiterals
    concat = staticmethod(join)
    literal = staticmethod(lru_cache(maxsize=None)(TrackedText.from_template))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters |= {"tojson": _to_json, "join": _join}
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda format: datetime.now().strftime(format),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        text = getattr(value, "__self__", None)
        if wrapper is None or not isinstance(text, TrackedText):
            return wrapper
        formatter = SandboxedFormatter(self)
        if value.__name__ == "format_map":
            return lambda fields: format_fields(formatter, text, (), fields)
        return lambda *args, **kwargs: format_fields(formatter, text, args, kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@jinja2.pass_eval_context
def _join(
    context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    if context.autoescape:
        return filters.sync_do_join(context, value, d, attribute)
    if attribute is not None:
        value = map(filters.make_attrgetter(context.environment, attribute), value)
    return join(map(str, value), str(d))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")
