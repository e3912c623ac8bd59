"""Messages between nodes: their shapes, bytes, versions, and the ticket."""
