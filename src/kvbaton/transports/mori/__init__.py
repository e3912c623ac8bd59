"""mori: READ by AMD's mori.io; never run on hardware."""
