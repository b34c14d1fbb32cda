"""Write files whole or not at all, and keep tensors that wait on disk."""
