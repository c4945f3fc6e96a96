"""Decisions: which layer is cut how, written down as a schema, and a graph rewritten by it."""
