"""Grammars that constrain output: compiling them, and the tokens that they allow next."""
