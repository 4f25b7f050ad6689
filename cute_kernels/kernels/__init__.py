"""Kernel classes, one a file. Each file has `build(key)`, the only caller of `cute_compile` in it."""
