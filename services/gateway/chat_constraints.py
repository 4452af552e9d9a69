"""Checks of the grammars of messages: reasoning, tool calls and constrained content."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from runtime.grammar.spec import GrammarSpec, InvalidGrammar
from services.common.errors import InvalidRequest
from services.gateway.constraints import Constraint
from services.gateway.grammars import GrammarChecker
from services.gateway.keys import Tenant
from services.gateway.output.lark import Marks
from services.gateway.output.message_grammar import (
    OBJECT,
    CallableTool,
    CallGrammar,
    MessageGrammar,
)

_TOOLS = "tools"


@dataclass(frozen=True)
class MessageChecker:
    """Checks that the grammar of a message can be compiled.

    Attributes:
        checker: compiles constraints.
        owner: owner of the request.
        marks: writes the marks of the formats of the model.
        compute: calls a function in a thread if the request is large.
    """

    checker: GrammarChecker
    owner: Tenant
    marks: Marks
    compute: Callable[[Callable[[], GrammarSpec]], Awaitable[GrammarSpec]]

    async def check(self, grammar: MessageGrammar, answer: Constraint | None) -> GrammarSpec:
        """Return the constraint on the output.

        If the schema of a function that is not strict cannot be compiled, its arguments may be any
        object.

        Args:
            answer: constraint of the client on the content.

        Raises:
            InvalidRequest: a constraint is invalid; ``param`` is the client's field.
            Overloaded, Unavailable: see `GrammarChecker.check`.
        """
        spec = await self._check(grammar, answer)
        if grammar.calls is not None and grammar.calls.required:
            self.checker.metrics.required_calls.inc()
        return spec

    async def _check(self, grammar: MessageGrammar, answer: Constraint | None) -> GrammarSpec:
        if grammar.calls is None and answer is not None:
            return await self._checked(grammar, answer.field)
        try:
            return await self._checked(grammar, _TOOLS)
        except InvalidRequest:
            if grammar.answer is not None:
                await self.checker.check(answer, self.owner)
            calls = grammar.calls and await self._supported(grammar.calls)
            if calls == grammar.calls:
                raise
        return await self._checked(replace(grammar, calls=calls), _TOOLS)

    async def _checked(self, grammar: MessageGrammar, field: str) -> GrammarSpec:
        try:
            spec = await self.compute(lambda: grammar.spec(self.marks))
        except InvalidGrammar as error:
            raise self.checker.refusal(field, error) from None
        await self.checker.check(Constraint(spec, field), self.owner)
        return spec

    async def _supported(self, calls: CallGrammar) -> CallGrammar:
        """Replace schemas that cannot be compiled. Raises InvalidRequest if one is strict."""
        tools = []
        for tool in calls.tools:
            try:
                await self._check_tool(calls, tool)
            except InvalidRequest:
                if tool.is_strict:
                    raise
                tools.append(replace(tool, parameters=OBJECT))
            else:
                tools.append(tool)
        return replace(calls, tools=tuple(tools))

    async def _check_tool(self, calls: CallGrammar, tool: CallableTool) -> None:
        """Raise InvalidRequest if the schema of a function cannot be compiled."""
        try:
            spec = calls.format.constraint(tool.parameters)
        except InvalidGrammar as error:
            raise self.checker.refusal(tool.field, error) from None
        await self.checker.check(Constraint(spec, tool.field), self.owner)
