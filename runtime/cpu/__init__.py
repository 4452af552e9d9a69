"""What compiled CPU loops share: just-in-time compilation and register tiles."""
