"""``annotate`` names the dims of an unannotated model: it traces the loss and finds which dims belong together."""
