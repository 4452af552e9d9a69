"""The codec in plain torch: the specification of both backends."""
