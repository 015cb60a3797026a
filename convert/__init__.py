"""From PyTorch checkpoints to ours and back: `convert`, `verify`, `export`, and `source`, which reads any of them.

Importing this starts no device.
"""
