"""Full states of models and optimizers, and full parameters lent to the caller."""
