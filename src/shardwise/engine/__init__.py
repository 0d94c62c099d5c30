"""When parameters are gathered, freed and their gradients reduced: forward, backward, and what is between."""
