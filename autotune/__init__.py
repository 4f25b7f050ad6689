"""Sweeps over kernel specialisations on a GPU, and the shipped tables that operators read (`cute_kernels.configs.tables`)."""
