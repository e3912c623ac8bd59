"""Members with a valid key whose words are false."""
