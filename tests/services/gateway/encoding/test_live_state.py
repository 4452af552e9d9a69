"""The encoder and its workers in the state of the live page."""

from tests.services.gateway.encoding.conftest import EncoderSite


async def test_state_has_the_encoder_and_its_workers(site: EncoderSite) -> None:
    await site.embed("abc")
    state = (await site.http.get("/page/state")).json()
    assert state["model"] == {"name": "tiny", "context_length": None, "generates": False}
    encoder = state["encoder"]
    assert (encoder["name"], encoder["max_tokens"], encoder["workers_total"]) == ("tiny", 64, 1)
    (worker,) = encoder["workers"]
    assert (worker["name"], worker["state"]) == ("encoder-0", "ready")
    assert worker.keys() == {"name", "state", "queue_tokens", "tokens_s", "running", "waiting"}
    assert "127.0.0.1" not in str(state)
    assert "abc" not in str(state["encoder"])
