"""The hardware under a mesh: accelerators, links and topologies."""
