"""A complete deployment on one machine: `headrace up`, `down` and `status`."""
