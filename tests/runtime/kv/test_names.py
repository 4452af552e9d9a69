"""Names of KV formats, which are checked without importing the formats."""

from runtime.kv import names, registry


def test_names_are_those_of_the_registered_formats() -> None:
    assert set(names.COMPRESSED) == registry.COMPRESSED.keys()
    assert set(names.CALIBRATED) == registry.CALIBRATED.keys()
