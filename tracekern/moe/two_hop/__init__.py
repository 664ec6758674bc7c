"""Dispatch across nodes in two hops (docs/two_hop.md): where tokens go and where their rows come to lie."""
