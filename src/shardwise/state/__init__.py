"""Full states of models and optimizers, summoned parameters, averages."""
