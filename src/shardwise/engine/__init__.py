"""When parameters are unsharded, freed and their gradients reduced: in forward, in backward, between them."""
