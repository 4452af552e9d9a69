"""The ranks of a worker: what each of them holds, and the collectives between them."""
