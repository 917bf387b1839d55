"""From the files of a checkpoint to weights: tensors that are checked and read, and the fused matrices made of them."""
