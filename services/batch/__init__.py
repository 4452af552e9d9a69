"""`headrace batch`: answer the requests of a file."""
