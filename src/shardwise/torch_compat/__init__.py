"""Every private or version-dependent use of torch, by subject, with the reason."""
