"""The load generator: requests at times drawn before the run, and what became of them."""
