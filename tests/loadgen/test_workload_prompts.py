"""Generated prompts: lengths as counted by the target's tokenizer, and shared prefixes."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from loadgen.errors import UsageError
from loadgen.workload.base import RequestSpec, Tokenizer
from loadgen.workload.lengths import Fixed, Lengths, Uniform
from loadgen.workload.prefix import SharedPrefix
from loadgen.workload.prompts import PromptWriter
from loadgen.workload.synthetic import Synthetic
from loadgen.workload.tokenizer import LocalTokenizer, RemoteTokenizer
from loadgen.workload.vocabulary import Vocabulary
from services.common.model_source import resolve_model
from services.tokenizer.loading import load_tokenizer
from tests.loadgen.workloads import single


def bytes_with_ends(*, eos: bool) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with four merges, which adds BOS and optionally EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {
        token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "Ġw", "Ġwa", "at", "er"])
    }
    merges = [("Ġ", "w"), ("Ġw", "a"), ("a", "t"), ("e", "r")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if eos else "<s> $A",
        pair=None,
        special_tokens=[("<s>", 0), ("</s>", 1)],
    )
    return backend


def with_bos(folder: Path) -> tokenizers.Tokenizer:
    """Return SmolLM2's tokenizer, changed to add BOS to each text."""
    load_tokenizer(resolve_model("smollm2-135m")).save(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair=None, special_tokens=[("<|im_start|>", 1)]
    )
    return backend


def saved(backend: tokenizers.Tokenizer, folder: Path) -> LocalTokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return LocalTokenizer(folder)


@pytest.fixture(scope="module", params=["smollm2", "bytes", "bytes-eos"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "smollm2":
        load_tokenizer(resolve_model("smollm2-135m")).save(folder)
        return LocalTokenizer(folder / "tokenizer.json")
    return saved(bytes_with_ends(eos=request.param == "bytes-eos"), folder)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    folder = tmp_path_factory.mktemp("smollm2")
    load_tokenizer(resolve_model("smollm2-135m")).save(folder)
    return LocalTokenizer(folder)


def some(
    tokenizer: Tokenizer,
    count: int,
    *,
    token_ids: bool,
    seed: int = 0,
    inputs: Lengths | None = None,
    prefix: SharedPrefix | None = None,
) -> list[RequestSpec]:
    writer = PromptWriter(tokenizer, token_ids=token_ids)
    workload = Synthetic(inputs or Uniform(30, 300), Uniform(1, 9), writer, prefix)
    return list(islice(workload.requests(seed), count))


def common(first: str | tuple[int, ...], second: str | tuple[int, ...]) -> int:
    both = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(first), len(second)))


def test_text_has_the_drawn_length(tokenizer: Tokenizer) -> None:
    texts = some(tokenizer, 40, token_ids=False)
    ids = some(tokenizer, 40, token_ids=True)
    for text, exact in zip(texts, ids, strict=True):
        assert isinstance(text.prompt, str)
        assert len(tokenizer.encode(text.prompt)) == text.input_tokens == exact.input_tokens
        assert len(single(exact)) == exact.input_tokens
    assert len({ask.input_tokens for ask in texts}) > 20


@settings(max_examples=30)
@given(st.integers(1, 700), st.integers(0, 5))
def test_any_length_is_exact(smollm2: LocalTokenizer, tokens: int, seed: int) -> None:
    for token_ids in (True, False):
        (ask,) = some(smollm2, 1, token_ids=token_ids, seed=seed, inputs=Fixed(tokens))
        encoded = smollm2.encode(ask.prompt) if isinstance(ask.prompt, str) else single(ask)
        assert len(encoded) == ask.input_tokens == tokens


def test_token_ids_have_special_tokens_and_words(tmp_path: Path) -> None:
    tokenizer = saved(bytes_with_ends(eos=True), tmp_path)
    (ask,) = some(tokenizer, 1, token_ids=True, inputs=Fixed(400))
    assert isinstance(ask.prompt, tuple)
    assert ask.prompt[0] == 0
    assert not {0, 1} & set(ask.prompt[1:]), "special tokens only at the ends"
    words = tokenizer.decode(list(ask.prompt[1:])).split()
    assert len(set(words)) > 40
    assert any(word.endswith(".") for word in words)


def test_unreachable_text_length_is_reported(tmp_path: Path) -> None:
    tokenizer = saved(bytes_with_ends(eos=True), tmp_path)
    (ask,) = some(tokenizer, 1, token_ids=False, inputs=Fixed(1))
    assert isinstance(ask.prompt, str)
    assert ask.prompt
    assert ask.input_tokens == len(tokenizer.encode(ask.prompt)) == 3


