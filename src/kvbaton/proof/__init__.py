"""What proves the product: may import everything; of the product only the command line imports it."""
