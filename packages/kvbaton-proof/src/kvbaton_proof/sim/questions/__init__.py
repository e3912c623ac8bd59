"""Questions with known answers, put to parts of the product with each world."""
