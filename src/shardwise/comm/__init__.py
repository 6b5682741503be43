"""Row 2: who the ranks are, and everything that travels between them. The only room that imports torch.distributed."""
