"""Compile layer: disk cache, fake tensors, manifest, ahead-of-time build, resource report."""
