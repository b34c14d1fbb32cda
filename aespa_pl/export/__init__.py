"""Pack models for engines: each format has a file here, and is proven by reading its own files back.

Read ``quantized.py`` first: a finished run as a value. ``format.py`` is the interface of a format,
``folder.py`` what the formats share that are a Hugging Face folder; ``proof.py`` compares what was written
with the run, ``engines.py`` asks the engines that are installed.
"""
