"""hone: an inference server that makes the models it serves faster while it serves them."""

__version__ = "0.1.0"
