"""Placement of requests on encoder workers."""
