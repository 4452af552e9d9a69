"""Content of manifests."""

from loadgen.manifest import manifest


def test_arguments_contain_no_secrets() -> None:
    given = [
        "run", "http://user:secret@host:1/v1", "--api-key", "secret", "--api-key=secret",
        "--check-against", "https://secret@other/v1", "--metrics=http://a:secret@b/metrics",
        "--input", "fixed:5",
    ]  # fmt: skip
    kept = manifest("http://host:1/v1", "model", 3, given)
    assert "secret" not in str(kept)
    assert kept["arguments"][:2] == ["run", "http://…@host:1/v1"]
    assert kept["arguments"][-2:] == ["--input", "fixed:5"]
    assert kept["seed"] == 3
