"""Questions with known answers, put to parts of the product beside each world."""
