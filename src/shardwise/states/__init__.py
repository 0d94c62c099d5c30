"""What a model starts from, and its full state: initialised, taken out, put in, written, averaged."""
