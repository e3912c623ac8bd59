"""Each part of the rank links beside a model of its laws."""
