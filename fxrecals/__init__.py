"""Train PyTorch models under a byte limit on the true peak of activations."""

__version__ = "0.1.0.dev0"
