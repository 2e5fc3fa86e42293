"""What a chat template's text tells of it: the form of content it wants, the switches and markers it has.

The endpoint decides by the same text.  Called by data/render.py and its callers.
"""

from collections.abc import Iterator
from functools import cached_property

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from recipes.errors import UserError

_THINKING_SWITCH = "enable_thinking"
_THINK_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


class _GenerationMarkers(Extension):
    """transformers' tag around what an assistant says; nothing else makes a scope of a template's part."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarkers, loopcontrols]
)


class TemplateSource:
    """One template's text."""

    def __init__(self, text: str) -> None:
        """Raises UserError for text that is no template."""
        self.text = text
        try:
            self._tree = _ENVIRONMENT.parse(text)
        except TemplateSyntaxError as error:
            raise UserError(f"chat template, line {error.lineno}: {error.message}") from error

    @property
    def knows_developers(self) -> bool:
        return '"developer"' in self.text or "'developer'" in self.text

    @cached_property
    def has_thinking_switch(self) -> bool:
        return _THINKING_SWITCH in meta.find_undeclared_variables(self._tree)

    @cached_property
    def has_generation_markers(self) -> bool:
        return self._tree.find(nodes.Scope) is not None

    @cached_property
    def think_markers(self) -> tuple[str, str] | None:
        """The beginning and the end of reasoning, where the template writes or looks for them."""
        return next((pair for pair in _THINK_MARKERS if pair[0] in self.text or pair[1] in self.text), None)

    @cached_property
    def loops_over_parts(self) -> bool:
        """Whether some loop goes over a message's content, which then is a list of parts to this template."""
        in_macros = {id(loop) for macro in self._macros for loop in macro.find_all(nodes.For)}
        loops = self._tree.find_all(nodes.For)
        return any(
            self._is_content(loop.iter)
            or (id(loop) not in in_macros and _read_name(loop.iter) == ("content", None))
            for loop in loops
        ) or any(self._loops_over_content(macro) for macro in self._macros)

    @cached_property
    def _macros(self) -> list[nodes.Macro]:
        return list(self._tree.find_all(nodes.Macro))

    @cached_property
    def _message_names(self) -> set[str]:
        """Of the variables of loops over the messages, or over what was assigned from them."""
        lists = {"messages"}
        assigned = [
            (node.target.name, _read_name(node.node))
            for node in self._tree.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name)
        ]
        while (
            more := {name for name, read in assigned if read and read[1] is None and read[0] in lists} - lists
        ):
            lists |= more
        loops = [(loop.target, _read_name(loop.iter)) for loop in self._tree.find_all(nodes.For)]
        return {
            target.name
            for target, read in loops
            if isinstance(target, nodes.Name) and read and read[1] is None and read[0] in lists
        }

    def _is_content(self, node: nodes.Node) -> bool:
        read = _read_name(node)
        return read is not None and read[0] in self._message_names and read[1] == "content"

    def _loops_over_content(self, macro: nodes.Macro) -> bool:
        """Over a parameter that is given a message's content somewhere."""
        given = {name for name, value in self._find_arguments(macro) if self._is_content(value)}
        loops = (loop.iter for loop in macro.find_all(nodes.For))
        return any(isinstance(looped, nodes.Name) and looped.name in given for looped in loops)

    def _find_arguments(self, macro: nodes.Macro) -> Iterator[tuple[str, nodes.Node]]:
        names = [argument.name for argument in macro.args]
        for call in self._tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                yield from zip(names, call.args, strict=False)
                yield from ((keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names)


def _read_name(node: nodes.Node | None) -> tuple[str, str | None] | None:
    """x -> (x, None), x.key and x["key"] -> (x, key), each through filters, tests and slices; else None."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _read_name(node.node)
    if isinstance(node, nodes.Name):
        return node.name, None
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _read_name(node.node)
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return node.node.name, node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name):
        return (node.node.name, node.arg.value) if isinstance(node.arg, nodes.Const) else None
    return None
