"""MoRI for kvbaton: READ by AMD's mori.io, as a transport of its own distribution. Never run on hardware."""
