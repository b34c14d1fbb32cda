"""Low-bit quantization of language models with aespa, as a PyTorch Lightning application."""

__version__ = "0.1.0"
