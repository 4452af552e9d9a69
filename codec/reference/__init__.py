"""Reference backend: the specification, in torch."""
