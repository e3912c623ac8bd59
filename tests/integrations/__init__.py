"""Import paths and servers of other systems: what of them needs neither."""
