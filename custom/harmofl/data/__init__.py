"""From files at a site to tensors."""
