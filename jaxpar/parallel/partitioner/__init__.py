"""Operations that XLA's partitioner computes wrongly: which, under which shardings, and how a step avoids them."""
