"""A whole deployment on one machine: `headrace up`, `down` and `status`."""
