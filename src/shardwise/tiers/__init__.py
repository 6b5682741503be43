"""Where bytes wait outside the device: state and weights on the host or a disk, and activations that leave."""
