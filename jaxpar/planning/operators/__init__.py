"""A model's operators as a graph, and searches for the sharding of each: by propagation, by halving, exact."""
