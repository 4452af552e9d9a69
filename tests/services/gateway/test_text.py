"""Detokenization of choices, and stop strings."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import sampling_pb2
from services.gateway.served import ServedModel
from services.gateway.text import Stops, StopStringFilter, TextAssembler

letters = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cut the text at the stop string that ends first (slow reference)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(st.lists(letters, max_size=8), stop_lists)
def test_result_does_not_depend_on_how_text_is_split(parts: list[str], stops: list[str]) -> None:
    strings = StopStringFilter(stops)
    shown = ""
    stopped = False
    for part in parts:
        text, stopped = strings.push(part)
        shown += text
        if stopped:
            break
    else:
        shown += strings.finish()
    assert (shown, stopped) == reference("".join(parts), stops)


@given(st.lists(letters, max_size=8), stop_lists)
def test_only_a_possible_stop_string_is_buffered(parts: list[str], stops: list[str]) -> None:
    strings = StopStringFilter(stops)
    shown = seen = ""
    for part in parts:
        text, stopped = strings.push(part)
        shown, seen = shown + text, seen + part
        if stopped:
            return
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_output_after_a_stop_string_is_dropped(model: ServedModel) -> None:
    ids = model.tokenizer.encode("a b c d")
    tokens = [sampling_pb2.Token(choice=0, index=i, token=t) for i, t in enumerate(ids)]
    assembly = TextAssembler(model.tokenizer, 1, Stops(["b"]))
    (piece,) = assembly.push(tokens, [(0, sampling_pb2.FINISH_REASON_LENGTH)])
    assert (piece.text, piece.finish) == ("a ", sampling_pb2.FINISH_REASON_STOP)
    assert len(piece.tokens) == 2
    assert assembly.done
    assert assembly.push(tokens, []) == []
