"""Several processes, one a device: who does what, and how they start and end."""
