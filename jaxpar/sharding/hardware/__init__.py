"""What a mesh is laid on: accelerators, links, topologies."""
