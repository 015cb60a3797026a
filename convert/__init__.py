"""From PyTorch checkpoints to ours and back; modules `convert`, `verify`, `export`, and `source`, which reads any of them.

Importing this starts no device.
"""
