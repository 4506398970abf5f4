"""``audit``: the FLOPs, memory traffic and collectives of a compiled program, from its HLO text."""
