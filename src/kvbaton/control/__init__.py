"""The control plane: authenticated frames between nodes, keys, and discovery."""
