"""The commands that this distribution adds to `kvbaton`: parse and print only."""