@pytest.mark.parametrize("token_ids", [True, False])
def test_same_seed_makes_the_same_requests(smollm2: LocalTokenizer, token_ids: bool) -> None:
    first = some(smollm2, 40, token_ids=token_ids, seed=1)
    assert first == some(smollm2, 40, token_ids=token_ids, seed=1)
    assert first[:5] == some(smollm2, 5, token_ids=token_ids, seed=1)
    other = some(smollm2, 40, token_ids=token_ids, seed=2)
    assert not {ask.prompt for ask in first} & {ask.prompt for ask in other}


def test_prompts_share_no_long_prefix(smollm2: LocalTokenizer) -> None:
    asks = some(smollm2, 300, token_ids=True)
    longest = max(common(single(a), single(b)) for a, b in combinations(asks, 2))
    assert longest < 8, (
        "with 428 words, eight equal ones among 45,000 pairs have a probability of 10^-16"
    )


@pytest.mark.parametrize("bos", [False, True])
def test_groups_share_exactly_their_prefix(
    smollm2: LocalTokenizer, tmp_path: Path, bos: bool
) -> None:
    tokenizer = saved(with_bos(tmp_path), tmp_path) if bos else smollm2
    prefix = SharedPrefix(tokens=50, groups=3)
    asks = some(tokenizer, 60, token_ids=True, prefix=prefix)
    assert len({single(ask)[:50] for ask in asks}) == 3
    plain = some(tokenizer, 60, token_ids=True)
    assert [ask.input_tokens - 50 for ask in asks] == [ask.input_tokens for ask in plain]
    within: set[int] = set()
    between: set[int] = set()
    for a, b in combinations(asks, 2):
        same = single(a)[:50] == single(b)[:50]
        (within if same else between).add(common(single(a), single(b)))
    assert min(within) == 50
    assert max(within) < 58
    assert max(between) < 8


def test_generated_prompt_may_end_within_a_word(tmp_path: Path) -> None:
    tokenizer = saved(bytes_with_ends(eos=True), tmp_path)
    vocabulary = Vocabulary(tokenizer)
    drawn = vocabulary.draw(np.random.default_rng(0), 200)
    whole = vocabulary.passage(drawn, 200).ids
    for tokens in range(200):
        passage = vocabulary.passage(drawn, tokens)
        assert passage.ids == whole[:tokens]
        assert 0 <= len(vocabulary.body(tokenizer.encode(passage.text))) - tokens < 10


def test_texts_share_their_prefix_as_tokens(tokenizer: Tokenizer) -> None:
    asks = some(tokenizer, 12, token_ids=False, prefix=SharedPrefix(50))
    encoded = [tuple(tokenizer.encode(str(ask.prompt))) for ask in asks]
    assert len({ids[:50] for ids in encoded}) == 1
    assert [len(ids) for ids in encoded] == [ask.input_tokens for ask in asks]


@pytest.mark.parametrize("wrong", [(0, 1), (1, 0), (-5, 1)])
def test_empty_prefix_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="at least 1 token and 1 group"):
        SharedPrefix(*wrong)


@pytest.mark.parametrize("skew", [0.0, 1.0, 2.0])
def test_popularity_of_prefixes_follows_zipfs_law(skew: float) -> None:
    prefix = SharedPrefix(10, groups=4, skew=skew)
    chosen = prefix.choose(np.random.default_rng(0), 20_000)
    weights = [rank**-skew for rank in range(1, 5)]
    for group, weight in enumerate(weights):
        assert chosen.count(group) / 20_000 == pytest.approx(weight / sum(weights), abs=0.02)


@pytest.mark.parametrize("skew", [-1.0, 11.0, float("nan")])
def test_impossible_skew_is_refused(skew: float) -> None:
    with pytest.raises(UsageError, match="0 to 10"):
        SharedPrefix(10, skew=skew)


@pytest.mark.parametrize("token_ids", [False, True])
def test_cold_prompts_have_unique_beginnings_and_the_same_lengths(
    smollm2: LocalTokenizer, token_ids: bool
) -> None:
    writer, prefix = PromptWriter(smollm2, token_ids=token_ids), SharedPrefix(50)
    plain, cold, again = (
        list(islice(Synthetic(Fixed(30), Fixed(1), writer, prefix, cold).requests(0), 20))
        for cold in (False, True, True)
    )
    starts = set()
    for one in cold + again:
        ids = smollm2.encode(one.prompt) if isinstance(one.prompt, str) else single(one)
        assert len(ids) == one.input_tokens == 80
        starts.add(tuple(ids[:8]))
    assert len(starts) == 40, "each run has others, whatever the seed"
    assert [one.input_tokens for one in plain] == [one.input_tokens for one in cold]


