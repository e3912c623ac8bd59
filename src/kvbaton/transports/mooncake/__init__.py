"""mooncake: READ by Mooncake's transfer engine."""
