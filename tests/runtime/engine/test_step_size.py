"""Size of planned steps: tokens, and the context that they attend to."""

from runtime.core.plan import StepSize
from runtime.engine import Add
from tests.runtime.tiny import engine_of, request_of, tiny_model


def test_size_counts_each_token_with_the_context_that_it_attends_to() -> None:
    engine = engine_of(tiny_model(), step_tokens=32, chunk_tokens=32)
    sizes = []
    commands = [Add(request_of("a", 40, 3))]
    while engine.has_work or commands:
        engine.plan(commands)
        sizes.append(engine.planned.size if engine.planned else None)
        engine.compute()
        commands = [Add(request_of("b", 16, 1))] if len(sizes) == 2 else []
    first, second = sum(range(1, 33)), sum(range(33, 41))
    assert sizes == [
        StepSize(decoded=0, tokens=32, context=first),
        StepSize(decoded=0, tokens=8, context=second),
        StepSize(decoded=1, tokens=1 + 16, context=41 + sum(range(1, 17))),
        StepSize(decoded=1, tokens=1, context=42),
    ]
    assert [size.prompt_tokens for size in sizes if size] == [32, 8, 16, 0]
    assert engine.planned is None
