"""What ranks tell each other beside tensors: agreements, comparisons, failures."""
