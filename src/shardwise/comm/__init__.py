"""Import row 2: the ranks and everything that they exchange. The only package that imports torch.distributed."""
