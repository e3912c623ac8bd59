"""Each part of the rank links compared with a model of its laws."""
