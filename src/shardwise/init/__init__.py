"""Values for models without: on the meta device, or partly loaded."""
