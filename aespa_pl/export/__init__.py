"""Pack models for engines: each format is proven by reading its own files back.

Read ``quantized.py`` first: a finished run as a value. ``format.py`` is the interface of a format, and its
proof; ``folder.py`` has what the formats share that are a Hugging Face folder; ``engines.py`` asks the
engines that are installed.
"""