def test_variants_share_lengths_and_prefixes_alone(smollm2: LocalTokenizer) -> None:
    writer, prefix = PromptWriter(smollm2, token_ids=True), SharedPrefix(50)
    first, other = (
        list(islice(Synthetic(Uniform(20, 90), Fixed(1), writer, prefix, variant=n).requests(0), 9))
        for n in (0, 1)
    )
    for a, b in zip(first, other, strict=True):
        assert a.input_tokens == b.input_tokens
        assert 50 <= common(single(a), single(b)) < 58


def test_tokenizer_without_english_words_is_refused() -> None:
    class ConstantTokenizer:
        def encode(self, text: str) -> list[int]:
            return [0, 3]

        def decode(self, tokens: list[int]) -> str:
            return "?"

    with pytest.raises(UsageError, match="cannot encode English words"):
        PromptWriter(ConstantTokenizer(), token_ids=True)


def test_local_tokenizer_neither_truncates_nor_pads(tmp_path: Path) -> None:
    backend = bytes_with_ends(eos=False)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = saved(backend, tmp_path)
    assert len(tokenizer.encode("abcdefgh")) == 9
    assert tokenizer.decode(tokenizer.encode("hi")) == "<s>hi"


@pytest.mark.parametrize("content", [None, "{}"])
def test_invalid_tokenizer_file_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        LocalTokenizer(file)


class Server(ThreadingHTTPServer):
    """Server with vLLM's tokenizer endpoints.

    Attributes:
        requests: received requests.
        answer: status and body to send instead of the correct answer.
    """

    daemon_threads = True

    def __init__(self, tokenizer: LocalTokenizer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer = tokenizer
        self.requests: list[dict[str, object]] = []
        self.answer: tuple[int, bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(
            {"path": self.path, "key": self.headers["Authorization"], **body}
        )
        status, content = self.server.answer or (200, self.respond(body))
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def respond(self, body: dict[str, Any]) -> bytes:
        tokenizer = self.server.tokenizer
        if self.path == "/tokenize":
            tokens = tokenizer.encode(body["prompt"])
            return json.dumps({"tokens": tokens, "count": len(tokens)}).encode()
        return json.dumps({"prompt": tokenizer.decode(body["tokens"])}).encode()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(smollm2: LocalTokenizer) -> Iterator[Server]:
    with Server(smollm2) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_remote_tokenizer_uses_the_servers_endpoints(
    server: Server, smollm2: LocalTokenizer, ending: str
) -> None:
    with RemoteTokenizer(
        server.url + ending, model="small", headers={"Authorization": "Bearer k"}
    ) as remote:
        tokens = remote.encode("Blue water. Été")
        assert tokens == smollm2.encode("Blue water. Été")
        assert remote.decode(tokens) == "Blue water. Été"
    assert server.requests == [
        {"path": "/tokenize", "key": "Bearer k", "model": "small", "prompt": "Blue water. Été"},
        {"path": "/detokenize", "key": "Bearer k", "model": "small", "tokens": tokens},
    ]


def test_thousand_prompts_of_ids_need_few_tokenizer_calls(
    server: Server, smollm2: LocalTokenizer
) -> None:
    with RemoteTokenizer(server.url) as remote:
        specs = some(remote, 1_000, token_ids=True)
    assert len(server.requests) < 10
    assert specs == some(smollm2, 1_000, token_ids=True)


def test_each_text_needs_one_tokenizer_call(server: Server, smollm2: LocalTokenizer) -> None:
    with RemoteTokenizer(server.url) as remote:
        specs = some(remote, 48, token_ids=False)
    assert specs == some(smollm2, 48, token_ids=False)
    assert len(server.requests) < 10 + 48


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, b"{}"), "answered 404.*tokenizer.json"),
        ((200, b"<html>"), "returned no 'tokens'"),
        ((200, b"[]"), "returned no 'tokens'"),
        ((200, b"{}"), "returned no 'tokens'"),
        ((200, b'{"tokens": 3}'), "did not return a list of token ids"),
        ((200, b'{"tokens": ["a"]}'), "did not return a list of token ids"),
    ],
)
def test_missing_tokenizer_endpoint_is_explained(
    server: Server, answer: tuple[int, bytes], message: str
) -> None:
    server.answer = answer
    with RemoteTokenizer(server.url) as remote, pytest.raises(UsageError, match=message):
        PromptWriter(remote, token_ids=True)


@pytest.mark.parametrize("base", ["http://127.0.0.1:9", "ftp://x", "http://[::", "no address"])
def test_unreachable_tokenizer_is_named(base: str) -> None:
    with RemoteTokenizer(base) as remote, pytest.raises(UsageError, match="cannot reach"):
        remote.encode("the")
