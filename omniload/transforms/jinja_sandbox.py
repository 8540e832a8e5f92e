"""The jinja2 sandbox of chat templates: what a template can't do, and can't use up.

jinja2's immutable sandbox keeps a template from Python's objects. Here its work is bounded too, so
that a template from elsewhere can't fill the memory or run for ever: sizes of texts, numbers and
output, and the rounds of `range`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["GENERATION_CLOSE", "GENERATION_OPEN", "ChatEnvironment", "rendered"]

#: Stand in the output for `{% generation %}` and its end; no valid text has these code points.
GENERATION_OPEN = "\ufdd0"
GENERATION_CLOSE = "\ufdd1"

_MAX_CHARS = 16 << 20
_MAX_ROUNDS = 1_000_000
_MAX_BITS = 4096
_WIDTH = re.compile(r"\d{6,}|\*")


class _Generation(Extension):
    """Hugging Face's tag around what the model writes."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Any) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [
            nodes.Output([nodes.TemplateData(mark)], lineno=line)
            for mark in (GENERATION_OPEN, GENERATION_CLOSE)
        ]
        return [marks[0], *body, marks[1]]


class _BoundedConcat(NodeTransformer):
    """Makes `a ~ b` a filter, so that its result can be bounded."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - jinja2's name
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "bounded_concat", [], [], None, None, lineno=node.lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """What chat templates may use: jinja2, `raise_exception`, `tojson`, break and continue."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._rounds = 0
        self.filters["tojson"] = _tojson
        self.filters["bounded_concat"] = _concat
        for name in ("center", "indent"):
            self.filters[name] = _bounded_filter(self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["range"] = self._range

    def start(self) -> None:
        """Begin to count anew."""
        self._rounds = 0

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        try:
            self._rounds += len(numbers)
        except OverflowError:
            self._rounds = _MAX_ROUNDS + 1
        if self._rounds > _MAX_ROUNDS:
            raise SecurityError(f"a range of more than {_MAX_ROUNDS:,} numbers in all")
        return numbers

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _BoundedConcat().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute, unless the result were too large."""
        _check_size(_size_of(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call, unless a method of a text is told to make a huge one."""
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            _check_size(max((a for a in args if isinstance(a, int)), default=0))
            if getattr(obj, "__name__", "") in ("format", "format_map") and _WIDTH.search(text):
                raise SecurityError("a format with a huge width")
        return super().call(context, obj, *args, **kwargs)


def rendered(template: jinja2.Template, **names: Any) -> str:
    """Render a template of a ChatEnvironment, up to 16 MiB.

    Raises:
        SecurityError: more than that, or what the sandbox forbids.
    """
    environment = template.environment
    if isinstance(environment, ChatEnvironment):
        environment.start()
    return "".join(_bounded(template.generate(**names)))


def _bounded(parts: Iterator[str]) -> Iterator[str]:
    total = 0
    for part in parts:
        total += len(part)
        _check_size(total)
        yield part


def _check_size(chars: int) -> None:
    if chars > _MAX_CHARS:
        raise SecurityError(f"a text of more than {_MAX_CHARS >> 20} Mi characters")


def _size_of(operator: str, left: Any, right: Any) -> int:
    sized = (str, bytes, list, tuple)
    if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
        return len(left) + len(right)
    if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
        raise SecurityError("a format with a huge width")
    if operator == "*":
        for text, times in ((left, right), (right, left)):
            if isinstance(text, sized) and isinstance(times, int):
                return len(text) * max(times, 0)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length()
        if bits > _MAX_BITS or right.bit_length() > _MAX_BITS:
            raise SecurityError("a number of more than a thousand digits")
    return 0


def _concat(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _bounded_filter(filter_: Any) -> Any:
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        size = max((a for a in given if isinstance(a, int)), default=0)
        _check_size(size * (1 + str(value).count("\n")))
        return filter_(value, *args, **kwargs)

    return bounded


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
