"""Planning: real topologies and the real compiler, without the hardware."""
