"""Mathematics on tensors: no federation, no files."""
