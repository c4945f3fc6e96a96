"""Memory on a chosen node, and where pages are."""
