"""What is known of optimizers that DTensors do not suit, and what is done about it before they step."""
